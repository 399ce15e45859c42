"""Operations as NCCL's transport maps them to its calls, on a backend that has these calls and is Gloo behind them.

What NCCL itself does with them needs a GPU; that every operation brings what it brings by Gloo does not.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers.devices import HostDevice
from gradwire.exchange.drivers.traffic import GATHERED_REDUCE_BYTES
from gradwire.exchange.drivers.transports import GlooTransport, NCCLTransport
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv
from ranks import Ranks

pytestmark = pytest.mark.ranks

WAIT = timedelta(seconds=60)


class Backend:
    """Gloo with NCCL's way to start several messages as one operation; outside of one, messages are refused."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._together = gloo, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def _start_coalescing(self) -> None:
        assert self._together is None
        self._together: list[Any] | None = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        assert self._together is not None, "NCCL would wait for the other rank here"
        self._together.append(self._gloo.send(tensors, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        assert self._together is not None, "NCCL would wait for the other rank here"
        self._together.append(self._gloo.recv(tensors, source, tag))

    def _end_coalescing(self) -> Any:
        works, self._together = self._together or [], None

        class Work:
            def wait(self) -> None:
                for work in works:
                    work.wait()

        return Work()


class Everything(HostDevice):
    """A device that holds all payloads."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True


def octets(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def operations(rank: int, n: int) -> list[Op]:
    """Return one operation of every kind and form."""
    row, rows = torch.zeros(50, dtype=torch.uint8), torch.zeros(n, 50, dtype=torch.uint8)
    lengths = torch.tensor([0 if to == rank else 7 + 3 * rank + to for to in range(n)])
    same = torch.tensor([0 if to == rank else 10 + rank for to in range(n)])
    numbers = octets(rank, 40).float()
    right, left = (rank + 1) % n, (rank - 1) % n
    told = [torch.tensor([20 + rank]), torch.zeros(1, dtype=torch.int64)]
    long = torch.randn(GATHERED_REDUCE_BYTES, generator=torch.Generator().manual_seed(rank))
    return [
        Reduce(numbers.clone(), "sum"),
        Reduce(numbers.clone(), "max"),
        Reduce(long.clone(), "min"),
        AllToAll(octets(rank, n, 50), rows.clone()),
        AllGather(octets(rank, 50), rows.clone()),
        AllToAll(octets(rank, n, 50), rows.clone(), lengths, torch.zeros(n, dtype=torch.int64)),
        AllGather(octets(rank, 50), rows.clone(), same, torch.zeros(n, dtype=torch.int64)),
        SendRecv(octets(rank, 50), row.clone(), right, left),
        SendRecv(octets(rank, 50), row.clone(), right, left, *told),
        # From the first to the last alone.
        SendRecv(octets(rank, 50), row.clone(), n - 1 if rank == 0 else None, 0 if rank == n - 1 else None),
        Broadcast(octets(rank, 50), 1),
        Broadcast(octets(rank, 50), 1, torch.tensor([23 if rank == 1 else 0])),
    ]


def carried() -> list[tuple[str, bool, bool, int]]:
    """Tell of each operation whether the reply, and what arrived, is that of Gloo's transport; and the turns taken."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    gloo, behind, host = (
        GlooTransport(dist.PrefixStore(f"nccl test {name}", store), rank, n, WAIT)
        for name in ("gloo", "behind", "host")
    )
    nccl = NCCLTransport(Backend(behind._backend), host, Everything())
    found = []
    for ours, theirs in zip(operations(rank, n), operations(rank, n)):
        turns: list[int] = []
        reply = nccl.execute(ours, lambda turns=turns: nullcontext(turns.append(1))).clone()
        expected = gloo.execute(theirs, nullcontext)
        told = [
            torch.equal(getattr(ours, name), getattr(theirs, name))
            for name in ("arrived", "length")
            if isinstance(getattr(ours, name, None), torch.Tensor)
        ]
        found.append((type(ours).__name__, torch.equal(reply, expected), all(told), len(turns)))
    for transport in (gloo, behind, host):
        transport.close(broken=False)
    return found


def test_every_operation_brings_what_it_brings_by_gloo(three_ranks: Ranks) -> None:
    """Short rows take no turn."""
    for found in three_ranks(carried):
        assert len(found) == 12
        assert [(name, same, told) for name, same, told, _ in found] == [(name, True, True) for name, *_ in found]
        assert [turns for *_, turns in found] == [0] * 12
