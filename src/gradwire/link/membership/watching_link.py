"""What a link over a membership does by itself while its worker computes: it watches the others, and meets them."""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from dataclasses import dataclass

from gradwire.errors import IncompatibleError
from gradwire.link.membership import steps as p
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.epoch_link import keep_watch
from gradwire.link.membership.records import Epoch
from gradwire.link.membership.store_steps import StoreSteps


@dataclass(frozen=True)
class _News:
    """What the store had about the time after an epoch.

    Attributes:
        epoch: That epoch.
        following: The next one; None if nobody has begun it.
        candidate: The latest candidate for it.
    """

    epoch: Epoch
    following: Epoch | None = None
    candidate: Epoch | None = None


class WatchingLink(StoreSteps):
    """Has a thread that looks for what has changed, between two rounds and in them."""

    _lock: threading.RLock
    """Held while the protocol runs."""
    _applied: bool = False
    """True from a step of the optimizer until the next round."""
    _applying: bool = False
    """Under local steps: True from the end of an exchange until its outcome was applied, which is without the lock."""
    _meeting: threading.Thread | None = None
    _news: _News | None = None
    """What was read from the store last."""

    @abstractmethod
    def _run(self, steps: p.Steps[None]) -> None:
        """Run steps of the protocol."""

    def _watch(self) -> None:
        """Watch the others, as long as the link exists."""
        look = weakref.WeakMethod(self._watch_over)
        threading.Thread(target=keep_watch, args=(look,), name="gradwire membership", daemon=True).start()

    def _check_heeded(self) -> None:
        """Raise if the optimizer does not tell of its steps.

        Raises:
            IncompatibleError: it has no hooks.
        """
        told = self.method.traits.local_steps or hasattr(self.optimizer, "register_step_post_hook")
        if self.optimizer is not None and not told:
            raise IncompatibleError(
                f"{type(self.optimizer).__name__} is no torch optimizer, so that a membership does not learn when it "
                "has applied a round: leave it out, and call membership.carry(optimizer=...) before the link is made; "
                "newcomers then come in within link.reduce_()"
            )

    def _heed_steps(self) -> None:
        """Note when the optimizer has applied a round."""
        if self.optimizer is None or self.method.traits.local_steps:
            return
        held = weakref.ref(self)

        def stepped(*_: object) -> None:
            if (link := held()) is not None:
                link._applied = True

        weakref.finalize(self, self.optimizer.register_step_post_hook(stepped).remove)

    def settle(self) -> None:
        """Agree with the others on who is there, if that has changed; call it before samples are drawn for a round."""
        with self._lock:
            if self._seat.left:
                return
            group = self._epoch_group
            if group is not None:
                # Every step would wait for a store at the end of a long link, which a thread asks often enough.
                if not self._party.board.is_far:
                    self._learn()
                self._heed(group)
            if self._applied and not self._problem:
                # A worker that is taken in now computes its gradient while the others compute theirs.
                try:
                    self._run(self._seat.change())
                except Exception as problem:  # raised in the next round
                    self._problem = problem
                else:
                    self._meet_early()

    def _look(self) -> None:
        """Break off a round with members that are gone; between two rounds, agree with the others on who is there."""
        group = self._epoch_group
        if group is None:
            return
        # A coordinator that is away stops no round: this thread looks whether it is back.
        self._party.board.try_again()
        self._party.board.freshen(group.world_size)
        if not self._has_lost(group):
            # Without the lock, for which the thread that trains would wait.
            self._learn()
        if self._lock.acquire(blocking=False):
            try:
                self._heed(group)
            finally:
                self._lock.release()
        # The thread that trains may have begun the next epoch meanwhile, whose connections these are no more.
        elif group is self._epoch_group and (self._has_lost(group) or self._is_deserted(group)):
            self._abort()

    def _has_lost(self, group: EpochGroup) -> bool:
        """Return whether a member of the current epoch is gone."""
        # Until the lanes are open over this group, the link's circle is that of an epoch that has ended.
        return group.gone() or (self._linked is group and self._runtime.failures.circle.lost())

    def _learn(self) -> None:
        """Read what there is about the time after this epoch: the next one, its candidates, who wants to come in."""
        board, epoch = self._party.board, self._seat.epoch
        if epoch is None or self._seat.left or self._problem:
            return
        try:
            following, candidate = board.glance(p.epoch_key(epoch.number + 1), Epoch), None
            if epoch.members[0].id == self._seat.me.id:
                # A store that is near is asked for them where they are needed.
                if board.is_far and following is None:
                    self._read = (time.monotonic(), board.requests())
            elif following is None:
                candidate = board.glance(p.candidate_key(epoch.number + 1), Epoch)
        except Exception as problem:  # raised in the thread of the training
            self._problem = problem
        else:
            self._news = _News(epoch, following, candidate)

    def _heed(self, group: EpochGroup) -> None:
        """Between two rounds, agree with the others on who is there, if that has changed; with the lock."""
        seat, news = self._seat, self._news
        epoch = seat.epoch
        if epoch is None or seat.left or self._problem or group is not self._epoch_group:
            return
        try:
            if self._has_lost(group):
                following = self._party.board.get(p.epoch_key(epoch.number + 1), Epoch)
                self._run(seat.recover() if following is None else seat.follow(following))
            elif news is not None and news.epoch is epoch:
                if news.following is not None:
                    self._run(seat.follow(news.following))
                elif epoch.members[0].id == seat.me.id:
                    # A request counts from the second look on: the round's vote must not be the first.
                    self._requests()
                else:
                    self._prepare(news.candidate)
            self._be_seen()
        except Exception as problem:  # raised in the thread of the training
            self._problem = problem
        else:
            self._meet_early()

    def _be_seen(self) -> None:
        """Let the members of an epoch that has not met yet see that this one is alive, long before its next round."""
        group, epoch = self._epoch_group, self._seat.epoch
        if epoch is not None and not self._seat.left and (group is None or group.epoch.number != epoch.number):
            self._epoch_group = self._group_of(epoch)

    def _meet_early(self) -> None:
        """Meet the others while this worker computes, by a thread of its own: the one that watches may end that.

        Not where somebody is new, who waits for state, and not before all have applied the last round: members compare
        their parameters when they meet.
        """
        epoch, thread = self._seat.epoch, self._meeting
        if self._seat.has_met or epoch is None or epoch.new or not self._rests() or (thread and thread.is_alive()):
            return
        self._meeting = threading.Thread(target=self._meet_now, args=(epoch,), name="gradwire meets", daemon=True)
        self._meeting.start()

    def _rests(self) -> bool:
        """Return whether the parameters are those after the last round, until the next one."""
        return not self._applying if self.method.traits.local_steps else self._applied

    def _meet_now(self, epoch: Epoch) -> None:
        with self._lock:
            # The round may have begun meanwhile.
            if self._seat.epoch is not epoch or self._seat.left or self._problem or not self._rests():
                return
            try:
                self._run(self._seat.meet())
            except Exception as problem:  # raised in the thread of the training
                self._problem = problem
