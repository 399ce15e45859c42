"""The steps of a membership's protocol: what a member asks of whoever runs it, and the keys of its records."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gradwire.link.membership.quorum import Presence
from gradwire.link.membership.records import Epoch, EpochReport, Member

FIRST = "epoch/1"
"""Key of the first epoch."""


def epoch_key(number: int) -> str:
    """Return the key of an epoch."""
    return f"epoch/{number}"


def report_key(number: int, id: str) -> str:
    """Return the key of a member's report about the end of an epoch."""
    return f"report/{number}/{id}"


def named_key(id: str) -> str:
    """Return the key of the epoch that names a worker for the first time."""
    return f"named/{id}"


def offer_key(number: int, round: int, place: int) -> str:
    """Return the key at which a member offers its state."""
    return f"offer/{number}/{round}/{place}"


def told_key(id: str) -> str:
    """Return the key of the offer that answers a newcomer that asked for state."""
    return f"told/{id}"


def candidate_key(number: int) -> str:
    """Return the key of the latest candidate for an epoch."""
    return f"candidate/{number}"


def invited_key(id: str) -> str:
    """Return the key of the latest candidate with a worker that has asked."""
    return f"invited/{id}"


def ready_key(number: int, digest: str, id: str) -> str:
    """Return the key at which a member tells that it is connected to all others of a candidate."""
    return f"ready/{number}/{digest}/{id}"


@dataclass(frozen=True)
class Put:
    """Write a record."""

    key: str
    record: Epoch | EpochReport
    waits: bool = True
    """False: if the coordinator is away, go on without it."""


@dataclass(frozen=True)
class Propose:
    """Write an epoch unless there is one at the key; the reply is the one that is there then.

    It is None if there was one so long ago that the key has been removed.
    """

    key: str
    epoch: Epoch


@dataclass(frozen=True)
class Collect:
    """Wait for the reports at some keys, for a grace at most; the reply is a tuple of those that came."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Await:
    """Wait for the epoch at a key; the reply is None if none came. With ``for_ever``, it does not end without one."""

    key: str
    for_ever: bool = False


@dataclass(frozen=True)
class Ask:
    """Write a request to be named."""

    member: Member


@dataclass(frozen=True)
class Founders:
    """Wait until there is a first epoch (the reply is empty) or enough workers have asked (the reply has them)."""


@dataclass(frozen=True)
class Requests:
    """Reply with the workers that have asked to be named, by a tuple; for the first member of an epoch."""


@dataclass(frozen=True)
class Meet:
    """Connect the members of an epoch, give the state to the new ones, and compare it.

    The reply is None if all that has ended well, or else a tuple with the ids of the members that were not reached.
    """

    epoch: Epoch


@dataclass(frozen=True)
class Roll:
    """Tell all members what this one could contribute to a round; under a quorum.

    The reply is a tuple with the answer of each, by rank, or None if one is missing.

    Attributes:
        round: The round.
        age: Rounds since the global parameters from which this member computes.
        number: Number of the roll call in its epoch, counted from 0.
    """

    round: int
    age: int
    number: int


@dataclass(frozen=True)
class Rest:
    """Wait for a short time before the next roll call."""


@dataclass(frozen=True)
class Exchange:
    """Exchange a round; the reply is True if this member holds its outcome.

    Attributes:
        round: The round.
        present: Under a quorum, the answers of all members to the roll call: who contributes, and with what weight.
    """

    round: int
    present: tuple[Presence, ...] = ()


@dataclass(frozen=True)
class Word:
    """The vote of a member: it holds the round's outcome.

    Attributes:
        leaving: The member leaves after this round.
        joins: Workers have asked to be named; said by the first member alone.
        position: Samples that were handed out, as far as it knows.
        offers: Members shall offer the state after this round to newcomers; said by the first member alone.
    """

    leaving: bool = False
    joins: bool = False
    position: int = 0
    offers: bool = False


@dataclass(frozen=True)
class Vote:
    """Send a word to all members; the reply is a tuple with the word of each, by rank, or None if one is missing."""

    round: int
    word: Word


@dataclass(frozen=True)
class Count:
    """The round counts: its outcome may be applied."""

    round: int


@dataclass(frozen=True)
class Undo:
    """The round does not count: return to the state before it."""

    round: int


@dataclass(frozen=True)
class Break:
    """Close all connections of this epoch, and end everything that uses them."""


@dataclass(frozen=True)
class Serve:
    """Offer the state as it is after a round to newcomers, while the training goes on; the reply does not matter."""

    round: int


@dataclass(frozen=True)
class Hand:
    """Hand what the members that leave have not sent yet to another one; the reply does not matter."""

    leavers: tuple[str, ...]
    heir: str


Step: TypeAlias = (
    Put
    | Propose
    | Collect
    | Await
    | Ask
    | Founders
    | Requests
    | Meet
    | Roll
    | Rest
    | Exchange
    | Vote
    | Count
    | Undo
    | Break
    | Serve
    | Hand
)
T = TypeVar("T")
Steps: TypeAlias = Generator[Step, Any, T]


class LeftOut(Exception):
    """The members go on without this one."""
