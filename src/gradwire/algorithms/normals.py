"""Where normalised gradients lie: mixtures of truncated normals, and the levels that serve them best.

All of it in float64 on a few thousand components, a few times in a training; the formulas are those of Faghri et al.,
"Adaptive Gradient Quantization for Data-Parallel SGD", NeurIPS 2020, sections 3.1 to 3.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

__all__ = ["Mixture", "best_levels", "best_ratio", "powers"]

SMALLEST_DEVIATION = 1e-12
SWEEPS = 60
"""Of coordinate descent, at most; it ends when no level moves by more than a millionth of its neighbours' distance."""


class Mixture:
    """The distribution F = sum_n w_n N(mean_n, std_n) truncated to [-1, 1].

    Args:
        mean, std, weight: Float64 ``[components]``; weights need not add up to one.
    """

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, weight: torch.Tensor) -> None:
        self.mean, self.std = mean.double(), std.double().clamp(min=SMALLEST_DEVIATION)
        mass = self._normal(1.0) - self._normal(-1.0)
        weight = torch.where(mass > 0, weight.double(), 0.0)
        total = weight.sum()
        # Normals that lie outside of the interval altogether say nothing about the inside.
        self.weight = weight / (total if float(total) > 0 else 1.0) / mass.clamp(min=1e-300)

    def _normal(self, x: float) -> torch.Tensor:
        half: torch.Tensor = 0.5 * torch.special.erfc((self.mean - x) / (self.std * math.sqrt(2)))
        return half

    def _density(self, x: float) -> torch.Tensor:
        z = (x - self.mean) / self.std
        return torch.exp(-0.5 * z * z) / (self.std * math.sqrt(2 * math.pi))

    def cdf(self, x: float) -> float:
        """F(x)."""
        return float((self.weight * (self._normal(x) - self._normal(-1.0))).sum())

    def moments(self, a: float, b: float) -> tuple[float, float, float]:
        """The integrals of 1, r and r^2 over [a, b]."""
        mass = self._normal(b) - self._normal(a)
        low, high, variance = self._density(a), self._density(b), self.std * self.std
        first = self.mean * mass + variance * (low - high)
        second = (self.mean**2 + variance) * mass + variance * ((a + self.mean) * low - (b + self.mean) * high)
        w = self.weight
        return float((w * mass).sum()), float((w * first).sum()), float((w * second).sum())

    def inverse(self, mass: float, low: float, high: float) -> float:
        """The x in [low, high] with F(x) = ``mass``: cut by sixteen, eight times; density may vanish, so no Newton."""
        base = self.weight * self._normal(-1.0)
        for _ in range(8):
            points = torch.linspace(low, high, 17, dtype=torch.float64)[1:-1]
            z = (self.mean - points[:, None]) / (self.std * math.sqrt(2))
            reached = int((((0.5 * torch.special.erfc(z) * self.weight) - base).sum(1) < mass).sum())
            step = (high - low) / 16
            low, high = low + reached * step, low + (reached + 1) * step
        return 0.5 * (low + high)

    def variance(self, levels: Sequence[float]) -> float:
        """Expected variance of unbiased rounding: sum_j of the integral of (l_(j+1) - r) (r - l_j) dF."""
        total = 0.0
        for a, b in itertools.pairwise(levels):
            mass, first, second = self.moments(a, b)
            total += (a + b) * first - a * b * mass - second
        return total


def best_levels(mixture: Mixture, count: int, starts: Sequence[Sequence[float]] = ()) -> list[float]:
    """Place ``count`` levels from -1 to 1 so that the expected variance is least, by coordinate descent.

    With neighbours c < l < d the best l solves F(l) = F(d) - (integral over [c, d] of (r - c) dF) / (d - c); sweeps
    over the inner levels never raise the objective. It has several minima from four free levels on: the best of the
    given starts, of quantiles, of an even and of an exponential grid is kept.
    """
    even = [-1 + 2 * j / (count - 1) for j in range(count)]
    quantile = [-1.0, *(mixture.inverse(j / (count - 1), -1.0, 1.0) for j in range(1, count - 1)), 1.0]
    candidates = [list(s) for s in (*starts, quantile, even, _exponential(count))]
    found = [_descend(mixture, c) for c in candidates if all(a < b for a, b in itertools.pairwise(c))]
    return min(found, key=mixture.variance)


def _exponential(count: int) -> list[float]:
    half = [2.0**-j for j in range(count // 2)]
    return [-x for x in half] + ([0.0] if count % 2 else []) + half[::-1]


def _descend(mixture: Mixture, levels: list[float]) -> list[float]:
    for _ in range(SWEEPS):
        moved = 0.0
        for j in range(1, len(levels) - 1):
            c, d = levels[j - 1], levels[j + 1]
            mass, first, _ = mixture.moments(c, d)
            if mass <= 1e-300:
                continue
            level = mixture.inverse(mixture.cdf(d) - (first - c * mass) / (d - c), c, d)
            if c < level < d:
                moved = max(moved, abs(level - levels[j]) / (d - c))
                levels[j] = level
        if moved < 1e-6:
            break
    return levels


def powers(ratio: float, count: int) -> list[float]:
    """Give the levels +-ratio^j, j = 0 .. count / 2 - 1, ascending; no zero."""
    half = [ratio**j for j in range(count // 2)]
    return [-x for x in half] + half[::-1]


def best_ratio(mixture: Mixture, count: int) -> float:
    """Give the ratio p of :func:`powers` with the least expected variance: a grid, then golden sections around it."""
    grid = [0.02 * k for k in range(1, 48)]
    cost = [mixture.variance(powers(p, count)) for p in grid]
    best = min(range(len(grid)), key=lambda k: cost[k])
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if mixture.variance(powers(a, count)) < mixture.variance(powers(b, count)):
            high = b
        else:
            low = a
    return 0.5 * (low + high)
