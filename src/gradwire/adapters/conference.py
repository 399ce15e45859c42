"""Numbers that ranks tell each other between two buckets, over a lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

from gradwire.groups import Job, Lane
from gradwire.ops import AllGather, AllToAll, Exchange

__all__ = ["Conference"]

T = TypeVar("T")

SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 18
REPEATS = 3


class Conference:
    """Collective calls from the thread that brings buckets; each waits for its answer.

    Safe where every rank makes the same call at the same place: the lane runs it behind what was submitted before.

    Args:
        lane: That carries the calls.
        failed: Turns a failure into the link's error.
    """

    def __init__(self, lane: Lane, failed: Callable[[Exception], Exception]) -> None:
        self._lane, self._failed = lane, failed

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Give every rank's values, by rank.

        Raises:
            ExchangeError: a rank is gone.
        """
        mine = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
        rows = self._call(_all_gather(mine, self._lane.world_size))
        found: list[list[float]] = rows.view(torch.float64).view(self._lane.world_size, -1).tolist()
        return found

    def bandwidth(self) -> float:
        """Measure the bytes a second that this rank sends while all do; see :meth:`link`."""
        return self.link()[0]

    def link(self) -> tuple[float, float]:
        """Measure bandwidth, in bytes a second, and latency, in seconds, from all-to-alls of two sizes.

        Raises:
            ExchangeError: a rank is gone.
        """
        n = self._lane.world_size
        times = {}
        for size in (SMALL_BYTES, LARGE_BYTES):
            send, recv = torch.zeros((n, size), dtype=torch.uint8), torch.empty((n, size), dtype=torch.uint8)
            taken = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                self._call(_all_to_all(send, recv))
                taken.append(time.perf_counter() - start)
            times[size] = median(taken)
        more_s = max(times[LARGE_BYTES] - times[SMALL_BYTES], 1e-6)
        return (n - 1) * (LARGE_BYTES - SMALL_BYTES) / more_s, times[SMALL_BYTES]

    def _call(self, generator: Exchange[T]) -> T:
        done = threading.Event()
        results: list[T] = []
        errors: list[Exception] = []

        def run(lane: Lane) -> None:
            results.append(lane.drive(generator))
            done.set()

        def fail(error: Exception) -> None:
            errors.append(error)
            done.set()

        self._lane.submit(Job(run, fail))
        done.wait()
        if errors:
            raise self._failed(errors[0]) from errors[0]
        return results[0]


def _all_gather(mine: torch.Tensor, world_size: int) -> Exchange[torch.Tensor]:
    return (yield AllGather(mine, torch.empty((world_size, mine.numel()), dtype=torch.uint8)))


def _all_to_all(send: torch.Tensor, recv: torch.Tensor) -> Exchange[torch.Tensor]:
    return (yield AllToAll(send, recv))
