"""Find the best levels for gradients in NumPy and SciPy, as an oracle that shares no code with the package.

Blocks are taken from the gradients; the expected variance of unbiased rounding is that of truncated normals, or of the
values themselves; levels are found by dynamic programming over a fine grid, ratios by a scan and a bounded search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize, stats

import gradwire as gw


class Model(ABC):
    """A distribution on [-1, 1]."""

    @abstractmethod
    def partial(self, points: np.ndarray) -> np.ndarray:
        """Return the integrals of 1, r and r^2 up to each point, ``[3, points]``."""

    def costs(self, points: np.ndarray) -> np.ndarray:
        """Return the integral of (b - r) (r - a) over [a, b] for all pairs of points, ``[points, points]``."""
        zero, one, two = (s[None, :] - s[:, None] for s in self.partial(points))
        a, b = points[:, None], points[None, :]
        return (a + b) * one - a * b * zero - two

    def variance(self, levels: np.ndarray) -> float:
        """Return the expected variance of unbiased rounding to the levels."""
        return float(np.diagonal(self.costs(levels), 1).sum())

    def best_levels(self, count: int) -> float:
        """Return the least expected variance of ``count`` levels among 501 places from -1 to 1."""
        half = np.geomspace(2e-4, 1, 250)
        places = np.concatenate([-half[::-1], [0.0], half])
        costs = self.costs(places)
        costs[np.tril_indices(len(places))] = np.inf
        least = costs[0]
        for _ in range(count - 2):
            least = (least[:, None] + costs).min(0)
        return float(least[-1])

    def best_ratio(self, count: int) -> float:
        """Return the least expected variance of levels +-p^j: the best of ratios from 1e-4 to 1 - 1e-6, and near it."""
        logs = np.geomspace(1e-6, -np.log(1e-4), 150)

        def cost(log: float) -> float:
            return self.variance(grid(np.exp(-log), count))

        found = [cost(log) for log in logs]
        best = int(np.argmin(found))
        bounds = logs[max(best - 1, 0)], logs[min(best + 1, len(logs) - 1)]
        near: float = optimize.minimize_scalar(cost, bounds=bounds, method="bounded").fun
        return min(near, found[best])


@dataclass(frozen=True)
class Normals(Model):
    """A mixture of normals truncated to [-1, 1]; ``weight`` need not add up to one."""

    mean: np.ndarray
    std: np.ndarray
    weight: np.ndarray

    def partial(self, points: np.ndarray) -> np.ndarray:
        z = (points[:, None] - self.mean) / self.std
        ends = (np.array([[-1.0], [1.0]]) - self.mean) / self.std
        share = self.weight / self.weight.sum() / (stats.norm.cdf(ends[1]) - stats.norm.cdf(ends[0]))
        below, density = stats.norm.cdf(z), stats.norm.pdf(z)
        first = self.mean * below - self.std * density
        second = (self.mean**2 + self.std**2) * below - self.std * (self.mean + points[:, None]) * density
        return np.stack([part @ share for part in (below, first, second)])


class Values(Model):
    """The values themselves, each with a weight."""

    def __init__(self, r: np.ndarray, weight: np.ndarray) -> None:
        order = np.argsort(r)
        self.r, share = r[order], weight[order] / weight.sum()
        moments = [np.cumsum(share * self.r**k) for k in range(3)]
        self.sums = np.stack([np.concatenate([[0.0], m]) for m in moments])

    def partial(self, points: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.sums[:, np.searchsorted(self.r, points)]
        return found


def grid(ratio: float, count: int) -> np.ndarray:
    half = ratio ** np.arange(count // 2)
    return np.concatenate([-half, half[::-1]])


def blocks_of(g: torch.Tensor, sizes: list[int], norm: str) -> list[tuple[np.ndarray, float]]:
    """Cut each worker's row into blocks; return each block's values over its scale, and the scale."""
    found = []
    for row in g.double().numpy():
        for v in np.split(row, np.cumsum(sizes)[:-1]):
            scale = np.abs(v).max() if norm == "max" else np.sqrt((v**2).sum())
            found.append((v / scale, float(scale)))
    return found


def normals_of(g: torch.Tensor, sizes: list[int], norm: str, weighted: bool) -> Normals:
    """Return what the paper's model makes of the gradients: each block's error is its scale^2 times that of r.

    The error of a block is a sum over its values: scale^2 times length times the expected variance at r. Without
    scales, all values count alike, and are one normal.
    """
    blocks = blocks_of(g, sizes, norm)
    if weighted:
        columns = [(r.mean(), r.std(), scale**2 * len(r)) for r, scale in blocks]
        return Normals(*(np.array(column) for column in zip(*columns)))
    every = np.concatenate([r for r, _ in blocks])
    return Normals(np.array([every.mean()]), np.array([every.std()]), np.ones(1))


def values_of(g: torch.Tensor, sizes: list[int], norm: str, weighted: bool) -> Values:
    """Return the values over their scales, weighted by scale^2, or alike."""
    blocks = blocks_of(g, sizes, norm)
    weight = [np.full(len(r), scale**2 if weighted else 1.0) for r, scale in blocks]
    return Values(np.concatenate([r for r, _ in blocks]), np.concatenate(weight))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unlike_shapes() -> tuple[torch.Tensor, list[int], dict[str, object]]:
    """Maxima as scales: blocks whose largest value stands out by far beside blocks that are all but flat."""
    g = normal(2, 64, 512)
    g[:, ::2, 7] = 60.0
    g[:, 1::2] = 3 * torch.sign(g[:, 1::2]) * torch.rand(2, 32, 512, generator=torch.Generator().manual_seed(1))
    return g.view(2, -1), [512] * 64, {"norm": "max", "block_size": 512}


def unlike_lengths() -> tuple[torch.Tensor, list[int], dict[str, object]]:
    """Norms of whole parameters: short ones with large norms beside a long one."""
    sizes = [1024, 1024, 1024, 1 << 17]
    g = torch.cat([20 * normal(2, 3072), normal(2, 1 << 17, seed=1)], 1)
    return g, sizes, {"blocks": "parameter", "block_size": None}


def ragged() -> tuple[torch.Tensor, list[int], dict[str, object]]:
    """The last block of a model is short, and the largest by its norm."""
    g = torch.cat([normal(2, 32768), 200 * normal(2, 16, seed=1)], 1)
    return g, [32768, 16], {"block_size": 32768}


SETTINGS = [unlike_shapes, unlike_lengths, ragged]


def fitted(method: gw.Method, g: torch.Tensor, sizes: list[int]) -> np.ndarray:
    workers = [{f"p{i}": part for i, part in enumerate(row.split(sizes))} for row in g]
    levels: np.ndarray = gw.simulate(workers, method).state["global"]["levels"].numpy()
    return levels
