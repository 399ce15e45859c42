"""The ranks that exchange with one another: a process group, or another set of processes with a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Group(ABC):
    """Some ranks as one of them sees them, with what they need before they have lanes.

    Attributes:
        ranks: The ranks' numbers in messages, by place; global ranks if they are those of a process group.
        place: Place of this rank among them.
        store: Store that all of them reach, for addresses of connections.
        timeout: Timeout of a collective.
        has_nccl: True if they can exchange tensors on devices by NCCL.
        device: Device of tensors with tables.
        tables: Number of tables that they have told one another so far, where they have a key.
    """

    ranks: tuple[int, ...]
    place: int
    store: Any
    timeout: timedelta
    has_nccl: bool
    device: torch.device
    tables: int = 0

    @property
    def rank(self) -> int:
        """This rank's number in messages."""
        return self.ranks[self.place]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def key(self, purpose: str) -> bytes:
        """Return the key of a purpose, which these ranks alone know; empty if their messages have no keyed digest."""
        return b""

    @abstractmethod
    def all_gather(self, rows: Sequence[torch.Tensor], own: torch.Tensor) -> dist.Work:
        """Start to gather a tensor from each rank into ``rows``, without waiting."""

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
        """Main memory if the group can send from it, else the current device."""
        if "cpu" in dist.get_backend_config(self.torch):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, rows: Sequence[torch.Tensor], own: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.all_gather(list(rows), own, group=self.torch, async_op=True)
        return work

    def broadcast(self, row: torch.Tensor, source: int) -> None:
        dist.broadcast(row, group=self.torch, group_src=source)


def group_of(group: Group | dist.ProcessGroup) -> Group:
    """Return the ranks of a process group; ranks that are given as such are returned as they are."""
    return group if isinstance(group, Group) else TorchGroup(group)
