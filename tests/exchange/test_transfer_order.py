"""Tickets: earlier jobs first, whatever thread they run on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import Lane, TransferOrder
from gradwire.exchange.drivers.traffic import LARGE_BYTES
from gradwire.exchange.ops import AllGather, Exchange


def test_a_ticket_waits_for_all_earlier_ones_and_for_no_later_one() -> None:
    turns = TransferOrder()
    first, second, third = turns.take(), turns.take(), turns.take()
    order: list[str] = []

    def go(name: str, ticket: int) -> None:
        turns.wait(ticket)
        order.append(name)
        turns.give_back(ticket)

    late = [threading.Thread(target=go, args=("third", third)), threading.Thread(target=go, args=("second", second))]
    for thread in late:
        thread.start()
    assert order == []
    turns.wait(first)
    order.append("first")
    turns.give_back(first)
    for thread in late:
        thread.join(10)
    assert order == ["first", "second", "third"]


def test_a_ticket_that_is_given_back_without_its_turn_holds_nobody_up() -> None:
    turns = TransferOrder()
    first, second = turns.take(), turns.take()
    turns.give_back(first)
    turns.wait(second)
    turns.give_back(first)
    turns.give_back(second)
    third = turns.take()
    turns.wait(third)
    assert third > second


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_jobs_on_lanes_never_wait_in_a_circle(lanes: int) -> None:
    turns = TransferOrder()
    work: list[list[int]] = [[] for _ in range(lanes)]
    for number in range(60):
        work[number % lanes].append(turns.take())
    done: list[int] = []

    def lane(tickets: list[int]) -> None:
        for ticket in tickets:
            turns.wait(ticket)
            done.append(ticket)
            turns.give_back(ticket)

    threads = [threading.Thread(target=lane, args=(tickets,)) for tickets in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert done == sorted(done)
    assert len(done) == 60


@pytest.mark.parametrize("last", [True, False])
def test_while_a_job_decodes_the_next_one_sends_if_the_first_has_no_more_to_send(last: bool) -> None:
    """Two ranks of two lanes in one process; the first lane's jobs do not end before they are told to."""
    stores = [dist.HashStore() for _ in range(2)]
    lanes: list[Lane] = []
    release, sent = threading.Event(), [threading.Event() for _ in range(4)]

    def gather(arrived: threading.Event, go_on: Callable[[], object]) -> Exchange[None]:
        rows = yield AllGather(
            torch.zeros(LARGE_BYTES, dtype=torch.uint8), torch.empty(2, LARGE_BYTES, dtype=torch.uint8), last=last
        )
        assert rows.shape == (2, LARGE_BYTES)
        arrived.set()
        go_on()

    def open_lanes(rank: int) -> None:
        turns = TransferOrder()
        pair = [Lane(stores[i], rank, 2, timedelta(seconds=60), f"{rank}.{i}", turns) for i in range(2)]
        lanes.extend(pair)
        pair[0].run(gather(sent[rank], lambda: release.wait(60)))
        pair[1].run(gather(sent[2 + rank], lambda: None))

    openers = [threading.Thread(target=open_lanes, args=(rank,)) for rank in range(2)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    try:
        assert all(event.wait(60) for event in sent[:2])
        assert all(event.wait(60 if last else 0.5) for event in sent[2:]) == last
    finally:
        release.set()
        assert all(event.wait(60) for event in sent[2:])
        for lane in lanes:
            lane.close()
