"""Time functions against memcpy, interleaved in one run.

Every row is the time per element of a function as a share of the time per element of a float32 memcpy, which runs right
before and after it: machines, clocks and neighbours change both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Bench"]


class Bench:
    """Runs functions between two memcpys each and collects rows.

    Args:
        elements: Of a memcpy.
        repetitions: Of each function.
        say: Called with each row.
        goals: Ratios to a memcpy that are aimed at, by row.
    """

    def __init__(
        self,
        elements: int,
        repetitions: int,
        say: Callable[[dict[str, Any]], None],
        goals: Mapping[str, float] | None = None,
    ) -> None:
        self.elements, self.repetitions, self.say = elements, repetitions, say
        self.goals = dict(goals or {})
        generator = torch.Generator().manual_seed(0)
        self.source, self.target = torch.randn(elements, generator=generator), torch.zeros(elements)
        self.rows: list[dict[str, Any]] = []

    def _memcpy(self) -> float:
        began = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - began

    def run(self, kernel: str, layout: str, elements: int, work: Callable[[], object], inner: int = 1) -> None:
        """Time ``work``, which handles ``elements``, ``inner`` times at a go."""

        def timed() -> float:
            began = time.perf_counter()
            for _ in range(inner):
                work()
            return (time.perf_counter() - began) / inner

        work()
        self.take(kernel, layout, elements, timed)

    def take(self, kernel: str, layout: str, elements: int, timed: Callable[[], float]) -> None:
        """Make a row of what ``timed`` says it took, in seconds, for ``elements``."""
        seconds, ratios = [], []
        for _ in range(self.repetitions):
            before = self._memcpy()
            spent = timed()
            seconds.append(spent)
            ratios.append(spent / elements / ((before + self._memcpy()) / 2 / self.elements))
        # The sample is all there is: beyond its ends nothing is guessed.
        low, _, _, high = statistics.quantiles(ratios, n=5, method="inclusive")
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
        self.rows.append(row)
        self.say(row)
