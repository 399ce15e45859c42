"""A link over the members of one epoch after the other, whose connections can be broken from any thread."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from gradwire.errors import ExchangeError, GradwireError, PayloadError
from gradwire.exchange.drivers import Lane, WireError
from gradwire.link.link import Link
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.membership.broken_rounds import count_broken, forget_frames
from gradwire.link.membership.coordinator_connection import BROKEN
from gradwire.link.membership.epoch_group import LOOK_S, EpochGroup
from gradwire.link.membership.party import Party
from gradwire.link.membership.preparation import Preparation
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.records import Epoch

CLOSE_S = 30.0
"""Time that lanes have to end after their connections were broken; a kernel may be running."""

TRIES = 3
"""Number of attempts to begin to connect to the others, if the connection to the store breaks."""


class EpochLink(Link):
    """Has the connections of one epoch at a time."""

    _party: Party
    _seat: Seat
    _epoch_group: EpochGroup | None
    _linked: EpochGroup | None = None
    """The members over which the lanes are open; None while they are not."""
    _vanished: frozenset[str] = frozenset()
    """Ids of the members that had ended or fallen silent without a word when the last epoch's connections ended."""
    _were_disconnected: frozenset[str] = frozenset()
    """Ids of the members whose connections ended or fell silent while the last epoch met, if it did not."""
    _preparation: Preparation | None = None
    """Connections of the epoch that may follow."""
    _broken_s: float | None
    """When the connections of the last epoch were broken; None while they are not."""

    @property
    def _problem(self) -> Exception | None:
        """What went wrong in a thread of the link; raised in the thread of the training."""
        return self._party.problem

    @_problem.setter
    def _problem(self, problem: Exception | None) -> None:
        # The membership still has it when a program's link is gone, and raises it at its end.
        self._party.problem = problem

    def _abort(self) -> None:
        """Break all connections, from any thread."""
        for lane in self._lanes():
            lane.abort()
        group = self._epoch_group
        if group is not None:
            group.abort()

    def _lanes(self) -> Sequence[Lane]:
        """Return the lanes; empty before there are some."""
        runtime: LinkRuntime | None = self.__dict__.get("_runtime")
        return () if runtime is None else runtime.lanes

    def _hang_up(self, how: str) -> None:
        """End all connections of this epoch, and everything that uses them."""
        if self._broken_s is None:
            self._broken_s = time.monotonic()
        group, self._epoch_group, self._linked = self._epoch_group, None, None
        if self._lanes():
            self._end_lanes()
        if group is not None:
            self._vanished = group.vanished()
            group.leave(how)

    def _end_lanes(self) -> None:
        self._runtime.failures.circle.close()
        lanes = self._lanes()
        for lane in lanes:
            lane.close(0.0)
        # An idle lane runs nothing any more. To end its connections takes it milliseconds for each, and no one waits.
        for lane in (at_work := [lane for lane in lanes if lane.busy]):
            lane.abort()
        for lane in at_work:
            if not lane.close(0.0) and not lane.break_off(CLOSE_S):
                raise ExchangeError(f"{lane.name} did not end within {CLOSE_S:.0f} s after its connections were broken")
        # A round that counts for those who are left is applied before they meet again.
        self._runtime.failures.forget()
        self._round = self._step = None

    def _group_of(self, epoch: Epoch) -> EpochGroup:
        """Return the members of an epoch as a group, which is connected if it was prepared."""
        prepared, self._preparation = self._preparation, None
        group = None if prepared is None else prepared.take(epoch)
        if group is None:
            return self._new_group(epoch)
        group.epoch = epoch
        return group

    def _new_group(self, epoch: Epoch, prefix: str = "") -> EpochGroup:
        party = self._party
        key = party.board.seal.key_of(f"epoch {epoch.digest()}") if party.keyed else b""
        place = epoch.ids().index(self._seat.me.id)
        make = partial(EpochGroup, epoch, place, party.board, party.silence_s, key, prefix)
        for _ in range(TRIES - 1):
            # The connection to the store may break after it was found whole: the next try makes another.
            with contextlib.suppress(*BROKEN):
                return make()
        return make()

    def _missed(self, group: EpochGroup) -> tuple[str, ...]:
        """Return the ids of the members that this one cannot reach, after they have not met.

        Connections that were reset or fell silent can be made again, if both live. But if that happens each time that
        members meet, the two do not stay both.
        """
        ended, before = group.disconnected(), self._were_disconnected
        self._were_disconnected = ended
        return tuple(sorted(group.vanished() - (ended - before)))

    def _prepare(self, candidate: Epoch | None) -> None:
        """Connect to the members of a candidate, in a thread, if this is one of them."""
        seat, found = self._seat, self._preparation
        if candidate is None or seat.me.id not in candidate.ids() or (found and found.candidate == candidate):
            return
        if seat.epoch is None or candidate.previous == seat.epoch.digest():
            self._drop_preparation()
            group = self._new_group(candidate, f"/{candidate.digest()}")
            self._preparation = Preparation(candidate, seat.me.id, group, self._asked[2], self._party.board)

    def _drop_preparation(self) -> None:
        found, self._preparation = self._preparation, None
        if found is not None:
            found.drop()

    def _watch_over(self) -> threading.Condition | None:
        """Look for what has changed; return the condition that is notified when members end."""
        try:
            self._look()
        except Exception as problem:  # raised in the thread of the training; others still count as lost
            self._problem = problem
        group = self._epoch_group
        return None if group is None or group.watch is None else group.watch.changed

    def _look(self) -> None:
        """Look for what has changed."""

    def _count_repeat(self, error: Exception) -> None:
        """Count a round that broke because of others; raise if it was this worker's own fault."""
        count_broken(self._refuse_own(error), self._party, self._warnings)
        forget_frames(error)

    def _refuse_own(self, error: Exception) -> GradwireError:
        """Return the error of the link; raise the one given if it was this worker's own fault."""
        own = self._runtime.failures.error
        if own is None or not isinstance(own.__cause__, WireError | PayloadError):
            self._fail(error)
        group = self._epoch_group
        if group is not None:
            group.hear_who_vanished()
        return own

    def _fail(self, error: Exception) -> NoReturn:
        """Leave because of an error, and raise it: now, and wherever the program looks next."""
        self._party.failure = error
        self.depart()
        raise error

    @abstractmethod
    def depart(self) -> None:
        """Leave now, between two rounds."""


def keep_watch(look: weakref.WeakMethod[Callable[[], threading.Condition | None]]) -> None:
    """Look for what has changed, as long as the link exists: at once when a member has ended, or every so often."""
    while (call := look()) is not None:
        changed = call()
        del call
        if changed is None:
            time.sleep(LOOK_S)
        else:
            with changed:
                changed.wait(LOOK_S)
