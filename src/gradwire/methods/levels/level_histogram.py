"""Histograms of normalised gradients: how often values fall into fixed bins, counted exactly.

Bins are those of a float32's leading bits, so that every backend, layout and machine agrees on them: 16 to an octave,
even within it, from 2^-20 to 1 on either side of zero, and one bin from -2^-20 to 2^-20.
"""

from __future__ import annotations

import torch

from gradwire.kernels import SegmentTable
from gradwire.methods.levels.level_fitting import Distribution

__all__ = ["BINS", "Histogram", "bin_edges", "count_values"]

_OCTAVES, _BITS_PER_OCTAVE = 20, 4
_SIDE = _OCTAVES << _BITS_PER_OCTAVE

BINS = 2 * _SIDE + 1
"""Number of bins."""

_SHIFT = 23 - _BITS_PER_OCTAVE
_FIRST = (127 - _OCTAVES) << _BITS_PER_OCTAVE
_PIECE = 1 << 18
"""Values that are counted at a time, so that what is computed on the way stays in the cache."""


def bin_edges() -> torch.Tensor:
    """Return the ends of all bins, ascending from -1 to 1, float64 ``[BINS + 1]``."""
    bits = torch.arange(_FIRST, _FIRST + _SIDE + 1, dtype=torch.int32) << _SHIFT
    side = bits.view(torch.float32).double()
    return torch.cat([-side.flip(0), side])


def count_values(flat: torch.Tensor, runs: SegmentTable, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add up the weights of the values in each bin, exactly, hence in any order.

    Values of -1 and 1 are left out: they are levels themselves and rounding does them nothing.

    Args:
        flat: Gradients, float32.
        runs: Where each block's values lie in ``flat``.
        scale: Float32 ``[blocks]``, what a block is divided by; no value is larger, and none is zero.
        weight: Int64 ``[blocks]``, of each of a block's values; all values together weigh less than 2^63.

    Returns:
        Int64 ``[BINS]``.
    """
    offset, numel = torch.from_numpy(runs.offset.copy()), torch.from_numpy(runs.numel.copy())
    ends = numel.cumsum(0)
    begins = ends - numel
    counts = torch.zeros(BINS + 2, dtype=torch.int64)
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, _PIECE):
        high = min(low + _PIECE, total)
        first, last = (int(torch.searchsorted(ends, at, right=True)) for at in (low, high - 1))
        part = slice(first, last + 1)
        length = ends[part].clamp(max=high) - begins[part].clamp(min=low)
        place = torch.arange(low, high) + torch.repeat_interleave((offset - begins)[part], length)
        r = flat[place] / torch.repeat_interleave(scale[part], length)
        side = ((r.abs().view(torch.int32) >> _SHIFT) - _FIRST + 1).clamp(0, _SIDE + 1)
        index = torch.where(r < 0, -side, side) + _SIDE + 1
        counts.index_add_(0, index.long(), torch.repeat_interleave(weight[part], length))
    return counts[1:-1]


class Histogram(Distribution):
    """The distribution with a constant density in each bin: a mixture of uniform distributions.

    Args:
        edges: Ends of the bins, ascending from -1 to 1, float64 ``[bins + 1]``.
        mass: Of each bin, not negative, float64 ``[bins]``; need not add up to one.
    """

    def __init__(self, edges: torch.Tensor, mass: torch.Tensor) -> None:
        self.edges = edges.double()
        total = float(mass.sum())
        self.density = mass.double() / (total if total > 0 else 1.0) / self.edges.diff()
        a, b = self.edges[:-1], self.edges[1:]
        inside = self.density * torch.stack([b - a, (b**2 - a**2) / 2, (b**3 - a**3) / 3])
        self._sums = torch.cat([inside.new_zeros(3, 1), inside.cumsum(1)], 1)

    def _integrals(self, points: torch.Tensor) -> torch.Tensor:
        """Return the integrals of 1, r and r^2 from -1 to each point, float64 ``[3, points]``."""
        points = points.contiguous()
        index = torch.searchsorted(self.edges, points, right=True).clamp(1, len(self.density)) - 1
        a = self.edges[index]
        inside = torch.stack([points - a, (points**2 - a**2) / 2, (points**3 - a**3) / 3])
        return self._sums[:, index] + self.density[index] * inside

    def distribution(self, points: torch.Tensor) -> torch.Tensor:
        return self._integrals(points)[0]

    def between(self, points: torch.Tensor) -> torch.Tensor:
        return self._integrals(points).diff(dim=1)

    def inverse(
        self, mass: torch.Tensor, low: torch.Tensor, high: torch.Tensor, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return an x in [low, high] with F(x) = ``mass``, exactly; the smallest where F is constant."""
        index = torch.searchsorted(self._sums[0], mass).clamp(1, len(self.density)) - 1
        density = self.density[index]
        away = torch.where(density > 0, (mass - self._sums[0, index]) / density.clamp(min=1e-300), 0.0)
        return torch.minimum(torch.maximum(self.edges[index] + away, low), high)
