"""What ranks tell each other of their gradients, and the distribution that levels are fitted to.

The error of rounding a block of d values with the scale R is the sum over its values of R^2 (h - r) (r - l), where r is
the value over R and l and h are the levels around it. Its expectation is R^2 d times the integral of (h - r) (r - l)
over the distribution of the block's r. The expected error of all blocks is therefore, but for a factor, the *expected
variance* of levels under the mixture of the blocks' distributions with the weights

    w_n = R_n^2 d_n,

for any norm and any lengths. The *normalised variance* of the "N" variants leaves the scales out: w_n = d_n. Blocks of
zeros are exact with any levels, so that they have no weight; neither have blocks that are not finite.

Where R is the Euclidean norm and all blocks are equally long, w_n is proportional to the squared norm, as in Faghri et
al., "Adaptive Gradient Quantization for Data-Parallel SGD", NeurIPS 2020, section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradwire.kernels import SegmentTable
from gradwire.methods.levels.level_codec import LevelCodec, LevelSummary
from gradwire.methods.levels.level_fitting import Distribution, Mixture
from gradwire.methods.levels.level_histogram import BINS, Histogram, bin_edges, count_values

__all__ = ["Histograms", "Normals", "Statistics"]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Statistics(ABC):
    """What a rank sends, and what is made of it.

    Attributes:
        weighted: Whether a block's scale counts: the expected variance, not the normalised one.
    """

    weighted: bool

    @abstractmethod
    def room(self, blocks: int) -> torch.Tensor:
        """Return a tensor of the shape and type of what a rank with so many blocks sends."""

    @abstractmethod
    def part(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor, blocks: slice) -> Any:
        """Return all that :meth:`joined` needs to know of some of a codec's blocks."""

    @abstractmethod
    def joined(self, parts: Sequence[Any]) -> torch.Tensor:
        """Return what this rank sends, from the parts of all its blocks; their order may decide among equal ones."""

    @abstractmethod
    def distribution(self, everyone: torch.Tensor) -> Distribution:
        """Return the distribution of all ranks' values, from what they sent, in the order of ranks."""


@dataclass(frozen=True)
class Normals(Statistics):
    """Each block's values are draws from a normal of their mean and deviation, truncated to [-1, 1].

    A rank sends mean, deviation (both over the scale) and the root of the weight of its ``kept`` blocks with the
    largest R^2 d, float32, relative to the longest block: so the numbers are the norms where blocks are equally long.
    The normalised variance takes all of them together as one normal.
    """

    kept: int

    def room(self, blocks: int) -> torch.Tensor:
        return torch.zeros((min(self.kept, blocks), 3), dtype=torch.float32)

    def part(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor, blocks: slice) -> torch.Tensor:
        """Return mean and deviation over the scale, the scale, the length, and whether it can be divided by."""
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
        # Weights are relative: beyond float32, where the largest all count alike, none may be infinite.
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
    """What was counted of some blocks: a value of the largest scale counts 2^digits, for so many values."""

    counts: torch.Tensor
    largest: torch.Tensor
    values: int


def _digits(values: int) -> int:
    """Return how fine weights are: as sums over all values allow, and as float64 can tell apart."""
    return min(62 - values.bit_length(), 50)


@dataclass(frozen=True)
class Histograms(Statistics):
    """Values lie as they were counted, in all blocks; see :mod:`gradwire.methods.levels.level_histogram`.

    A rank sends the sum of the weights in each bin, int64 in a unit of its own, and the bits of that unit, a float64.
    Integers add up to the same sums in any order, hence in any layout of the gradients.
    """

    def room(self, blocks: int) -> torch.Tensor:
        return torch.zeros(BINS + 1, dtype=torch.int64)

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
        counts = torch.zeros(BINS, dtype=torch.int64)
        for part in parts:
            relative = (part.largest / largest.clamp(min=1e-300)) ** 2
            counts += (part.counts.double() * relative * 2.0 ** (digits - _digits(part.values))).round().long()
        return torch.cat([counts, unit.view(torch.int64)])

    def distribution(self, everyone: torch.Tensor) -> Histogram:
        counts, unit = everyone[:, :-1].double(), everyone[:, -1].contiguous().view(torch.float64)
        share = unit / unit.max().clamp(min=1e-300)
        return Histogram(bin_edges(), (counts * share[:, None]).sum(0))


def _usable(summary: LevelSummary) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each block's scale, one where it cannot be divided by, float64, and where it can."""
    scale = summary.scale.double()
    good = torch.isfinite(scale) & (scale > 0)
    return torch.where(good, scale, 1.0), good
