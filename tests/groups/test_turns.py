"""Tickets: earlier jobs first, whatever thread they run on."""

from __future__ import annotations

import threading

import pytest

from gradwire.groups import Turns


def test_a_ticket_waits_for_all_earlier_ones_and_for_no_later_one() -> None:
    turns = Turns()
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
    turns = Turns()
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
    turns = Turns()
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
