"""What a worker holds of its membership: its records, its place, its settings, and what happened so far."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gradwire.errors import IncompatibleError
from gradwire.link.membership.board import Board
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.quorum import Quorum
from gradwire.link.membership.records import MOST_NAME, Epoch, Member, new_id
from gradwire.link.membership.transfer import flattened
from gradwire.link.parameters import described

HISTORY = "(history)"
"""Name of the history of the members beside the names of carried objects."""

MOST_CHANGES = 1000
"""Number of changes that a worker remembers."""


COUNTED = (
    "epochs", "broken_rounds", "payloads_refused", "lost", "left", "joined", "left_out", "residuals_lost",
    "residuals_handed", "digests_compared", "digests_differed", "state_received_bytes", "state_reused_bytes",
    "steps_replayed",
)  # fmt: skip
"""Counts in ``link.diagnostics()["membership"]``."""


class Stateful(Protocol):
    """Has a state of numbers, strings, tensors, lists, tuples and dicts, which a new member takes over."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state."""


class Follower(Protocol):
    """The link of a membership."""

    @property
    def close(self) -> Callable[[], object]:
        """Ends the threads and connections."""

    def settle(self) -> None:
        """Agree with the others on who is there, if that has changed."""

    def depart(self) -> None:
        """Leave now."""


@dataclass(frozen=True)
class MemberChange:
    """A change of the members.

    Attributes:
        epoch: Number of the epoch that began with it.
        round: Number of rounds that counted.
        members: Names of the members by rank.
        lost: Names of those that are no longer there and had not said so.
        left: Names of those that left by their own word.
        joined: Names of those that were taken in.
        seconds: Time from the end of the epoch before, as this worker noticed it, until all had met.
    """

    epoch: int
    round: int
    members: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    joined: tuple[str, ...]
    seconds: float


class Party:
    """A worker's part in a membership.

    Args:
        board: The records.
        name: Name of this worker in messages; host and process if None.
        least: Number of workers that found a training.
        grace_s: Time that members wait for one another's reports when an epoch has ended.
        silence_s: Time without a sign of life after which a member counts as gone.
        patience_s: Time that a worker waits to be taken in.
        quorum: The rule by which rounds begin without some members; None: they have all.
        late_s: Under a quorum, time that the first member waits for further ones.
        keyed: True if members' messages carry digests under the secret.

    Attributes:
        seat: The place of this worker.
        carried: Objects whose state a new member takes over, by name, beside that of the link.
        changes: The latest changes of the members.
        counts: Numbers of repeated rounds, lost members, members that left, members that joined, residuals lost and
            handed over, and times that this worker was left out.
        problem: What went wrong in a thread of the link, until it is raised where the program looks next.
        failure: The error that ended this worker's part, if one did: it has not left by its word.
        lock: Held while the protocol runs.
    """

    def __init__(
        self,
        board: Board,
        *,
        name: str | None,
        least: int,
        grace_s: float,
        silence_s: float,
        patience_s: float,
        keyed: bool,
        quorum: Quorum | None = None,
        late_s: float = 0.0,
    ) -> None:
        self.board, self.least, self.late_s, self.keyed = board, least, late_s, keyed
        self.grace_s, self.silence_s, self.patience_s = grace_s, silence_s, patience_s
        told = f"{socket.gethostname()}:{os.getpid()}" if name is None else name
        self.seat = Seat(Member(new_id(), "".join(c for c in told if c.isprintable())[:MOST_NAME]), quorum)
        self.carried: dict[str, Stateful] = {}
        self.changes: deque[MemberChange] = deque(maxlen=MOST_CHANGES)
        self.counts: Counter[str] = Counter()
        self.problem: Exception | None = None
        self.failure: Exception | None = None
        self.lock = threading.RLock()
        self._link: Callable[[], Follower | None] | None = None
        self._missed: set[str] = set()

    @property
    def link(self) -> Follower | None:
        """The link that follows the members; None before it is made and after it was collected."""
        return None if self._link is None else self._link()

    def take_link(self, link: Follower) -> None:
        """Note that a link is made.

        Raises:
            IncompatibleError: there was one.
        """
        if self._link is not None:
            raise IncompatibleError(
                "this membership has a link already: all parameters of a training belong to one link, or call "
                "gradwire.join once for each"
            )
        self._link = weakref.ref(link)

    def carry(self, **things: Stateful) -> None:
        """Hand the state of further objects to new members, such as a scheduler; all members carry the same names.

        The optimizer that was given to the link, and a sampler, are carried anyway.

        Call it before the link is made.

        Args:
            things: Objects with ``state_dict()`` and ``load_state_dict()``, whose states hold numbers, strings,
                tensors, lists, tuples and dicts.

        Raises:
            IncompatibleError: the link has been made, which has told others what is carried. Where a state holds
                something else, making the link raises it.
        """
        if self._link is not None:
            raise IncompatibleError(f"{', '.join(things)}: call carry(), and make samplers, before the link is made")
        self.carried.update(things)

    def carried_state(self) -> dict[str, Any]:
        """Return the state of all carried objects by name, and the history of the members."""
        return {HISTORY: self.seat.history.state(), **{name: x.state_dict() for name, x in self.carried.items()}}

    def check_carried(self, optimizer: Stateful | None) -> None:
        """Check that the state of the optimizer, if there is one, and of each carried object can be handed over.

        Raises:
            IncompatibleError: one holds something that cannot, or has no state; the message names it.
        """
        named = self.carried if optimizer is None else {**self.carried, "the optimizer": optimizer}
        for name, thing in named.items():
            missing = [f"{do}()" for do in ("state_dict", "load_state_dict") if not callable(getattr(thing, do, None))]
            if missing:
                raise IncompatibleError(
                    f"{name} cannot be carried: {described(thing)} has no {' and no '.join(missing)}, by which a new "
                    "member takes over its state"
                )
            try:
                flattened(thing.state_dict(), [])
            except IncompatibleError as error:
                raise IncompatibleError(f"{name} cannot be carried: {error}") from None

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Take over the state of all carried objects.

        Raises:
            IncompatibleError: other objects are carried elsewhere.
        """
        state = dict(state)
        self.seat.history.load(state.pop(HISTORY, []))
        if state.keys() != self.carried.keys():
            raise IncompatibleError(
                f"this worker carries {sorted(self.carried)}, and the other members {sorted(state)}: carry the same "
                "on all of them"
            )
        for name, thing in self.carried.items():
            thing.load_state_dict(state[name])

    def miss_residuals(self, ids: set[str]) -> None:
        """Count the residuals of members that were to hand them over, and did not."""
        self.counts["residuals_lost"] += len(ids)
        self._missed |= ids

    def note(
        self, before: Epoch | None, epoch: Epoch, lost_ids: set[str], seconds: float, kept_residuals: bool
    ) -> None:
        """Note that the members of an epoch have met."""
        self.seat.history.met()
        names = {member.id: member.name for member in (*(before.members if before else ()), *epoch.members)}
        gone = [id for id in (before.ids() if before else ()) if id not in epoch.ids()]
        lost = tuple(names[id] for id in gone if id in lost_ids)
        parted = tuple(names[id] for id in gone if id not in lost_ids)
        joined = tuple(names[id] for id in epoch.ids() if before is not None and id not in before.ids())
        self.counts.update(epochs=1, lost=len(lost), left=len(parted), joined=len(joined))
        if kept_residuals:
            self.counts["residuals_lost"] += len(lost_ids - self._missed)
        members = tuple(member.name for member in epoch.members)
        self.changes.append(MemberChange(epoch.number, epoch.round, members, lost, parted, joined, seconds))
        named_by = {"lost": lost, "left": parted, "new": joined}
        told = [f"{what} {', '.join(some)}" for what, some in named_by.items() if some]
        logging.getLogger("gradwire").info(
            "epoch %d from round %d with %d members%s, after %.2f s",
            epoch.number,
            epoch.round,
            len(members),
            "".join(f"; {part}" for part in told),
            seconds,
        )
