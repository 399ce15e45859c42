"""Turns: earlier jobs first, one at a time, and nobody waits for a job that does not send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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


def test_while_a_job_computes_the_next_one_sends() -> None:
    """Two ranks of two lanes in one process; the first lane's jobs do not end before they are told to."""
    stores = [dist.HashStore() for _ in range(2)]
    lanes: list[Lane] = []
    release, sent = threading.Event(), [threading.Event() for _ in range(4)]

    def gather(arrived: threading.Event, go_on: Callable[[], object]) -> Exchange[None]:
        rows = yield AllGather(
            torch.zeros(LARGE_BYTES, dtype=torch.uint8), torch.empty(2, LARGE_BYTES, dtype=torch.uint8)
        )
        assert rows.shape == (2, LARGE_BYTES)
        arrived.set()
        go_on()

    def open_lanes(rank: int) -> None:
        order = TransferOrder()
        pair = [Lane(stores[i], rank, 2, timedelta(seconds=60), f"{rank}.{i}", order) for i in range(2)]
        lanes.extend(pair)
        pair[0].run(gather(sent[rank], lambda: release.wait(60)))
        pair[1].run(gather(sent[2 + rank], lambda: None))

    openers = [threading.Thread(target=open_lanes, args=(rank,)) for rank in range(2)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    try:
        assert all(event.wait(60) for event in sent)
    finally:
        release.set()
        for lane in lanes:
            lane.close()


def test_jobs_whose_peers_are_at_another_place_do_not_wait_in_a_circle() -> None:
    """The second job's rows are asked for before its rank has its turn, so that a first job that sends late can."""
    stores = [dist.HashStore() for _ in range(2)]
    late = threading.Event()
    ended = [threading.Event() for _ in range(4)]
    lanes: list[Lane] = []

    def two(first: Callable[[], object], done: threading.Event) -> Exchange[None]:
        for _ in range(2):
            first()
            yield AllGather(torch.zeros(LARGE_BYTES, dtype=torch.uint8), torch.empty(2, LARGE_BYTES, dtype=torch.uint8))
        done.set()

    def open_lanes(rank: int) -> None:
        order = TransferOrder()
        pair = [Lane(stores[i], rank, 2, timedelta(seconds=60), f"{rank}.{i}", order) for i in range(2)]
        lanes.extend(pair)
        # Each rank is late with another job.
        for job in range(2):
            wait = (lambda: late.wait(0.3)) if job == rank else (lambda: None)
            pair[job].run(two(wait, ended[2 * rank + job]))

    openers = [threading.Thread(target=open_lanes, args=(rank,)) for rank in range(2)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    try:
        assert all(event.wait(60) for event in ended)
    finally:
        for lane in lanes:
            lane.close()
