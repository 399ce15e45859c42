"""The members of one epoch as a group of ranks, with connections of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.digests import digest_of
from gradwire.exchange.drivers import Group, break_off
from gradwire.link.membership.records import Epoch
from gradwire.link.peers.circle import Circle
from gradwire.link.peers.watch import Watch

TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective, PyTorch's own: members that are gone are noticed long before."""

ABSENCES = 2.0
"""A member that has not come yet, since it agrees with others or looks for the coordinator, has so much more time."""


class EpochGroup(Group):
    """The members of an epoch, seen from one of them; ranks are places in the epoch.

    Members watch one another from the moment that the group is made. :meth:`connect` makes the connections for
    agreements and for state, before a link makes its lanes.

    Args:
        epoch: The epoch.
        place: Place of this member in it.
        store: Store for this epoch alone.
        silence_s: Seconds without a sign of life after which a member counts as gone.
        key: Key of this epoch, which its members alone know; empty: their messages have no keyed digests.
    """

    def __init__(self, epoch: Epoch, place: int, store: Any, silence_s: float, key: bytes = b"") -> None:
        self.epoch, self.place, self.store, self._key = epoch, place, store, key
        self.ranks, self.timeout = tuple(range(len(epoch.members))), TIMEOUT
        self.has_nccl, self.device = False, torch.device("cpu")
        self._backend: Any = None
        self.watch: Watch | None = None
        if len(self.ranks) > 1:
            self.watch = Watch.of(self)
            self.watch.limit_s, self.watch.absence_s = silence_s, ABSENCES * silence_s
            self.watch.meet(self.ranks)
        self.circle = Circle(self)

    def connect(self) -> None:
        """Connect the members (collective call).

        Raises:
            ExchangeError: a member is gone.
        """
        if self.world_size > 1:
            (made,) = self.circle.connected("the connections of an epoch", self._made)
            self._backend = made.backend

    def _made(self, store: Any) -> list[_Backend]:
        return [_Backend(dist.ProcessGroupGloo(store, self.place, self.world_size, self.timeout))]

    def key(self, purpose: str) -> bytes:
        return digest_of(purpose.encode(), self._key) if self._key else b""

    def gone(self) -> bool:
        """Return whether a member has ended or given no sign of life, by its own word or not."""
        return self.watch is not None and self.watch.judge(self.ranks, "", orderly=False) is not None

    def missed(self) -> tuple[str, ...]:
        """Return the ids of members that are gone."""
        blame = None if self.watch is None else self.watch.judge(self.ranks, "", orderly=False)
        named = () if blame is None else blame.ranks
        return tuple(self.epoch.members[rank].id for rank in named if rank != self.place)

    def all_gather(self, rows: Sequence[torch.Tensor], own: torch.Tensor) -> dist.Work:
        work: dist.Work = self._backend.allgather([list(rows)], [own])
        return work

    def broadcast(self, row: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._backend.broadcast([row], options).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor in main memory to one member, and wait until it has left.

        Raises:
            RuntimeError: the connection broke.
        """
        self._backend.send([tensor], to, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member.

        Raises:
            RuntimeError: the connection broke.
        """
        self._backend.recv([tensor], source, 0).wait()

    def abort(self) -> None:
        """Break the connections from any thread: what waits for a message raises."""
        break_off(self._backend)

    def leave(self, how: str) -> None:
        """End the connections, after a word to the others."""
        if self.watch is not None:
            self.watch.leave(how)
        self.abort()
        self._backend = None


class _Backend:
    """A backend of a group, which ends with its last reference."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def close(self) -> None:
        """End the connections."""
        self.backend = None
