"""A single lane of its own, for exchanges that the calling thread waits for, at once or later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Group, Lane
from gradwire.exchange.ops import Exchange
from gradwire.link.failures import Failures
from gradwire.link.link_runtime import close_threads
from gradwire.link.peers.circle import Circle

T = TypeVar("T")


class SideLane:
    """A lane with connections and a thread of its own, whose errors name the rank that failed.

    The constructor is a collective call, and all ranks must run the same exchanges in the same order.

    Args:
        group: The ranks.
        circle: The same ranks, with the token of an agreement.
        purpose: Word for messages, the thread's name, and the store's keys.

    Attributes:
        lane: The lane.
        close: Ends the thread and the connections; also called when the object is garbage-collected.
    """

    def __init__(self, group: Group, circle: Circle, purpose: str) -> None:
        rank, world_size, timeout = group.place, group.world_size, group.timeout
        self._purpose = purpose
        (self.lane,) = circle.connected(
            f"the connections for {purpose}",
            lambda store: Lane(dist.PrefixStore(purpose, store), rank, world_size, timeout, f"gradwire {purpose}"),
        )
        self.failures = Failures(circle, [self.lane])
        self.close: Callable[[], object] = weakref.finalize(self, close_threads, [self.lane], circle)

    def run(self, generator: Exchange[T], where: str) -> T:
        """Run an exchange to its end, and return its result.

        Raises:
            ExchangeError: it failed here or on another rank, or an earlier one did, or the lane was closed.
        """
        return self.start(generator, where)()

    def start(self, generator: Exchange[T], where: str) -> Callable[[], T]:
        """Start an exchange; return a function that waits for it and returns its result.

        Raises:
            ExchangeError: an earlier one failed, or the lane was closed. The function raises it if this one fails.
        """
        self.failures.refuse()
        if not self.close.alive:  # type: ignore[attr-defined]
            raise ExchangeError(f"this {self._purpose} link was closed: build another one")
        # The other ranks are told when it fails, not when somebody waits for it.
        future = self.lane.run(generator, where, fail=lambda error: self.failures.record(error, where))

        def result() -> T:
            try:
                return future.result()
            except Exception as error:
                raise self.failures.record(error, where) from error

        return result
