"""What ranks tell each other of failures, and the bytes in which they do.

A connection carries frames. A frame is one byte, :data:`BEAT`, which says nothing but that the sender lives, or a
notice: the byte 1, the length of what follows in two bytes, big-endian, and a JSON list ``[kind, link, ranks, text]``.

Whatever a peer sends is data: every field is checked, lengths are bounded, and what cannot be read is a
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
"""Something failed on the sender itself, in an exchange of the link or anywhere else; ``text`` says where and what."""

BECAUSE = "because"
"""The sender cannot go on with the link, or at all, because of ``ranks``; ``text`` says what became of them."""

CLOSED = "closed"
"""The sender has closed the link."""

ENDED = "ended"
"""The sender's process ends in good order; ``text`` says how."""

KINDS = {FAILED, BECAUSE, CLOSED, ENDED}


@dataclass(frozen=True)
class Notice:
    """One thing that a rank tells all others.

    Attributes:
        kind: :data:`FAILED`, :data:`BECAUSE`, :data:`CLOSED` or :data:`ENDED`.
        link: Token of the link that it is about; empty for the whole process.
        ranks: Global ranks that are the cause, of :data:`BECAUSE`.
        text: For people.
    """

    kind: str
    link: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""

    def frame(self) -> bytes:
        """Return the bytes of the notice; a long text is cut."""
        value = [self.kind, self.link[:MOST_LINK], list(self.ranks[:MOST_RANKS]), readable(self.text)]
        body = json.dumps(value, ensure_ascii=False).encode()
        return _HEAD.pack(_NOTICE, len(body)) + body

    @staticmethod
    def read(body: bytes) -> Notice:
        """Read what follows the length of a notice.

        Raises:
            PayloadError: it is none.
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
    """Return a text cut to what a notice may hold, on one line, without what would control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


class Inbox:
    """Bytes of one connection, of which whole frames are taken."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Notice]:
        """Take bytes, and return the notices that are whole by now.

        Raises:
            PayloadError: they are none; nothing more can be read from the connection then.
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
"""Ranks that end within this time of the first are named beside it; those that end later most likely end with it."""

MOST_NOTICES = 256
"""Notices that are kept of each rank."""


@dataclass
class Standing:
    """What this rank knows of another; times are by ``time.monotonic``.

    Attributes:
        heard_s: When something of it arrived last; None before it was met.
        ended_s: When its process ended, or could not be heard any more; None while it can.
        unheard: Why it cannot be heard any more, though its process may live; None if that has ended.
        notices: What it told, by kind and link, and when it arrived.
    """

    heard_s: float | None = None
    ended_s: float | None = None
    unheard: str | None = None
    notices: dict[tuple[str, str], tuple[Notice, float]] = field(default_factory=dict)

    def take(self, notice: Notice, now_s: float) -> None:
        """Keep the first notice of its kind and link; of too many, the oldest give way."""
        self.notices.setdefault((notice.kind, notice.link), (notice, now_s))
        if len(self.notices) > MOST_NOTICES:
            # A program that makes and closes links all day is told of each. The end of a process is told once.
            del self.notices[next(key for key in self.notices if key[0] != ENDED)]

    def first(self, *kinds: str) -> Notice | None:
        """Return the earliest notice of some kinds, of whichever link."""
        found = [told for told in self.notices.values() if told[0].kind in kinds]
        return min(found, key=lambda told: told[1])[0] if found else None


@dataclass(frozen=True)
class Blame:
    """Whose fault a failure is: the global ranks, and what became of them."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class _Evidence:
    """Something that breaks a link: since when, through which ranks, and whether this rank has seen it itself."""

    since_s: float
    ranks: tuple[int, ...]
    text: str
    seen: bool
    orderly: bool = False


def judge(
    standings: Mapping[int, Standing], link: str, *, orderly: bool = True, elsewhere_since_s: float = math.inf
) -> Blame | None:
    """Return who broke a link, or None while nothing says so.

    A rank that ended because of others is not to blame: those are whom it names.

    Args:
        standings: Of the ranks that the link depends on.
        link: Its token.
        orderly: Whether a rank that closed the link, or whose program came to its end, has broken it.
        elsewhere_since_s: From when on what ranks say of other links counts, where nothing but orderly ends says who
            broke this one. A program may have gone on after an older failure, with new links.
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
    # Of one rank what was seen counts more than what was told of it.
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
    """Return what a rank's end says; None while it lives."""
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
    """Return what a rank says of itself, or of those because of whom it cannot go on."""
    if notice.kind == FAILED:
        return _Evidence(since_s, (rank,), f"rank {rank} failed {notice.text}", True)
    return _Evidence(since_s, notice.ranks, notice.text, False)
