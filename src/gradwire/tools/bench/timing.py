"""Timing of functions against memcpy, interleaved in one run.

A row holds the time per element of a function as a share of the time per element of a float32 memcpy that runs right
before and after it, so that clock speeds and other processes affect both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_REST_CYCLES = 4_000_000
"""Two milliseconds at 2 GHz, in which any work of a benchmark is enqueued."""


class Bench:
    """Runs each function between two memcpys and collects rows.

    Args:
        elements: Elements of a memcpy.
        repetitions: Repetitions of each function.
        say: Called with each row.
        goals: Goals for the ratio to a memcpy, by name of the row.
        device: Device of the vectors. On a GPU, times are those between two events on its current stream, which rests
            before until this process has enqueued the work: they are the GPU's own. A row's ``host_s`` is the time that
            this process takes to enqueue the work.
    """

    def __init__(
        self,
        elements: int,
        repetitions: int,
        say: Callable[[dict[str, Any]], None],
        goals: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.elements, self.repetitions, self.say = elements, repetitions, say
        self.goals = dict(goals or {})
        self.device = torch.device(device)
        self.source = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(self.device)
        self.target = torch.zeros_like(self.source)
        self.rows: list[dict[str, Any]] = []
        self._host_s = 0.0

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes."""
        if self.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_REST_CYCLES)
            first.record()
            began = time.perf_counter()
            work()
            self._host_s = time.perf_counter() - began
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def _memcpy(self) -> float:
        return self._seconds(lambda: self.target.copy_(self.source))

    def run(self, kernel: str, layout: str, elements: int, work: Callable[[], object], inner: int = 1) -> None:
        """Time ``work`` on ``elements``; each measurement calls it ``inner`` times."""

        def repeated() -> None:
            for _ in range(inner):
                work()

        def timed() -> float:
            return self._seconds(repeated) / inner

        work()
        self.take(kernel, layout, elements, timed)

    def take(self, kernel: str, layout: str, elements: int, timed: Callable[[], float]) -> None:
        """Add a row for ``elements`` from the seconds that ``timed`` returns."""
        seconds, ratios, host = [], [], []
        for _ in range(self.repetitions):
            before = self._memcpy()
            spent = timed()
            host.append(self._host_s)
            seconds.append(spent)
            ratios.append(spent / elements / ((before + self._memcpy()) / 2 / self.elements))
        low, high = percentiles_20_80(ratios)
        row = {
            "kernel": kernel,
            "layout": layout,
            "elements": elements,
            "median_s": statistics.median(seconds),
            "ratio_to_memcpy": statistics.median(ratios),
            "ratio_p20": low,
            "ratio_p80": high,
            "goal_ratio": self.goals.get(kernel),
        }
        if self.device.type == "cuda":
            row["host_s"] = statistics.median(host)
        self.rows.append(row)
        self.say(row)


def percentiles_20_80(times: Sequence[float]) -> tuple[float, float]:
    """Return the 20th and the 80th percentile of a sample, which lie within it however small it is."""
    if len(times) == 1:
        return times[0], times[0]
    # The default of the standard library extrapolates beyond samples of two or three.
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return low, high
