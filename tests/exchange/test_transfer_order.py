"""Turns: earlier jobs first, one at a time, and nobody waits for a job that does not send."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Lane, TransferOrder
from gradwire.exchange.drivers.traffic import LARGE_BYTES
from gradwire.exchange.ops import AllGather, Exchange


def test_of_jobs_that_wait_the_earliest_has_the_next_turn() -> None:
    order = TransferOrder()
    first, second, third, fourth = (order.take() for _ in range(4))
    sent: list[int] = []

    def go(ticket: int) -> None:
        with order.turn(ticket):
            sent.append(ticket)

    with order.turn(second):
        threads = [threading.Thread(target=go, args=(ticket,)) for ticket in (fourth, third, first)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while len(order._waiting) < 3 and not sent and time.monotonic() < until:
            time.sleep(0.001)
        assert sent == []
    for thread in threads:
        thread.join(10)
    assert sent == [first, third, fourth]


def test_a_job_that_does_not_send_holds_nobody_up() -> None:
    order = TransferOrder()
    first, second = order.take(), order.take()
    for ticket in (second, first, second):
        with order.turn(ticket):
            pass
    with pytest.raises(RuntimeError, match="it broke"), order.turn(first):
        raise RuntimeError("it broke")
    with order.turn(second):
        pass


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_no_two_jobs_send_at_a_time(lanes: int) -> None:
    order = TransferOrder()
    work: list[list[int]] = [[] for _ in range(lanes)]
    for number in range(60):
        work[number % lanes].append(order.take())
    done: list[int] = []
    sending = threading.Lock()

    def lane(tickets: list[int]) -> None:
        for ticket in tickets:
            with order.turn(ticket):
                assert sending.acquire(blocking=False)
                done.append(ticket)
                sending.release()

    threads = [threading.Thread(target=lane, args=(tickets,)) for tickets in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == list(range(1, 61))
    assert all(found == sorted(found) for found in ([t for t in done if t in part] for part in work))


@contextlib.contextmanager
def two_ranks_of_two_lanes(start: Callable[[int, list[Lane]], object]) -> Iterator[None]:
    """Open the lanes of two ranks in one process, and call ``start(rank, lanes)`` for each."""
    stores = [dist.HashStore() for _ in range(2)]
    opened: list[Lane] = []

    def open_lanes(rank: int) -> None:
        order = TransferOrder()
        lanes = [Lane(stores[i], rank, 2, timedelta(seconds=60), f"{rank}.{i}", order) for i in range(2)]
        opened.extend(lanes)
        start(rank, lanes)

    openers = [threading.Thread(target=open_lanes, args=(rank,)) for rank in range(2)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    try:
        yield
    finally:
        for lane in opened:
            lane.close()


def large_gather() -> AllGather:
    return AllGather(torch.zeros(LARGE_BYTES, dtype=torch.uint8), torch.empty(2, LARGE_BYTES, dtype=torch.uint8))


def test_while_a_job_computes_the_next_one_sends() -> None:
    """The first lanes' jobs do not end before they are told to."""
    release, sent = threading.Event(), [threading.Event() for _ in range(4)]

    def gather(arrived: threading.Event, go_on: Callable[[], object]) -> Exchange[None]:
        rows = yield large_gather()
        assert rows.shape == (2, LARGE_BYTES)
        arrived.set()
        go_on()

    def start(rank: int, lanes: list[Lane]) -> None:
        lanes[0].run(gather(sent[rank], lambda: release.wait(60)))
        lanes[1].run(gather(sent[2 + rank], lambda: None))

    with two_ranks_of_two_lanes(start):
        try:
            assert all(event.wait(60) for event in sent)
        finally:
            release.set()


def test_jobs_whose_peers_are_at_another_place_do_not_wait_in_a_circle() -> None:
    """Each rank is late with another job; a job's receives are posted before it asks for its turn."""
    ended = [threading.Event() for _ in range(4)]

    def two(pause_s: float, done: threading.Event) -> Exchange[None]:
        for _ in range(2):
            time.sleep(pause_s)
            yield large_gather()
        done.set()

    def start(rank: int, lanes: list[Lane]) -> None:
        for job, lane in enumerate(lanes):
            lane.run(two(0.3 * (job == rank), ended[2 * rank + job]))

    with two_ranks_of_two_lanes(start):
        assert all(event.wait(60) for event in ended)
