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
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.algorithms.level_fitting import Distribution, Mixture
from gradwire.algorithms.level_histogram import BINS, Histogram, bin_edges, count_values
from gradwire.codecs import LevelCodec, LevelSummary

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
    def room(self, codec: LevelCodec) -> torch.Tensor:
        """Return a tensor of the shape and type of what a rank sends."""

    @abstractmethod
    def measure(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor) -> torch.Tensor:
        """Return what this rank sends."""

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

    def room(self, codec: LevelCodec) -> torch.Tensor:
        return torch.zeros((min(self.kept, codec.blocks.blocks), 3), dtype=torch.float32)

    def measure(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor) -> torch.Tensor:
        m, scale, good = summary.moments, *_usable(summary)
        length = torch.from_numpy(codec.runs.numel.astype(np.float64))
        share = (length / length.max()).sqrt()
        # The Euclidean scale is the norm in float32; sorting by the norm itself leaves fewer ties.
        size = (m.norm if codec.norm == "l2" else scale) * share
        # Weights are relative: beyond float32, where the largest all count alike, none may be infinite.
        root = (size if self.weighted else share).clamp(max=_LARGEST)
        table = torch.stack([m.mean / scale, m.std / scale, root], 1)
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
class Histograms(Statistics):
    """Values lie as they were counted, in all blocks; see :mod:`gradwire.algorithms.level_histogram`.

    A rank sends the sum of the weights in each bin, int64 in a unit of its own, and the bits of that unit, a float64.
    Integers add up to the same sums in any order, hence in any layout of the gradients.
    """

    def room(self, codec: LevelCodec) -> torch.Tensor:
        return torch.zeros(BINS + 1, dtype=torch.int64)

    def measure(self, codec: LevelCodec, summary: LevelSummary, flat: torch.Tensor) -> torch.Tensor:
        scale, good = _usable(summary)
        largest = torch.where(good, scale, 0.0).max() if self.weighted else scale.new_ones(())
        relative = (scale / largest.clamp(min=1e-300)) ** 2 if self.weighted else torch.ones_like(scale)
        # As fine as sums of all values' weights allow, and as float64 can tell apart.
        digits = min(62 - int(codec.runs.numel.sum()).bit_length(), 50)
        weight = torch.where(good, relative * 2.0**digits, 0.0).round().long()
        unit = (largest * largest * 2.0**-digits).reshape(1)
        counts = count_values(flat, codec.runs, scale.float(), weight)
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
