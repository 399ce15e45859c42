"""The ranks that exchange with one another: a process group, or another set of processes with a store."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.drivers.rendezvous import Rendezvous
from gradwire.exchange.drivers.transports.in_process import Meetings

_spare: weakref.WeakKeyDictionary[Any, list[tuple[int, Any]]] = weakref.WeakKeyDictionary()
"""Connections to stores that nobody uses at the moment, with the process that made them."""


class Group(ABC):
    """Some ranks as one of them sees them, with what they need before they have lanes.

    Attributes:
        ranks: The ranks' numbers in messages, by place; global ranks if they are those of a process group.
        place: Place of this rank among them.
        store: Store that all of them reach, for addresses of connections.
        timeout: Timeout of a collective.
        has_nccl: True if they can exchange tensors on devices by NCCL.
        device: Device of tensors with tables.
        preferred: CUDA device of these tensors where they cannot be in main memory; None: the current one.
        many_stores: True if connections to the store are there for each thread; otherwise a link makes one.
        meetings: Connects ranks that are threads of one process; None if they are processes, which watch one another.
        explains: True if a rank whose exchange broke waits for the others to tell why; False if their end is no error.
        tables: Number of tables that they have told one another so far, where they have a key.
        table_bytes: Bytes of a table that travel together with its length, in one message; the same on all ranks.
    """

    ranks: tuple[int, ...]
    place: int
    store: Any
    timeout: timedelta
    has_nccl: bool
    device: torch.device
    preferred: torch.device | None = None
    many_stores: bool = False
    meetings: Meetings | None = None
    explains: bool = True
    tables: int = 0
    table_bytes: int = 0

    @property
    def store_timeout(self) -> timedelta:
        """Time after which one that waits in the store for others asks :meth:`waits_on`."""
        return self.timeout

    def waits_on(self) -> bool:
        """Return whether one that has waited in the store for so long waits on."""
        return False

    @property
    def rank(self) -> int:
        """This rank's number in messages."""
        return self.ranks[self.place]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def lend_store(self) -> Any:
        """Return a connection to the store for one thread, which may wait in it.

        Connections are kept for later links. All ranks make some at the same moment, and one of them is ready after
        five seconds then: in 2 of 40 links where each of four ranks made one, in 9 of 40 where each made two.
        """
        kept = _spare.setdefault(self.store, [])
        while kept:
            pid, store = kept.pop()
            if pid == os.getpid():
                return store
        return self.store.clone()

    def take_back(self, store: Any) -> None:
        """Take back a connection that was lent, and in which nobody waits any more."""
        _spare.setdefault(self.store, []).append((os.getpid(), store))

    def key(self, purpose: str) -> bytes:
        """Return the key of a purpose, which these ranks alone know; empty if their messages have no keyed digest."""
        return b""

    def gloo(self, number: int, store: Any, rank: int, world_size: int) -> Any:
        """Return Gloo connections of the ranks, or of some of them (collective call of those).

        Args:
            number: Number of the lane that they are for.
            store: Store for these connections alone.
            rank: This rank's number among those that are connected.
            world_size: Number of those.
        """
        rendezvous = Rendezvous(store, world_size, self.waits_on)
        return dist.ProcessGroupGloo(rendezvous, rank, world_size, self.timeout)

    def prefer(self, device: torch.device) -> None:
        """Send tables from a CUDA device, where they cannot be sent from main memory; others change nothing."""
        if device.type == "cuda":
            self.preferred = device

    @abstractmethod
    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> dist.Work:
        """Start to gather a tensor ``[n]`` from each rank into ``rows`` ``[ranks, n]``, without waiting."""

    @abstractmethod
    def broadcast(self, row: torch.Tensor, source: int) -> None:
        """Replace a tensor by that of the rank at place ``source``."""


class TorchGroup(Group):
    """A process group of ``torch.distributed``.

    Args:
        group: The process group; this process is in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.torch = group
        self.preferred = getattr(group, "bound_device_id", None)
        self.ranks, self.place = tuple(dist.get_process_group_ranks(group)), group.rank()

    @property
    def store(self) -> Any:
        """The store of the default group."""
        return dist.distributed_c10d._get_default_store()

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        """The timeout of the group's collectives."""
        device = torch.device("cpu" if "cpu" in dist.get_backend_config(self.torch) else "cuda")
        found: timedelta = self.torch._get_backend(device).options._timeout
        return found

    @property
    def has_nccl(self) -> bool:  # type: ignore[override]
        """True if the group has NCCL."""
        return dist.is_nccl_available() and "nccl" in dist.get_backend_config(self.torch)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Main memory if the group can send from it, else the preferred device, the group's own or the current one."""
        if "cpu" in dist.get_backend_config(self.torch):
            return torch.device("cpu")
        # NCCL knows a rank by its GPU, and the current one may be that of another rank.
        return self.preferred or torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.all_gather(list(rows), own, group=self.torch, async_op=True)
        return work

    def broadcast(self, row: torch.Tensor, source: int) -> None:
        dist.broadcast(row, group=self.torch, group_src=source)


def group_of(group: Group | dist.ProcessGroup) -> Group:
    """Return the ranks of a process group; ranks that are given as such are returned as they are."""
    return group if isinstance(group, Group) else TorchGroup(group)
