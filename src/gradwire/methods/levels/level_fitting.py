"""Levels and ratios with the least expected variance for a distribution of normalised gradients.

All arithmetic is float64 and runs a few times in a training. The formulas are from Faghri et al., "Adaptive Gradient
Quantization for Data-Parallel SGD", NeurIPS 2020, sections 3.1 to 3.3.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

SMALLEST_DEVIATION = 1e-12
SWEEPS = 60
"""Maximum number of sweeps; descent ends when no level moves by a millionth of its neighbours' distance."""

COMPONENTS = 256
"""Maximum number of components for a fit: workers send 350 blocks each, most of which are nearly alike."""

PLACES = 384
"""Approximate number of places from which levels are chosen before descent; more if there are many levels."""

STEPS = 100
"""Maximum number of steps of an inversion. Bisection needs 33; Newton steps above half of the last are not used."""

LARGEST_RATIO = 1 - 2.0**-24
"""Largest float32 below one. Its first 128 powers are distinct in float32, hence so are the levels of 8 bits."""


class Distribution(ABC):
    """A distribution function F on [-1, 1], of gradients after division by their block's scale."""

    @abstractmethod
    def distribution(self, points: torch.Tensor) -> torch.Tensor:
        """Return F at some points, float64 ``[points]``."""

    @abstractmethod
    def between(self, points: torch.Tensor) -> torch.Tensor:
        """Return the integrals of 1, r and r^2 from each point to the next, float64 ``[3, points - 1]``."""

    @abstractmethod
    def inverse(
        self, mass: torch.Tensor, low: torch.Tensor, high: torch.Tensor, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return an x in [low, high] with F(x) = ``mass``; all float64 ``[points]``.

        ``start`` is an initial guess.
        """

    def merged(self) -> Distribution:
        """Return a distribution that is close to this one and costs less to evaluate; by default this one."""
        return self

    def cdf(self, x: float) -> float:
        """Return F(x)."""
        return float(self.distribution(torch.tensor([x], dtype=torch.float64, device="cpu")))

    def moments(self, a: float, b: float) -> tuple[float, float, float]:
        """Return the integrals of 1, r and r^2 over [a, b]."""
        mass, first, second = self.between(torch.tensor([a, b], dtype=torch.float64, device="cpu")).flatten().tolist()
        return mass, first, second

    def variance(self, levels: Sequence[float]) -> float:
        """Return the expected variance of unbiased rounding: sum_j of the integral of (l_(j+1) - r) (r - l_j) dF."""
        points = torch.tensor(levels, dtype=torch.float64, device="cpu")
        mass, first, second = self.between(points)
        a, b = points[:-1], points[1:]
        return float(((a + b) * first - a * b * mass - second).sum())


class Mixture(Distribution):
    """The distribution F = sum_n w_n N(mean_n, std_n) truncated to [-1, 1].

    Args:
        mean, std, weight: Float64 ``[components]``; weights need not add up to one.
    """

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, weight: torch.Tensor) -> None:
        self.mean, self.std = mean.double(), std.double().clamp(min=SMALLEST_DEVIATION)
        ends = self._normal(torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu"))
        mass = ends[1] - ends[0]
        weight = torch.where(mass > 0, weight.double(), 0.0)
        total = weight.sum()
        # Normals entirely outside the interval are left out.
        self.share = weight / (total if float(total) > 0 else 1.0)
        self.weight = self.share / mass.clamp(min=1e-300)
        self._below = (self.weight * ends[0]).sum()

    def _normal(self, points: torch.Tensor) -> torch.Tensor:
        half: torch.Tensor = 0.5 * torch.special.erfc((self.mean - points[:, None]) / (self.std * math.sqrt(2)))
        return half

    def _density(self, points: torch.Tensor) -> torch.Tensor:
        z = (points[:, None] - self.mean) / self.std
        return torch.exp(-0.5 * z * z) / (self.std * math.sqrt(2 * math.pi))

    def distribution(self, points: torch.Tensor) -> torch.Tensor:
        return self._normal(points) @ self.weight - self._below

    def between(self, points: torch.Tensor) -> torch.Tensor:
        normal, density = self._normal(points), self._density(points)
        mass, low, high, variance = normal[1:] - normal[:-1], density[:-1], density[1:], self.std * self.std
        a, b = points[:-1, None], points[1:, None]
        first = self.mean * mass + variance * (low - high)
        second = (self.mean**2 + variance) * mass + variance * ((a + self.mean) * low - (b + self.mean) * high)
        return torch.stack([mass, first, second]) @ self.weight

    def inverse(
        self, mass: torch.Tensor, low: torch.Tensor, high: torch.Tensor, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the x in [low, high] with F(x) = ``mass``, to 2^-33 of the interval; all float64 ``[points]``.

        Newton's method from ``start``, or from the middle if None; bisection where the density vanishes or Newton's
        method is slow.
        """
        x = 0.5 * (low + high) if start is None else start
        step = high - low
        precision, done = step * 2.0**-33, torch.zeros_like(x, dtype=torch.bool)
        for _ in range(STEPS):
            excess = self.distribution(x) - mass
            low, high = torch.where(excess < 0, x, low), torch.where(excess < 0, high, x)
            newton = x - excess / (self._density(x) @ self.weight)
            good = (newton >= low) & (newton <= high) & ((newton - x).abs() <= 0.5 * step)
            after = torch.where(done, x, torch.where(good, newton, 0.5 * (low + high)))
            step, x = (after - x).abs(), after
            done |= step <= precision
            if bool(done.all()):
                break
        return x

    def merged(self) -> Mixture:
        """Return a mixture of at most :data:`COMPONENTS`, with the same first and second moment except for truncation.

        The variance of levels is sum_j (l_(j+1) - l_(j-1)) H(l_j) plus a constant, with H(x) the integral of F up to x.
        Replacing a group of normals by one with their joint mean m and deviation s changes H by at most about the
        weighted sum of ((mean_n - m)^2 + (std_n - s)^2) / s. So, starting with all components as one group, the group
        with the largest such sum is cut at the mean of the coordinate that varies more, until there are enough groups.
        """
        some = torch.nonzero(self.share > 0).flatten()
        if len(some) <= COMPONENTS:
            return self
        # The number breaks ties, in the order of the cuts.
        groups = [(-self._spread(some), 0, some)]
        for number in itertools.count(1):
            if len(groups) >= COMPONENTS or groups[0][0] == 0:
                break
            _, _, group = heapq.heappop(groups)
            for i, part in enumerate(self._cut(group)):
                heapq.heappush(groups, (-self._spread(part), 2 * number + i, part))
        rows = torch.stack([self._pooled(group) for _, _, group in groups])
        return Mixture(*rows.unbind(1))

    def _pooled(self, group: torch.Tensor) -> torch.Tensor:
        """Return mean, deviation and weight of a group as one distribution."""
        mean, std, share = self.mean[group], self.std[group], self.share[group]
        total = share.sum()
        centre = (share * mean).sum() / total
        variance = (share * (std**2 + (mean - centre) ** 2)).sum() / total
        return torch.stack([centre, variance.sqrt(), total])

    def _spread(self, group: torch.Tensor) -> float:
        centre, std, _ = self._pooled(group)
        away = (self.mean[group] - centre) ** 2 + (self.std[group] - std) ** 2
        # Equal components cannot be cut, even if rounding gives them a spread.
        alike = bool((self.mean[group] == self.mean[group[0]]).all() & (self.std[group] == self.std[group[0]]).all())
        return 0.0 if alike else float((self.share[group] * away).sum() / std)

    def _cut(self, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.share[group] / self.share[group].sum()

        def spread(values: torch.Tensor) -> float:
            alike = bool((values == values[0]).all())
            return -1.0 if alike else float((share * (values - (share * values).sum()) ** 2).sum())

        values = max((self.mean[group], self.std[group]), key=spread)
        low = values <= (share * values).sum()
        if bool(low.all()) or not bool(low.any()):
            low = values < values.max()
        return group[low], group[~low]


def best_levels(distribution: Distribution, count: int, starts: Sequence[Sequence[float]] = ()) -> list[float]:
    """Place ``count`` levels from -1 to 1 so that the expected variance is least, by coordinate descent.

    With neighbours c < l < d the best l solves F(l) = F(d) - (integral over [c, d] of (r - c) dF) / (d - c); sweeps
    over the inner levels never raise the objective. With four or more free levels it has several minima. So the sweeps
    start from the best choice among some hundred places, found by dynamic programming. The places include the given
    starts, quantiles, an even grid and an exponential grid. F is that of :meth:`Mixture.merged`.
    """
    distribution = distribution.merged()
    return _descend(distribution, _chosen(distribution, _places(distribution, count, starts), count))


def _places(distribution: Distribution, count: int, starts: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return candidates from -1 to 1, ascending: dense where the best levels are dense, with some everywhere.

    The density of the best of very many levels is the cube root of the distribution's, which is taken as constant
    between even places, quantiles and exponential places around zero.
    """
    number = max(PLACES, 3 * count)
    even = torch.linspace(-1, 1, number // 3 + 1, dtype=torch.float64, device="cpu")
    half = 2.0 ** (-20 * torch.arange(number // 6, dtype=torch.float64, device="cpu") / (number // 6))
    coarse = torch.cat([even, _quantiles(distribution, number // 3), half, -half]).unique()
    gaps = coarse.diff()
    share = (distribution.between(coarse)[0].clamp(min=0) / gaps) ** (1 / 3) * gaps
    reached = torch.cat([share.new_zeros(1), share.cumsum(0)])
    wanted = reached[-1] * torch.arange(1, number, dtype=torch.float64, device="cpu") / number
    after = torch.searchsorted(reached, wanted, right=True).clamp(1, len(gaps))
    part = (wanted - reached[after - 1]) / share[after - 1].clamp(min=1e-300)
    fine = coarse[after - 1] + part.clamp(0, 1) * gaps[after - 1]
    given = [*starts, [-1 + 2 * j / (count - 1) for j in range(count)], _exponential(count)]
    known = [torch.tensor(list(levels), dtype=torch.float64, device="cpu") for levels in given]
    places = [fine, coarse[::3], coarse[-1:], _quantiles(distribution, count - 1), *known]
    return torch.tensor(sorted(set(torch.cat(places).tolist())), dtype=torch.float64, device="cpu")


def _quantiles(distribution: Distribution, count: int) -> torch.Tensor:
    wanted = torch.arange(1, count, dtype=torch.float64, device="cpu") / count
    return distribution.inverse(wanted, torch.full_like(wanted, -1), torch.full_like(wanted, 1))


def _chosen(distribution: Distribution, places: torch.Tensor, count: int) -> list[float]:
    """Return the ``count`` places, the first and the last among them, whose expected variance as levels is least."""
    sums = torch.cat([places.new_zeros(3, 1), distribution.between(places).cumsum(1)], 1)
    mass, first, second = sums[:, None, :] - sums[:, :, None]
    a, b = places[:, None], places
    # Where the distribution has no mass, a tiny uniform density decides.
    cost = ((a + b) * first - a * b * mass - second).clamp(min=0) + 1e-15 * (b - a) ** 3
    # By the later place, and in memory that each step writes anew: of many levels it is 18 MB.
    cost = cost.masked_fill(a >= b, torch.inf).t().contiguous()
    least, came_from, room = cost[:, 0], [], torch.empty_like(cost)
    for _ in range(count - 2):
        least, best = torch.add(least, cost, out=room).min(1)
        came_from.append(best)
    path = [len(places) - 1]
    for best in reversed(came_from):
        path.append(int(best[path[-1]]))
    return [float(places[i]) for i in (0, *reversed(path))]


def _exponential(count: int) -> list[float]:
    half = [2.0**-j for j in range(count // 2)]
    return [-x for x in half] + ([0.0] if count % 2 else []) + half[::-1]


def _descend(distribution: Distribution, levels: list[float]) -> list[float]:
    """Sweep over every second level at once: the best place of a level depends on its two neighbours only."""
    x = torch.tensor(levels, dtype=torch.float64, device="cpu")
    for _ in range(SWEEPS):
        moved = 0.0
        for first in (1, 2):
            neighbours = x[first - 1 :: 2]
            c, d = neighbours[:-1], neighbours[1:]
            if not len(c):
                continue
            old = x[first::2][: len(c)].clone()
            mass, one, _ = distribution.between(neighbours)
            level = distribution.inverse(distribution.distribution(d) - (one - c * mass) / (d - c), c, d, old)
            level = torch.where((mass > 1e-300) & (c < level) & (level < d), level, old)
            moved = max(moved, float(((level - old).abs() / (d - c)).max()))
            x[first::2][: len(c)] = level
        if moved < 1e-6:
            break
    return [float(level) for level in x]


def powers(ratio: float, count: int) -> list[float]:
    """Return the levels +-ratio^j, j = 0 .. count / 2 - 1, ascending; no zero."""
    half = [ratio**j for j in range(count // 2)]
    return [-x for x in half] + half[::-1]


def best_ratio(distribution: Distribution, count: int) -> float:
    """Return the ratio p of :func:`powers` with the least expected variance: a grid, then golden sections around it.

    p is at most :data:`LARGEST_RATIO`. The distribution is that of :meth:`Distribution.merged`.
    """
    distribution = distribution.merged()
    # Few levels on long blocks need ratios near zero, which are spaced by powers of two; many levels need ratios near
    # one.
    grid = [0.02 * 2.0**-k for k in range(16, 0, -1)] + [0.02 * k for k in range(1, 48)]
    grid += [1 - 0.06 * 2.0 ** (-k / 2) for k in range(1, 40)] + [LARGEST_RATIO]
    cost = [distribution.variance(powers(p, count)) for p in grid]
    best = min(range(len(grid)), key=lambda k: cost[k])
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if distribution.variance(powers(a, count)) < distribution.variance(powers(b, count)):
            high = b
        else:
            low = a
    return 0.5 * (low + high)
