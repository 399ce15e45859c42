"""A generator on a lane, and a thread that waits for what it returns."""

from __future__ import annotations

import threading
from typing import TypeVar

from gradwire.exchange.drivers.lane import Job, Lane
from gradwire.exchange.ops import Exchange

__all__ = ["call"]

T = TypeVar("T")


def call(lane: Lane, generator: Exchange[T], label: str = "") -> T:
    """Run a generator behind all that was submitted to a lane before, wait for its end, and return what it returned.

    Not to be called by the lane's own thread.

    Args:
        label: What a trace shows.

    Raises:
        Exception: what the generator, or the lane, raised; the lane is closed then.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def run(lane: Lane) -> None:
        results.append(lane.drive(generator))
        done.set()

    def fail(error: Exception) -> None:
        errors.append(error)
        done.set()

    lane.submit(Job(run, fail, label))
    done.wait()
    if errors:
        raise errors[0]
    return results[0]
