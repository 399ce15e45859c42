"""Notices of failures between ranks, their bytes, and the decision which rank broke a link.

A connection carries frames. A frame is either one byte, :data:`BEAT`, a sign of life, or a notice: the byte 1, the
length of the rest in two bytes, big-endian, and a JSON list ``[kind, link, ranks, text]``.

Input from a peer is not trusted: every field is checked, lengths are bounded, and invalid bytes raise
:class:`~gradwire.errors.PayloadError`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwire.errors import PayloadError

BEAT = b"\x00"
_NOTICE = 1
_HEAD = struct.Struct(">BH")
MOST_BYTES = 8192
MOST_TEXT, MOST_RANKS, MOST_LINK = 1000, 64, 64

FAILED = "failed"
"""The sender itself failed, in an exchange of the link or elsewhere; ``text`` has the place and the error."""

BECAUSE = "because"
"""The sender cannot continue the link, or at all, because of ``ranks``; ``text`` says what happened to them."""

CLOSED = "closed"
"""The sender has closed the link."""

ENDED = "ended"
"""The sender's process ends in an orderly way; ``text`` says how."""

KINDS = {FAILED, BECAUSE, CLOSED, ENDED}


@dataclass(frozen=True)
class Notice:
    """A notice from a rank to all others.

    Attributes:
        kind: :data:`FAILED`, :data:`BECAUSE`, :data:`CLOSED` or :data:`ENDED`.
        link: Token of the link that it concerns; empty for the whole process.
        ranks: Global ranks that are the cause, for :data:`BECAUSE`.
        text: Explanation, for messages.
    """

    kind: str
    link: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""

    def frame(self) -> bytes:
        """Return the bytes of the notice; a long text is truncated."""
        value = [self.kind, self.link[:MOST_LINK], list(self.ranks[:MOST_RANKS]), readable(self.text)]
        body = json.dumps(value, ensure_ascii=False).encode()
        return _HEAD.pack(_NOTICE, len(body)) + body

    @staticmethod
    def read(body: bytes) -> Notice:
        """Read the body of a notice, which follows its length.

        Raises:
            PayloadError: the body is invalid.
        """
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise PayloadError("a notice is not JSON") from None
        if not isinstance(value, list) or len(value) != 4:
            raise PayloadError("a notice is not a list of four values")
        kind, link, ranks, text = value
        if not (isinstance(kind, str) and isinstance(link, str) and isinstance(text, str) and isinstance(ranks, list)):
            raise PayloadError("a value of a notice has the wrong type")
        if kind not in KINDS or len(link) > MOST_LINK or len(ranks) > MOST_RANKS:
            raise PayloadError("a value of a notice is out of its range")
        if not all(type(rank) is int and 0 <= rank < 1 << 31 for rank in ranks):
            raise PayloadError("a rank in a notice is not a whole number")
        return Notice(kind, link, tuple(ranks), readable(text))


def readable(text: str) -> str:
    """Return a text truncated to the size of a notice, on one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


class Inbox:
    """Received bytes of one connection, split into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Notice]:
        """Add received bytes, and return the notices that are complete.

        Raises:
            PayloadError: the bytes are invalid; the connection cannot be read any further.
        """
        self._bytes += received
        found, at = [], 0
        while at < len(self._bytes):
            if self._bytes[at] == BEAT[0]:
                at += 1
                continue
            if len(self._bytes) - at < _HEAD.size:
                break
            kind, size = _HEAD.unpack_from(self._bytes, at)
            if kind != _NOTICE or size > MOST_BYTES:
                raise PayloadError(f"a frame of kind {kind} and {size} bytes is no notice")
            if len(self._bytes) - at < _HEAD.size + size:
                break
            at += _HEAD.size
            found.append(Notice.read(bytes(self._bytes[at : at + size])))
            at += size
        del self._bytes[:at]
        return found


TOGETHER_S = 0.5
"""Ranks that end within this time of the first are named with it; later ones most likely end because of it."""

MOST_NOTICES = 256
"""Largest number of notices that are kept from each rank."""


@dataclass
class Standing:
    """State of another rank as this one knows it; times are those of ``time.monotonic``.

    Attributes:
        heard_s: Time of the last arrival from it; None before it was connected.
        ended_s: Time when its process ended or its connection broke; None while neither has happened.
        unheard: Reason why its connection broke though its process may be alive; None if the process has ended.
        notices: Its notices by kind and link, with their times of arrival.
    """

    heard_s: float | None = None
    ended_s: float | None = None
    unheard: str | None = None
    notices: dict[tuple[str, str], tuple[Notice, float]] = field(default_factory=dict)

    @property
    def has_vanished(self) -> bool:
        """True if it ended, or gives no sign of life any more, and has sent no notice of a failure or of its end."""
        return self.ended_s is not None and self.first(FAILED, BECAUSE, ENDED) is None

    def take(self, notice: Notice, now_s: float) -> None:
        """Keep a notice if it is the first of its kind and link; drop the oldest if there are too many."""
        self.notices.setdefault((notice.kind, notice.link), (notice, now_s))
        if len(self.notices) > MOST_NOTICES:
            # A program that makes and closes many links sends a notice for each, but only one for the end of its
            # process.
            del self.notices[next(key for key in self.notices if key[0] != ENDED)]

    def first(self, *kinds: str) -> Notice | None:
        """Return the earliest notice of some kinds, for any link."""
        found = [told for told in self.notices.values() if told[0].kind in kinds]
        return min(found, key=lambda told: told[1])[0] if found else None


@dataclass(frozen=True)
class Blame:
    """The cause of a failure: global ranks, and what happened to them."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class _Evidence:
    """A fact that breaks a link: its time, the ranks that caused it, and whether this rank has observed it itself."""

    since_s: float
    ranks: tuple[int, ...]
    text: str
    seen: bool
    orderly: bool = False


def judge(
    standings: Mapping[int, Standing], link: str, *, orderly: bool = True, elsewhere_since_s: float = math.inf
) -> Blame | None:
    """Return which ranks broke a link, or None without evidence.

    A rank that ended because of others is not blamed: the ranks that it names are.

    Args:
        standings: State of the ranks that the link depends on.
        link: Token of the link.
        orderly: True if a rank that closed the link, or whose program ended normally, has broken it.
        elsewhere_since_s: Time from which on notices about other links count, if there is no evidence about this one,
            or only orderly ends; by default none count. After an older failure a program may have continued with new
            links.
    """
    found = [e for rank, standing in standings.items() for e in _evidence(rank, standing, link)]
    if all(e.orderly for e in found):
        troubles = [e for rank, standing in standings.items() for e in _elsewhere(rank, standing)]
        found = [e for e in troubles if e.since_s >= elsewhere_since_s] or found
    found = [e for e in found if orderly or not e.orderly]
    if not found:
        return None
    first_s = min(e.since_s for e in found)
    at_once = [e for e in found if e.since_s - first_s <= TOGETHER_S]
    # Observations of a rank count more than reports about it.
    texts: dict[tuple[int, ...], str] = {}
    named: set[int] = set()
    for evidence in sorted(at_once, key=lambda e: (not e.seen, e.since_s)):
        if not named.issuperset(evidence.ranks) or not (evidence.ranks or texts):
            named.update(evidence.ranks)
            texts.setdefault(evidence.ranks, evidence.text)
    return Blame(tuple(sorted(named)), "; ".join(texts.values()))


def _evidence(rank: int, standing: Standing, link: str) -> Iterable[_Evidence]:
    about = {kind: told for (kind, of), told in standing.notices.items() if of == link}
    ended = _ending(rank, standing)
    if FAILED in about or BECAUSE in about:
        yield from (_trouble(rank, *about[kind]) for kind in (FAILED, BECAUSE) if kind in about)
    elif ended is not None:
        yield ended
    elif CLOSED in about:
        closed, since_s = about[CLOSED]
        yield _Evidence(since_s, (rank,), f"rank {rank} closed its link{closed.text}", True, orderly=True)


def _elsewhere(rank: int, standing: Standing) -> Iterable[_Evidence]:
    return (_trouble(rank, *told) for told in standing.notices.values() if told[0].kind in (FAILED, BECAUSE))


def _ending(rank: int, standing: Standing) -> _Evidence | None:
    """Return the evidence in the end of a rank; None while it is alive."""
    said = standing.notices.get((ENDED, ""))
    times = [s for s in (standing.ended_s, said[1] if said else None) if s is not None]
    if not times:
        return None
    first = standing.first(FAILED, BECAUSE)
    if first is not None:
        return _trouble(rank, first, min(times))
    if said is not None:
        return _Evidence(min(times), (rank,), f"rank {rank} {said[0].text}", True, orderly=True)
    how = "ended without a word (killed, or out of memory?)" if standing.unheard is None else standing.unheard
    return _Evidence(min(times), (rank,), f"rank {rank} {how}", True)


def _trouble(rank: int, notice: Notice, since_s: float) -> _Evidence:
    """Return the evidence in a rank's notice, about itself or about the ranks that stopped it."""
    if notice.kind == FAILED:
        return _Evidence(since_s, (rank,), f"rank {rank} failed {notice.text}", True)
    return _Evidence(since_s, notice.ranks, notice.text, False)
