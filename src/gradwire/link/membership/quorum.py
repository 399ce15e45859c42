"""The rule by which a round goes on with a quorum of its members, while the others still compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.exchange.method import is_whole, require

STALENESS = 4


@dataclass(frozen=True)
class Presence:
    """The answer of a member to a roll call: what it could contribute to a round that began now.

    Attributes:
        weight: Weight of its difference, such as its number of samples; 0: it still computes.
        full: It has taken all its local steps.
        age: Rounds that counted since the global parameters from which it computes.
        late: No others are waited for any more; said by the first member alone.
    """

    weight: float = 0.0
    full: bool = False
    age: int = 0
    late: bool = False


@dataclass(frozen=True)
class Quorum:
    """When a round begins without some of its members.

    A round begins as soon as all members contribute. It also begins when ``least`` of them have taken all their local
    steps, and the first member says that the time for others has passed, unless a member that would be missing has
    missed ``staleness`` rounds in a row already: the others wait for that one. So no difference is older than
    ``staleness`` rounds when it is merged, as in a stale synchronous parallel training. Members decide alike, since all
    have the same answers.

    Args:
        least: Members that have taken all their local steps; all members, if there are fewer.
        staleness: Largest age of a difference, in rounds; 0: a round waits for all.

    Raises:
        HyperparameterError: a value is wrong.

    Reference: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
    2013, for the bound.
    """

    least: int
    staleness: int = STALENESS

    def __post_init__(self) -> None:
        require(is_whole(self.least, 1), "quorum", f"a whole number of at least 1 is needed, not {self.least!r}")
        require(
            is_whole(self.staleness, 0),
            "staleness",
            f"a number of rounds of at least 0 is needed, not {self.staleness!r}",
        )

    def is_met(self, present: Sequence[Presence]) -> bool:
        """Return whether enough members have taken all their steps; the others then contribute what they have."""
        ready = sum(member.full and member.weight > 0 for member in present)
        return ready >= min(self.least, len(present))

    def begins(self, present: Sequence[Presence]) -> bool:
        """Return whether the round begins, after a roll call with these answers."""
        missing = [member for member in present if not member.weight > 0]
        if not missing:
            return True
        return self.is_met(present) and present[0].late and all(m.age < self.staleness for m in missing)


def shares(present: Sequence[Presence]) -> tuple[float, ...]:
    """Return what each member's difference is multiplied by, so that the mean over all members is the weighted one.

    With weights w_i of n members it is n w_i / sum_j w_j. Equal weights of all give exactly 1.
    """
    total = sum(member.weight for member in present)
    return tuple(len(present) * member.weight / total for member in present)
