"""Statistics of normalised gradients for fitting levels: normals of blocks, or exact histograms.

Bins of a histogram are given by a float32's leading bits, so that all backends, layouts and machines agree: 16 of equal
width in each octave from 2^-20 to 1 on either side of zero, and one from -2^-20 to 2^-20.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradwire.kernels import SegmentTable
from gradwire.methods.levels.level_compressor import LevelCodec, LevelSummary
from gradwire.methods.levels.level_fitting import Distribution, Mixture

_OCTAVES, _BITS_PER_OCTAVE = 20, 4
_SIDE = _OCTAVES << _BITS_PER_OCTAVE

BINS = 2 * _SIDE + 1
"""Number of bins."""

_SHIFT = 23 - _BITS_PER_OCTAVE
_FIRST = (127 - _OCTAVES) << _BITS_PER_OCTAVE
_PIECE = 1 << 18
"""Number of values counted at a time, so that temporaries stay in the cache."""


def bin_edges() -> torch.Tensor:
    """Return the ends of all bins, ascending from -1 to 1, float64 ``[BINS + 1]``."""
    bits = torch.arange(_FIRST, _FIRST + _SIDE + 1, dtype=torch.int32, device="cpu") << _SHIFT
    side = bits.view(torch.float32).double()
    return torch.cat([-side.flip(0), side])


def count_values(flat: torch.Tensor, runs: SegmentTable, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add up the weights of the values in each bin, exactly and so in any order.

    Values of -1 and 1 are left out: they are levels, so rounding does not change them.

    Args:
        flat: Gradients, float32.
        runs: The values of each block in ``flat``.
        scale: Divisor of each block, float32 ``[blocks]``; not zero, and not below any value.
        weight: Weight of each value of a block, int64 ``[blocks]``; all values together weigh less than 2^63.

    Returns:
        The sums, int64 ``[BINS]``.
    """
    offset, numel = torch.from_numpy(runs.offset.copy()), torch.from_numpy(runs.numel.copy())
    ends = numel.cumsum(0)
    begins = ends - numel
    counts = torch.zeros(BINS + 2, dtype=torch.int64, device="cpu")
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, _PIECE):
        high = min(low + _PIECE, total)
        first, last = (int(torch.searchsorted(ends, at, right=True)) for at in (low, high - 1))
        part = slice(first, last + 1)
        length = ends[part].clamp(max=high) - begins[part].clamp(min=low)
        place = torch.arange(low, high, device="cpu") + torch.repeat_interleave((offset - begins)[part], length)
        r = flat[place] / torch.repeat_interleave(scale[part], length)
        side = ((r.abs().view(torch.int32) >> _SHIFT) - _FIRST + 1).clamp(0, _SIDE + 1)
        index = torch.where(r < 0, -side, side) + _SIDE + 1
        counts.index_add_(0, index.long(), torch.repeat_interleave(weight[part], length))
    return counts[1:-1]


class Histogram(Distribution):
    """The distribution with a constant density in each bin: a mixture of uniform distributions.

    Args:
        edges: Ends of the bins, ascending from -1 to 1, float64 ``[bins + 1]``.
        mass: Mass of each bin, at least 0, float64 ``[bins]``; need not add up to one.
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


_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Statistics(ABC):
    """Statistics that each rank sends, and the distribution computed from them.

    Attributes:
        weighted: True to weight blocks by scale, for the expected variance instead of the normalised one.
    """

    weighted: bool

    @abstractmethod
    def room(self, blocks: int) -> torch.Tensor:
        """Return a tensor with the shape and type that a rank with so many blocks sends."""

    @abstractmethod
    def part(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor, blocks: slice) -> Any:
        """Return the data of some of a codec's blocks that :meth:`joined` needs."""

    @abstractmethod
    def joined(self, parts: Sequence[Any]) -> torch.Tensor:
        """Return the tensor that this rank sends, from the parts of all its blocks, whose order may break ties."""

    @abstractmethod
    def distribution(self, everyone: torch.Tensor) -> Distribution:
        """Return the distribution of all ranks' values from the tensors that they sent, in the order of ranks."""


@dataclass(frozen=True)
class Normals(Statistics):
    """Model each block's values as a normal with their mean and deviation, truncated to [-1, 1].

    A rank sends mean, deviation (both over the scale) and the root of the weight of its ``kept`` blocks with the
    largest R^2 d, float32, relative to the longest block, so that the roots are the norms if blocks are equally long.
    For the normalised variance they are joined to one normal.
    """

    kept: int

    def room(self, blocks: int) -> torch.Tensor:
        return torch.zeros((min(self.kept, blocks), 3), dtype=torch.float32, device="cpu")

    def part(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor, blocks: slice) -> torch.Tensor:
        """Return mean and deviation over the scale, the scale, the length, and whether the scale can be divided by."""
        m = summary.moments
        mean, std, norm, scale, good = (column[blocks] for column in (m.mean, m.std, m.norm, *_usable(summary)))
        length = torch.from_numpy(codec.runs.numel[blocks].astype(np.float64))
        # The Euclidean scale is the norm in float32; sorting by the norm itself leaves fewer ties.
        size = norm if codec.norm == "l2" else scale
        return torch.stack([mean / scale, std / scale, size, length, good.double()], 1)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        mean, std, scale, length, usable = torch.cat(list(parts)).unbind(1)
        good, share = usable > 0, (length / length.max()).sqrt()
        size = scale * share
        # Weights are relative. Those beyond float32 are clamped, since none may be infinite.
        root = (size if self.weighted else share).clamp(max=_LARGEST)
        table = torch.stack([mean, std, root], 1)
        table, size = torch.where(good[:, None], table, 0.0), torch.where(good, size.clamp(max=_LARGEST), 0.0)
        return table[torch.argsort(size, descending=True, stable=True)[: self.kept]].float()

    def distribution(self, everyone: torch.Tensor) -> Mixture:
        mean, std, root = everyone.double().reshape(-1, 3).unbind(1)
        weight = root * root
        if self.weighted:
            return Mixture(mean, std, weight)
        total = weight.sum().clamp(min=1e-300)
        centre = (weight * mean).sum() / total
        pooled = (weight * (std * std + mean * mean)).sum() / total - centre**2
        return Mixture(centre[None], pooled.clamp(min=0).sqrt()[None], weight.sum()[None])


@dataclass(frozen=True)
class _Counted:
    """Counts of some blocks, where a value of the largest scale counts 2^digits, and their number of values."""

    counts: torch.Tensor
    largest: torch.Tensor
    values: int


def _digits(values: int) -> int:
    """Return the bits of a weight that sums over all values and float64 allow."""
    return min(62 - values.bit_length(), 50)


@dataclass(frozen=True)
class Histograms(Statistics):
    """Count the values of all blocks in bins; see :mod:`gradwire.methods.levels.level_statistics`.

    A rank sends the sum of the weights in each bin, int64 in its own unit, and the bits of that unit, a float64.
    Integers add up to the same sums in any order, and so in any layout of the gradients.
    """

    def room(self, blocks: int) -> torch.Tensor:
        return torch.zeros(BINS + 1, dtype=torch.int64, device="cpu")

    def part(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor, blocks: slice) -> _Counted:
        scale, good = (column[blocks] for column in _usable(summary))
        offset, numel = codec.runs.offset[blocks], codec.runs.numel[blocks]
        runs = SegmentTable(offset, numel, np.zeros_like(numel), np.zeros((len(numel), 2)))
        largest = torch.where(good, scale, 0.0).max() if self.weighted else scale.new_ones(())
        relative = (scale / largest.clamp(min=1e-300)) ** 2 if self.weighted else torch.ones_like(scale)
        values = int(numel.sum())
        weight = torch.where(good, relative * 2.0 ** _digits(values), 0.0).round().long()
        return _Counted(count_values(flat, runs, scale.float(), weight), largest, values)

    def joined(self, parts: Sequence[_Counted]) -> torch.Tensor:
        largest = torch.stack([part.largest for part in parts]).max()
        digits = _digits(sum(part.values for part in parts))
        unit = (largest * largest * 2.0**-digits).reshape(1)
        if len(parts) == 1:
            return torch.cat([parts[0].counts, unit.view(torch.int64)])
        counts = torch.zeros(BINS, dtype=torch.int64, device="cpu")
        for part in parts:
            relative = (part.largest / largest.clamp(min=1e-300)) ** 2
            counts += (part.counts.double() * relative * 2.0 ** (digits - _digits(part.values))).round().long()
        return torch.cat([counts, unit.view(torch.int64)])

    def distribution(self, everyone: torch.Tensor) -> Histogram:
        counts, unit = everyone[:, :-1].double(), everyone[:, -1].contiguous().view(torch.float64)
        share = unit / unit.max().clamp(min=1e-300)
        return Histogram(bin_edges(), (counts * share[:, None]).sum(0))


def _usable(summary: LevelSummary) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each block's scale, float64, with 1 where it cannot be divided by, and a mask of where it can."""
    scale = summary.scale.double()
    good = torch.isfinite(scale) & (scale > 0)
    return torch.where(good, scale, 1.0), good
