"""Connections of the epoch that takes newcomers in, made while the members go on.

To connect takes as long as ten and more messages, which over a long link is a second and more, and all members would
stand still for it. So the first member writes which workers it will take in: a *candidate*, an epoch that nobody has
agreed on. Everybody in it connects to all others in a thread, and then writes that it has. When all have, the votes of
the next round announce the epoch. It is the candidate, and everybody has its connections, if its number, its members
and the epoch before it are the same. If it is another, since a member was lost or has left, nobody uses them.
"""

from __future__ import annotations

import logging
import threading

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.link.membership.board import Board
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.records import Epoch, Member, Ready
from gradwire.link.membership.steps import ready_key


def suits(candidate: Epoch, epoch: Epoch) -> bool:
    """Return whether an epoch is the one that a candidate stood for."""
    return (candidate.number, candidate.ids(), candidate.new, candidate.previous) == (
        epoch.number, epoch.ids(), epoch.new, epoch.previous,
    )  # fmt: skip


class Preparation:
    """One member's connections of a candidate.

    Args:
        candidate: The candidate.
        me: Id of this member.
        group: Its members as a group, seen from this one.
        lanes: Number of lanes of the link.
        board: The store of the membership.
    """

    def __init__(self, candidate: Epoch, me: str, group: EpochGroup, lanes: int, board: Board) -> None:
        self.candidate, self._me, self._board = candidate, me, board
        self._group: EpochGroup | None = group
        self._lock = threading.Lock()
        self.failed = False
        self._is_ready = False
        threading.Thread(target=self._connect, args=(group, lanes), name="gradwire prepares", daemon=True).start()

    def _connect(self, group: EpochGroup, lanes: int) -> None:
        try:
            group.connect(lanes)
            # Once the others have its word, the epoch may follow at any moment.
            self._is_ready = True
            self._board.put(self._key(self._me), Ready(self.candidate.digest(), self._me))
        except (ExchangeError, RuntimeError, dist.DistError) as error:
            logging.getLogger("gradwire").info("epoch %d was not prepared: %s", self.candidate.number, error)
            self.failed = True
            self.drop()

    def is_over(self) -> bool:
        """Return whether a member of it is gone."""
        group = self._group
        return self.failed or group is None or group.gone()

    def is_whole(self) -> bool:
        """Return whether this member has its connections, and no other is gone."""
        return self._is_ready and not self.is_over()

    def all_are_ready(self) -> bool:
        """Return whether all members of it have their connections."""
        if not self.is_whole():
            return False
        keys = [self._key(id) for id in self.candidate.ids() if id != self._me]
        return len(self._board.get_all(keys, Ready)) == len(keys)

    def _key(self, id: str) -> str:
        return ready_key(self.candidate.number, self.candidate.digest(), id)

    def take(self, epoch: Epoch) -> EpochGroup | None:
        """Return the connections for an epoch, once; drop them if they are those of another."""
        with self._lock:
            taken = self._is_ready and not self.failed and suits(self.candidate, epoch)
            group, self._group = self._group, None
        if not taken:
            self._end(group)
        return group if taken else None

    def drop(self) -> None:
        """End the connections, unless they were taken."""
        with self._lock:
            group, self._group = self._group, None
        self._end(group)

    def _end(self, group: EpochGroup | None) -> None:
        if group is None:
            return
        if not self._is_ready:
            # A thread that still connects would wait for the others.
            for id in set(self.candidate.ids()) - {self._me}:
                group.count_out(id)
        group.leave("has gone on to another epoch")


def candidate_of(epoch: Epoch, newcomers: tuple[Member, ...], attempt: int) -> Epoch:
    """Return the candidate of an epoch with some newcomers; attempts differ in their digests."""
    return Epoch(
        number=epoch.number + 1,
        members=epoch.members + newcomers,
        new=tuple(member.id for member in newcomers),
        position=attempt,
        previous=epoch.digest(),
    )
