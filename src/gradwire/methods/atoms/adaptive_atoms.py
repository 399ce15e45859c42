"""Elements kept at random, as many as descend most for their cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Draw
from gradwire.exchange.codecs.scales import SMALLEST_SCALE
from gradwire.exchange.segments import Segment
from gradwire.methods.atoms.atom_elements import AtomElementCodec
from gradwire.methods.atoms.probabilities import kept_magnitude
from gradwire.methods.sparse.descent_per_byte import MessageCost, best_count, element_bits, largest_magnitudes

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["AdaptiveAtomCodec"]


class AdaptiveAtomCodec(AtomElementCodec):
    """ATOMO's elements with a budget that follows the vector, times the share of the descent that it is sure of."""

    def __init__(
        self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int, *, cost: MessageCost
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, density=1.0, norm=None)
        self.cost = cost

    def magnitudes(self, sizes: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        moments, sums = self.kernels.moments(sizes, self.drawn), self.kernels.sign_sums(sizes, self.drawn)
        scale, factor = torch.zeros(len(self.drawn)), torch.ones(len(self.drawn))
        cost = self.cost.on(draw.link)
        for i, (at, n) in enumerate(zip(self.drawn.offset.tolist(), self.drawn.numel.tolist())):
            if not bool(torch.isfinite(moments.max_abs[i])):
                scale[i] = torch.inf
                continue
            norms = float(sums.above[i] + sums.below[i]), float(moments.norm[i])
            largest = partial(largest_magnitudes, self.kernels, sizes, at, n)
            bits = element_bits("stochastic", n)
            count, factor[i] = best_count("stochastic", bits, 0.0, cost, *norms, n, largest)
            draw.gauge("elements", count, 1)
            c = kept_magnitude(largest(count), norms[0], float(count))
            scale[i] = max(c, SMALLEST_SCALE) if c else 0.0
        return scale, factor
