"""Receives that are posted for the next round: the same replies, one delay less, and nothing is overwritten early."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers.transports import GlooTransport
from gradwire.exchange.drivers.transports.receives import LOOKS, MISSES, MOST_JOBS, RECURS, Receives
from gradwire.exchange.ops import AllGather, AllToAll, Op, Reduce, SendRecv

N, LARGE = 3, 1 << 16
WAIT = timedelta(seconds=20)

Make = Callable[[int, int], Op]
"""``make(rank, round)`` returns an operation."""


def octets(rank: int, round: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * round + rank)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def lengths_of(rank: int, round: int, most: int) -> torch.Tensor:
    told = torch.tensor([(most * (to + rank + round)) // 11 for to in range(N)])
    told[rank] = 0
    return told


def to_each(size: int, variable: bool) -> Make:
    def make(rank: int, round: int) -> Op:
        send, recv = octets(rank, round, N, size), torch.zeros((N, size), dtype=torch.uint8)
        if not variable:
            return AllToAll(send, recv)
        return AllToAll(send, recv, lengths_of(rank, round, size), torch.zeros(N, dtype=torch.int64))

    return make


def to_all(size: int, variable: bool) -> Make:
    def make(rank: int, round: int) -> Op:
        send, recv = octets(rank, round, size), torch.zeros((N, size), dtype=torch.uint8)
        if not variable:
            return AllGather(send, recv)
        told = torch.full((N,), size * (rank + 1) // (round + 4))
        told[rank] = 0
        return AllGather(send, recv, told, torch.zeros(N, dtype=torch.int64))

    return make


def to_another(size: int, variable: bool, steps: int = 1) -> Make:
    """To the next rank, or in every ``steps``-th round to the one after it."""

    def make(rank: int, round: int) -> Op:
        places = 1 + (round % steps == steps - 1 > 0)
        send, recv = octets(rank, round, size), torch.zeros(size, dtype=torch.uint8)
        told = torch.tensor([size // (rank + 1)]) if variable else None
        arrived = torch.zeros(1, dtype=torch.int64) if variable else None
        return SendRecv(send, recv, (rank + places) % N, (rank - places) % N, told, arrived)

    return make


def agreed(numel: int) -> Make:
    return lambda rank, round: Reduce(octets(rank, round, numel).float(), "max")


def read(op: Op, reply: torch.Tensor) -> list[list[int]]:
    """Return what came: of rows with lengths, their bytes up to these."""
    if isinstance(op, Reduce):
        return [reply.tolist()]
    assert not isinstance(op, (Reduce,))
    arrived = getattr(op, "arrived", None)
    rows = reply.view(-1, reply.shape[-1])
    if arrived is None:
        return rows.tolist()
    return [row[: int(length)].tolist() for row, length in zip(rows, arrived)]


@pytest.fixture
def transports() -> Iterator[list[GlooTransport]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(N) as pool:
        made = list(pool.map(lambda rank: GlooTransport(store, rank, N, WAIT), range(N)))
    yield made
    for transport in made:
        transport.close(False)


def run(transports: list[GlooTransport], body: Callable[[int, GlooTransport], Any]) -> list[Any]:
    with ThreadPoolExecutor(N) as pool:
        return list(pool.map(body, range(N), transports))


JOB = (
    agreed(5), to_each(100, False), to_all(100, True), to_each(LARGE + 8, True), to_all(LARGE, False),
    to_another(50, False), to_another(LARGE, True), to_another(64, True, steps=3), to_each(8, True),
)  # fmt: skip


def rounds(rank: int, transport: GlooTransport, name: str | None) -> list[Any]:
    found = []
    for round in range(RECURS + 5):
        job = JOB if round != RECURS + 3 else JOB[:4]
        ops = [make(rank, round) for make in job]
        replies = [transport.execute(op, nullcontext, name) for op in ops]
        found.append([read(op, reply) for op, reply in zip(ops, replies)])
        transport.end_job()
    return found


def test_replies_are_those_of_receives_that_are_posted_when_they_are_needed(transports: list[GlooTransport]) -> None:
    """With lengths and neighbours that change, a job that is left out, and sizes that are equal to others'."""
    found = run(transports, lambda rank, one: rounds(rank, one, "job"))
    expected = run(transports, lambda rank, one: rounds(rank, one, None))
    assert found == expected
    assert found[0] != found[1]


def test_a_reply_stays_until_the_job_ends_though_the_next_message_has_been_sent(
    transports: list[GlooTransport],
) -> None:
    """A sender may be ahead: its message of the next round waits until the reply of this one has been read."""
    ahead, ended = threading.Event(), threading.Event()

    def body(rank: int, transport: GlooTransport) -> None:
        for round in range(6):
            op = to_all(100, False)(rank, round)
            if rank == 0 and round == 4:
                ended.wait(20)
            reply = transport.execute(op, nullcontext, "job")
            if rank == 0 and round == 3:
                # Others begin their next round.
                before = reply.clone()
                ahead.wait(20)
                time.sleep(0.3)  # so that their messages are there
                assert torch.equal(reply, before)
                transport.end_job()
                ended.set()
                continue
            transport.end_job()
            if rank == 1 and round == 3:
                ahead.set()

    run(transports, body)


class Noted:
    """A backend that notes receives and ends them at once."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, int, int]] = []

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.posted.append((tensors[0].numel(), source, tag))
        return self

    def wait(self) -> None:
        """The message is there."""


def test_a_message_that_recurs_is_requested_when_the_one_before_has_been_read() -> None:
    backend = Noted()
    receives = Receives(backend, N)
    room = torch.zeros((N, 9), dtype=torch.uint8)
    posted = []
    for _ in range(RECURS + 1):
        slot = receives.slot("job", 9, "rows")
        rows = slot.post([2, 1], room)
        for source in (2, 1):
            slot.arrival(source).wait()
        posted.append(len(backend.posted))
        receives.end_job()
    assert posted == [2 * (n + 1) for n in range(RECURS)] + [2 * RECURS + 2]
    assert rows.data_ptr() != room.data_ptr()
    # After the last job, the next messages have been requested; nothing has been asked for twice.
    assert len(backend.posted) == 2 * RECURS + 4
    assert set(backend.posted) == {(9, 1, slot.tag), (9, 2, slot.tag)}


@pytest.mark.parametrize("jobs", [LOOKS // 2, 2 * LOOKS, 5 * LOOKS + 3])
def test_messages_of_a_round_of_many_jobs_are_requested_early(jobs: int) -> None:
    """As of a large model: more jobs lie between two of one name than between two looks."""
    receives, room = Receives(Noted(), N), torch.zeros((N, 9), dtype=torch.uint8)
    for round in range(RECURS + 2):
        early = 0
        for job in range(jobs):
            slot = receives.slot(f"job {job}", 9, "rows")
            early += bool(slot._works)
            slot.post([1], room)
            slot.arrival(1).wait()
            receives.end_job()
        assert early == (jobs if round >= RECURS else 0)


def test_a_slot_of_a_message_that_does_not_recur_is_forgotten() -> None:
    receives, room = Receives(Noted(), N), torch.zeros((N, 9), dtype=torch.uint8)
    for job in range(2 * MOST_JOBS):
        receives.slot(f"job {job}", 9, "rows").post([1], room)
        receives.end_job()
    assert len(receives._slots) <= MOST_JOBS + LOOKS


def test_only_what_recurs_is_requested_and_kept() -> None:
    backend = Noted()
    receives = Receives(backend, N)
    room = torch.zeros((N, 9), dtype=torch.uint8)
    for place in (None, None, None, "once"):
        slot = receives.slot(place, 9, "rows")
        assert slot.post([1], room) is room
        slot.arrival(1).wait()
        receives.end_job()
    assert len(backend.posted) == 4
    other = receives.slot("once", 9, "lengths")
    assert len({slot.tag, other.tag, receives.slot("once", 8, "rows").tag}) == 3


def test_rows_of_messages_that_no_longer_come_are_given_back(transports: list[GlooTransport]) -> None:
    """As of a warm-up, and of messages to one rank; those that come seldom are kept, and replies do not change."""
    first, seldom, later, often = to_all(LARGE, False), to_another(200, True), to_all(300, True), 40

    def rows_of(transport: GlooTransport) -> set[int]:
        assert transport._receives is not None
        return {slot._shape[1] for slot in transport._receives._slots.values() if slot._rows is not None}

    def body(rank: int, transport: GlooTransport) -> list[set[int]]:
        held = []

        def job(make: Make, number: int, name: str) -> None:
            op = make(rank, number)
            found = read(op, transport.execute(op, nullcontext, name))
            again = make(rank, number)
            assert found == read(again, transport.execute(again, nullcontext, None))
            transport.end_job()
            held.append(rows_of(transport))

        for number in range(5):
            job(first, number, "first")
        for number in range(2 * LOOKS):
            job(later, number, "later")
            if number % often == 0:
                job(seldom, number, "seldom")
        # What has been given up comes again: after another while it is requested early again.
        for number in range(5):
            job(first, number, "first")
        return held

    found = run(transports, body)
    assert found[0] == found[1] == found[2]
    assert all(LARGE in held for held in found[0][RECURS - 1 : LOOKS - 1])
    assert [LARGE in held for held in found[0][-5:]] == [False, *[True] * 4]
    assert LARGE not in found[0][2 * LOOKS]
    assert 200 in found[0][-1]
    assert often * MISSES > LOOKS


def test_a_rank_that_waits_for_a_message_says_for_which(transports: list[GlooTransport]) -> None:
    """By it :meth:`Lane.abort` knows a wait that does not end."""
    told = list[list[bool]]()

    def body(rank: int, transport: GlooTransport) -> object:
        if rank == 0:
            end_s = time.monotonic() + 20
            while (waits := [one.awaited is not None for one in transports[1:]]) != [True, True]:
                if time.monotonic() > end_s:
                    break
                time.sleep(0.01)
            told.append(waits)
        transport.execute(to_all(100, False)(rank, 0), nullcontext, "job")
        return transport.awaited

    assert run(transports, body) == [None] * N
    assert told == [[True, True]]


def test_connections_end_though_receives_are_pending(transports: list[GlooTransport]) -> None:
    def body(rank: int, transport: GlooTransport) -> None:
        for round in range(RECURS + 1):
            transport.execute(to_all(100, False)(rank, round), nullcontext, "job")
            transport.end_job()

    run(transports, body)
    first = transports[0]
    held = weakref.ref(first._receives)  # type: ignore[arg-type]
    first.close(broken=True)
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match="closed"):
        first.execute(to_all(100, False)(0, 0), nullcontext, "job")
    # The others learn of it at once and not after the timeout.
    with pytest.raises(RuntimeError, match=r"[Cc]onnection|closed|reset"):
        transports[1].execute(to_all(100, False)(1, 0), nullcontext, "job")
