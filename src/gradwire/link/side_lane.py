"""A lane beside those of a link, for exchanges that the calling thread waits for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Lane, group_timeout
from gradwire.exchange.ops import Exchange
from gradwire.link.failures import Failures
from gradwire.link.link_runtime import close_threads
from gradwire.link.peers.circle import Circle

T = TypeVar("T")


class SideLane:
    """Connections of their own, a thread, and what names the rank that fails.

    Building one is collective, and all its ranks run the same exchanges in the same order.

    Args:
        group: Whose ranks it joins.
        circle: Those ranks, with a token, as an agreement gives them.
        purpose: For messages, the thread's name, and the store's keys.

    Attributes:
        lane: The lane.
        close: Ends the thread and the connections; done also when this is dropped.
    """

    def __init__(self, group: dist.ProcessGroup, circle: Circle, purpose: str) -> None:
        rank, world_size, self._purpose = group.rank(), group.size(), purpose
        timeout = group_timeout(group)
        (self.lane,) = circle.connected(
            f"the connections for {purpose}",
            lambda store: [Lane(dist.PrefixStore(purpose, store), rank, world_size, timeout, f"gradwire {purpose}")],
        )
        self.failures = Failures(circle, [self.lane])
        self.close: Callable[[], object] = weakref.finalize(self, close_threads, [self.lane], circle, ())

    def run(self, generator: Exchange[T], where: str) -> T:
        """Run an exchange to its end, and return what it returned.

        Raises:
            ExchangeError: it failed here or on another rank, or an earlier one did, or the lane was closed.
        """
        self.failures.refuse()
        if not self.close.alive:  # type: ignore[attr-defined]
            raise ExchangeError(f"this {self._purpose} link was closed: build another one")
        try:
            return self.lane.run(generator, where).result()
        except Exception as error:
            raise self.failures.record(error, where) from error
