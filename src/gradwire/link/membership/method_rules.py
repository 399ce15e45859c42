"""Which methods can follow members that come and go, and what becomes of their state, by what methods declare."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import GradwireError
from gradwire.exchange.method import Method

STAYS = "stays"
GIVEN = "is given to it"
LOST = "its own is lost"
ADDED = "its own is added to another member's"
ZEROS = "begins with zeros"
ANEW = "begins anew on all"
FIRST_LOST = "stays, and begins anew if it was the first member's"


@dataclass(frozen=True)
class Fate:
    """What becomes of one kind of state.

    Attributes:
        lost: When a member is lost.
        leaves: When a member leaves by its own word.
        comes: When a member comes in.
    """

    lost: str
    leaves: str
    comes: str


COMMON = Fate(STAYS, STAYS, GIVEN)
OWN = Fate(LOST, LOST, ZEROS)
WAITING = Fate(LOST, ADDED, ZEROS)
BALANCED = Fate(ANEW, ADDED, ZEROS)
OF_RANKS = Fate(ANEW, ANEW, ANEW)
OF_FIRST = Fate(FIRST_LOST, FIRST_LOST, GIVEN)


def fates(method: Method) -> dict[str, Fate]:
    """Return what becomes of each kind of vector and value that a method keeps.

    The rule reads :class:`gradwire.exchange.traits.Traits`: what is right only for the ranks that made it begins anew;
    what waits to be sent is handed over by who leaves, and begins anew after a loss where only all members' parts
    together are right; other state of a rank alone goes with it; all else is the same on all members.

    Example:
        >>> import gradwire as gw
        >>> fates(gw.method("ErrorFeedback(TopK(density=0.01))"))["residual"].leaves
        "its own is added to another member's"
    """
    traits = method.traits

    def fate(kind: str) -> Fate:
        if kind in traits.of_ranks:
            return OF_RANKS
        if kind in traits.of_first:
            return OF_FIRST
        if kind not in traits.own:
            return COMMON
        if kind != traits.waiting:
            return OWN
        return BALANCED if traits.subtracts_mean else WAITING

    return {kind: fate(kind) for kind in traits.remembers}


def refusal(method: Method) -> str | None:
    """Explain why a method cannot follow members that come and go; None where it can."""
    traits = method.traits
    reasons = {
        "ranks keep parameters of their own": traits.outcomes_differ,
        "it tries several methods": bool(traits.tries),
        "an exchange is in flight while the training goes on": bool(getattr(method, "delay", 0)),
        "its groups of ranks are fixed": _has_scopes(method),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_scopes(method: Method) -> bool:
    try:
        return bool(method.scopes(64))
    except GradwireError:
        return True
