"""Exchanges that a lane starts without waiting end in one of two ways, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.drivers import Lane, WireError
from gradwire.ops import AllToAll, Exchange


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane(dist.HashStore(), 0, 1, timedelta(seconds=30), "lane")
    yield made
    made.close()


def exchange(after: Callable[[], object], collectives: int = 1) -> Exchange[int]:
    for _ in range(collectives):
        yield AllToAll(torch.zeros(1, 4, dtype=torch.uint8), torch.empty(1, 4, dtype=torch.uint8))
    after()
    return 7


def outcome(lane: Lane, generator: Exchange[int], done: Callable[[int], None] = lambda value: None) -> list[object]:
    """Start an exchange; give what ``done`` and ``fail`` were told."""
    told: list[object] = []
    ended = threading.Event()

    def succeed(value: int) -> None:
        told.append(value)
        done(value)
        ended.set()

    def fail(error: Exception) -> None:
        told.append(error)
        ended.set()

    lane.begin(generator, succeed, fail)
    assert ended.wait(5), "neither done nor fail came to an end"
    return told


def test_its_value_is_handed_on(lane: Lane) -> None:
    assert outcome(lane, exchange(lambda: None)) == [7]


def test_what_the_decoder_raises_is_told(lane: Lane) -> None:
    def broken() -> None:
        raise KeyError("decoder")

    (told,) = outcome(lane, exchange(broken))
    assert isinstance(told, KeyError)


def test_what_done_raises_is_told_too(lane: Lane) -> None:
    def broken(value: int) -> None:
        raise KeyError("done")

    value, told = outcome(lane, exchange(lambda: None), broken)
    assert value == 7
    assert isinstance(told, KeyError)


def test_an_exchange_of_two_collectives_is_refused(lane: Lane) -> None:
    (told,) = outcome(lane, exchange(lambda: None, collectives=2))
    assert isinstance(told, TypeError)
    assert not isinstance(told, WireError)
