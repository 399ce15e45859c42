"""Mean and deviation of what methods report of every step and worker, between two rows of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Spreads"]


class Spreads:
    """Count, sum and sum of squares of each gauge since the last row.

    Args:
        names: The gauges; the same on all ranks, since all add up theirs together.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.sums: dict[str, list[float]] = {}
        self._begin()

    def _begin(self) -> None:
        self.sums = {name: [0.0, 0.0, 0.0] for name in self._names}

    def add(self, workers: Sequence[Mapping[str, float]]) -> None:
        """Take one step's gauges of the workers of this process; those of other names are left out."""
        for gauges in workers:
            for name in self._names:
                if name in gauges:
                    value = gauges[name]
                    self.sums[name] = [a + b for a, b in zip(self.sums[name], (1.0, value, value * value))]

    def take(self, mean: Callable[[Sequence[float]], Sequence[float]]) -> dict[str, dict[str, float]]:
        """Return mean and standard deviation of each gauge over steps and workers, and begin anew (collective).

        A gauge that no worker reported is left out.

        Args:
            mean: Takes the mean of each number over processes; it is called with as many on each, or not at all.
        """
        if not self._names:
            return {}
        flat = mean([value for name in self._names for value in self.sums[name]])
        self._begin()
        found = {}
        for i, name in enumerate(self._names):
            count, total, squares = flat[3 * i : 3 * i + 3]
            if count:
                centre = total / count
                found[name] = {"mean": centre, "deviation": math.sqrt(max(0.0, squares / count - centre * centre))}
        return found

    def load(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Continue from the sums of a checkpoint."""
        self._begin()
        self.sums.update({name: list(sums[name]) for name in self._names if name in sums})
