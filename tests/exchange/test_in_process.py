"""The transport between threads of one process: the replies of a simulation, in memory of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Meetings
from gradwire.exchange.drivers.transports.in_process import InProcessBackend
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv

N = 3


def on_threads(work: Callable[[int], Any]) -> list[Any]:
    """Run a function for each rank in a thread of its own, and return the results or errors."""
    found: list[Any] = [None] * N

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def octets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def executed(make: Callable[[int], Op]) -> list[tuple[Op, torch.Tensor]]:
    meetings = Meetings(N)
    made = [make(rank) for rank in range(N)]

    def work(rank: int) -> tuple[Op, torch.Tensor]:
        transport = meetings.connect(0)(None, rank, N, timedelta(seconds=60))
        return made[rank], transport.execute(made[rank], lambda: threading.Lock())

    return on_threads(work)


def test_each_operation_has_the_replies_of_its_name() -> None:
    for _, reply in executed(lambda rank: Reduce(torch.tensor([float(rank), 1.0]), "sum")):
        assert reply.tolist() == [3.0, 3.0]
    for _, reply in executed(lambda rank: Reduce(torch.tensor([float(rank), 1.0]), "max")):
        assert reply.tolist() == [2.0, 1.0]
    room = torch.empty((N, 1), dtype=torch.uint8)
    for rank, (_, reply) in enumerate(
        executed(lambda r: AllToAll(octets(10 * r, 10 * r + 1, 10 * r + 2).view(N, 1), room.clone()))
    ):
        assert reply.flatten().tolist() == [rank, 10 + rank, 20 + rank]
    for _, reply in executed(lambda rank: AllGather(octets(rank), room.clone())):
        assert reply.flatten().tolist() == [0, 1, 2]
    for _, reply in executed(lambda rank: Broadcast(octets(rank), 1)):
        assert reply.tolist() == [1]
    for rank, (_, reply) in enumerate(
        executed(lambda r: SendRecv(octets(r), octets(9), to=(r + 1) % N, source=(r - 1) % N))
    ):
        assert reply.tolist() == [(rank - 1) % N]


def test_replies_are_in_memory_of_the_rank() -> None:
    found = executed(lambda rank: AllGather(octets(rank), torch.empty((N, 1), dtype=torch.uint8)))
    assert len({reply.data_ptr() for _, reply in found}) == N
    assert all(isinstance(op, AllGather) and op.recv.data_ptr() == reply.data_ptr() for op, reply in found)
    sums = executed(lambda rank: Reduce(torch.tensor([float(rank)]), "sum"))
    assert len({reply.data_ptr() for _, reply in sums}) == N


def test_different_operations_and_broken_connections_raise_on_all_ranks() -> None:
    def different(rank: int) -> Op:
        return Broadcast(octets(1), 0) if rank else Reduce(torch.ones(1), "sum")

    for error in executed(different):
        assert "different operations" in str(error)
    meetings = Meetings(N)

    def broken(rank: int) -> Any:
        transport = meetings.connect(0)(None, rank, N, timedelta(seconds=60))
        if rank == 2:
            transport.abort()
            return None
        return transport.execute(Broadcast(octets(1), 0), lambda: threading.Lock())

    found = on_threads(broken)
    assert found[2] is None
    assert all("were broken" in str(error) for error in found[:2])


def test_messages_keep_their_order_and_lengths() -> None:
    meetings = Meetings(N)
    backends = [InProcessBackend(meetings, rank) for rank in range(N)]
    rows = torch.empty(N, N, 2)
    sent = [torch.full((2 * N,), float(rank)) for rank in range(N)]
    works = [backend.alltoall_base(rows[r].view(-1), sent[r], [], []) for r, backend in enumerate(backends)]
    for rank, work in enumerate(works):
        assert work.is_completed()
        work.wait()
        assert rows[rank, :, 0].tolist() == [0.0, 1.0, 2.0]
    one = torch.ones(1)
    backends[0].send([one], 1, 7).wait()
    one.fill_(5.0)  # what was sent is not changed by its sender
    backends[0].send([one], 1, 7).wait()
    first, second = torch.zeros(1), torch.zeros(1)
    asked = [backends[1].recv([tensor], 0, 7) for tensor in (first, second)]
    asked[1].wait()
    asked[0].wait()
    assert (first.item(), second.item()) == (1.0, 5.0)
    late = backends[1].recv([first], 2, 7)
    assert not late.is_completed()
    with pytest.raises(RuntimeError, match="not come in time"):
        late.wait(timedelta(milliseconds=5))
    backends[2].send([torch.ones(3)], 1, 7)
    with pytest.raises(RuntimeError, match="at most 1 fit"):
        late.wait()
    options = dist.BroadcastOptions()
    options.rootRank = 2
    told = [torch.full((1,), float(rank)) for rank in range(N)]
    for rank in (2, 0, 1):
        backends[rank].broadcast([told[rank]], options).wait()
    assert [x.item() for x in told] == [2.0] * N
