"""Small collective calls between buckets: gathers of numbers, and measurements of the network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.drivers import Future, Lane
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.ops import AllGather, AllToAll, Exchange
from gradwire.exchange.wire import checked_values, with_checksum
from gradwire.model.probing import Probed, host_number

T = TypeVar("T")

SMALL_BYTES, LARGE_BYTES = 1 << 8, 1 << 18
SMALL_REPEATS, REPEATS = 7, 5
"""Odd; the first repetitions of a job take longer, since no receive was posted for them."""

LONG_S = 0.03
"""Least time of a measurement: a token bucket's burst of one millisecond of the rate then is three per cent of it."""
MOST_BYTES = 1 << 25
"""Largest number of bytes of a rank in one all-to-all of a measurement."""


class ControlChannel:
    """Collective calls from the thread that passes buckets; each waits for its result, except :meth:`gathering`.

    Calls that wait for ranks that have not begun this step are safe between steps, but not during a backward pass with
    other collectives. Every rank must make the same calls in the same places: the lane runs them after the jobs that
    were submitted before.

    Args:
        lane: The lane that runs the calls.
        failed: Turns an exception and the subject of a call into the link's error.
        ranks: Global numbers of the lane's ranks, for messages.
    """

    def __init__(self, lane: Lane, failed: Callable[[Exception, str], Exception], ranks: Sequence[int]) -> None:
        self._lane, self._failed, self.ranks = lane, failed, ranks
        self._messages = 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank.

        Raises:
            ExchangeError: a rank is gone.
            PayloadError: a rank's message changed in transit.
        """
        mine, number = self._message(values)
        return self._opened(self.run(_all_gather(mine, self._lane.world_size)), number)

    def gathering(self, values: Sequence[float], about: str) -> Callable[[], list[list[float]]]:
        """Start to gather without waiting; return a function that waits and returns every rank's values.

        Call it while the lane is idle: it starts at once, before any job that is submitted to the lane next.

        Raises:
            ExchangeError: a rank is gone; the returned function raises it.
        """
        n = self._lane.world_size
        mine, number = self._message(values)
        recv = torch.empty((n, mine.numel()), dtype=torch.uint8, device="cpu")
        begun = self._lane.run(_all_to_all(mine.repeat(n, 1), recv), at_once=True)

        def answer() -> list[list[float]]:
            return self._opened(self._waited(begun, about), number, about)

        return answer

    def run(self, generator: Exchange[T], about: str = "the choice of a method") -> T:
        """Run a protocol that all ranks run at this place, and return its result.

        Raises:
            ExchangeError: a rank is gone.
        """
        return self._waited(self._lane.run(generator), about)

    def _waited(self, begun: Future[T], about: str) -> T:
        try:
            return begun.result()
        except Exception as error:
            raise self._failed(error, about) from error

    def _message(self, values: Sequence[float]) -> tuple[torch.Tensor, int]:
        """Return the bytes of a message, with a checksum that includes its number, and the number."""
        self._messages += 1
        told = torch.tensor(values, dtype=torch.float64, device="cpu")
        return with_checksum(told, self._lane.rank, self._messages), self._messages

    def _opened(self, rows: torch.Tensor, number: int, about: str = "the choice of a method") -> list[list[float]]:
        try:
            found: list[list[float]] = checked_values(rows, torch.float64, "numbers", number).tolist()
        except PayloadError as error:
            raise self._failed(error, about) from error
        return found

    def probe(self, most_bytes: int = MOST_BYTES) -> Probed:
        """Time all-to-alls of small and of large rows; the result is the same on every rank.

        Rows grow until their time is long against a token bucket's burst and the clock of a scheduler. On one host,
        where no network is used, large rows are left out.

        Args:
            most_bytes: Largest number of bytes of a rank in one all-to-all, unless rows of 256 KiB have more.

        Raises:
            ExchangeError: a rank is gone.
        """
        return self._probe(most_bytes, within_a_host=False)

    def cost(self) -> LinkCost:
        """Measure the cost of a message to all other ranks, over any network; the result is the same on every rank.

        Raises:
            ExchangeError: a rank is gone.
        """
        return self._probe(MOST_BYTES, within_a_host=True).cost

    def _probe(self, most_bytes: int, *, within_a_host: bool) -> Probed:
        hosts = [row[0] for row in self.gather([host_number()])]
        small_s = median(row[0] for row in self.gather([self._timed(SMALL_BYTES, SMALL_REPEATS)]))
        found = Probed(
            world_size=self._lane.world_size,
            ranks_per_host=max(Counter(hosts).values()),
            small_bytes=SMALL_BYTES,
            small_s=small_s,
            large_bytes=LARGE_BYTES,
            large_s=0.0,
        )
        while within_a_host or not found.one_host:
            large_s = max(row[0] for row in self.gather([self._timed(found.large_bytes, REPEATS)]))
            found = replace(found, large_s=large_s)
            more = 4 * found.large_bytes
            if found.wire_s >= LONG_S or more * (found.world_size - 1) > most_bytes:
                break
            found = replace(found, large_bytes=more)
        return found

    def _timed(self, size: int, repeats: int) -> float:
        n = self._lane.world_size
        send = torch.zeros((n, size), dtype=torch.uint8, device="cpu")
        recv = torch.empty_like(send)
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.run(_all_to_all(send, recv))
            taken.append(time.perf_counter() - start)
        return median(taken)


def _all_gather(mine: torch.Tensor, world_size: int) -> Exchange[torch.Tensor]:
    rows = yield AllGather(mine, torch.empty((world_size, mine.numel()), dtype=torch.uint8, device="cpu"))
    return rows.clone()


def _all_to_all(send: torch.Tensor, recv: torch.Tensor) -> Exchange[torch.Tensor]:
    rows = yield AllToAll(send, recv)
    # A reply is valid only until its job ends, and this one is read by another thread.
    return rows.clone()
