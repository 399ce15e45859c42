"""The states of all members of a training, of their store and of their connections, and what was found in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from gradwire.link.membership.records import Epoch, EpochReport, Member
from gradwire.link.membership.steps import report_key

__all__ = ["ALL", "Explored", "Mean", "State", "Wrong", "put"]

ALL = 0
"""Number that stands for all epochs: the process has ended."""

Mean: TypeAlias = tuple[int, frozenset[str]]
"""A round's outcome: the epoch in which it was exchanged, and the ids of those that contributed."""


class State(NamedTuple):
    """A state of all members, of their store and of their connections.

    Attributes:
        places: For each member, the number of the place where it stands.
        ended: For each member, how it ended; None while it runs.
        data: For each member, the state that it has: for each round the epoch in which it was exchanged, and who
            contributed.
        draft: For each member, the same of the round that it holds and has not applied.
        store: Records by key.
        asks: Workers that have asked, in order.
        entered: What members have sent in a phase of an epoch: (epoch, phase, round, id) and the message.
        gone: Members whose connections of an epoch are closed: (epoch, id).
        counted: The rounds that counted for a member, and their outcomes.
        left: Number of faults that may still occur.
    """

    places: tuple[int, ...]
    ended: tuple[str | None, ...]
    data: tuple[tuple[Mean, ...], ...]
    draft: tuple[Mean | None, ...]
    store: frozenset[tuple[str, Any]] = frozenset()
    asks: tuple[Member, ...] = ()
    entered: frozenset[tuple[int, str, int, str, Any]] = frozenset()
    gone: frozenset[tuple[int, str]] = frozenset()
    counted: frozenset[tuple[int, Mean]] = frozenset()
    left: int = 0

    def closed(self, epoch: Epoch | None) -> set[str]:
        """Return the ids of the members of an epoch whose connections are closed."""
        ids = () if epoch is None else epoch.ids()
        numbers = (ALL,) if epoch is None else (ALL, epoch.number)
        return {id for number, id in self.gone if number in numbers and id in ids}

    def deserters(self, epoch: Epoch) -> set[str]:
        """Return the ids of the members of an epoch that have reported that they leave instead of coming to it."""
        keys = {report_key(epoch.number, id) for id in epoch.ids()}
        reports: list[EpochReport] = [record for key, record in self.store if key in keys]
        return {report.id for report in reports if report.leaving and not report.met}


@dataclass
class Explored:
    """What an exploration found.

    Attributes:
        states: Number of states.
        ends: How often histories ended so, by the members' ends.
        steps: Kinds of steps that were taken; "follow" if a member followed others into an epoch that they had begun
            while it computed, and "forgotten" if one proposed an epoch that had been there.
        faulted: Kinds of faults, each with the kinds of steps at which it occurred.
    """

    states: int = 0
    ends: Counter[tuple[str | None, ...]] = field(default_factory=Counter)
    steps: set[str] = field(default_factory=set)
    faulted: dict[str, set[str]] = field(default_factory=dict)


class Wrong(AssertionError):
    """A promise of the protocol does not hold."""


def put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """Return values with another one at a place."""
    return (*values[:i], value, *values[i + 1 :])
