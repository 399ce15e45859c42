"""Who broke a link, by what this rank has seen and was told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwire.link.peers.notices import BECAUSE, CLOSED, ENDED, FAILED, Notice

__all__ = ["Blame", "Standing", "judge"]

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
