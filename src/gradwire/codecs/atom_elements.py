"""The codec of elements that are kept at random and made larger, so that the mean is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradwire.codecs.atoms import kept_magnitude
from gradwire.codecs.base import Draw, Summary
from gradwire.codecs.scales import SMALLEST_SCALE, usable
from gradwire.codecs.sparse import AboveRule, SparseCodec, choose_above
from gradwire.codecs.sparse_values import CastValues, SignedValues
from gradwire.codecs.units import UnitTable
from gradwire.kernels import GROUP_BYTES, SegmentTable, inverse_scale
from gradwire.seeds import parameter_key
from gradwire.segments import Segment

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["AtomElementCodec"]


class AtomElementCodec(SparseCodec):
    """Elements kept with the probability ``p_i = min(1, |x_i| / c)`` and sent as ``x_i / p_i``, one c a segment.

    Args:
        density: Share of the elements kept on average, which decides c; None where a norm does.
        norm: "l2" or "max": c is that norm of the segment. All values sent of it then are c, up to their sign, and
            travel as one number and a bit each.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        density: float | None,
        norm: str | None,
    ) -> None:
        values = CastValues(torch.float32) if norm is None else SignedValues()
        super().__init__(
            kernels,
            UnitTable(segments, [1] * len(segments)),
            world_size,
            rule=AboveRule(0.5),
            block=None,
            values=values,
        )
        # The draws of the operators that a norm makes of it.
        purpose = "levels" if norm == "l2" else "ternary"
        self.drawn = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[0] * len(segments),
            key=[parameter_key(seed, s.parameter.name, purpose) for s in segments],
        )
        self.density, self.norm = density, norm
        self._trits = torch.empty(GROUP_BYTES * self.drawn.groups, dtype=torch.uint8)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        size, (scale, factor) = len(self.drawn), self.magnitudes(flat, draw)
        limit = torch.full((size,), torch.inf)
        inverse = inverse_scale(scale)
        groups = self.drawn.groups
        self.kernels.ternary_encode(flat, self.drawn, limit, inverse, draw.round, draw.stream, 0, groups, self._trits)
        trits = torch.zeros(self.drawn.extent)
        self.kernels.decode(self._trits, 1, self.drawn, torch.ones(size), 0, groups, trits)
        # What is not finite is kept, and so is all of a segment that the budget covers.
        trits = torch.where(torch.isfinite(flat[: len(trits)]), trits, torch.inf)
        threshold = torch.full((size,), 0.5)
        for i in torch.nonzero(scale == 0).flatten().tolist():
            a, n = int(self.drawn.offset[i]), int(self.drawn.numel[i])
            trits[a : a + n] = flat[a : a + n]
            threshold[i] = 2.0**-149
        positions, counts = choose_above(self.kernels, trits, self.blocks, threshold, self.rule.most(self.blocks))
        chosen = positions + torch.repeat_interleave(self._numbers().to(torch.int32), counts)
        values = flat[self.table.places(chosen)]
        least = torch.repeat_interleave(scale, counts)
        larger = torch.copysign(torch.maximum(values.abs(), least), values)
        self.write(chosen, larger * torch.repeat_interleave(factor, counts), draw, out)

    def magnitudes(self, flat: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Return c of each segment, 0 where all elements other than zero are kept, and a factor of what is sent."""
        moments = self.kernels.moments(flat, self.drawn)
        if self.norm is not None:
            norm = moments.norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
            scale = moments.max_abs if self.norm == "max" else torch.maximum(norm, moments.max_abs)
            return usable(torch.where(torch.isfinite(moments.max_abs), scale, torch.inf)), torch.ones_like(scale)
        sums = self.kernels.sign_sums(flat, self.drawn)
        total = sums.above + sums.below
        budget = [self.budget(n) for n in self.drawn.numel.tolist()]
        most = torch.tensor([min(n, int(b)) for n, b in zip(self.drawn.numel.tolist(), budget)], dtype=torch.int64)
        index = torch.empty(int(most.sum()), dtype=torch.int32)
        self.kernels.select_largest(flat, self.drawn, most, index)
        found = []
        for part, at, whole, b in zip(index.split(most.tolist()), self.drawn.offset.tolist(), total.tolist(), budget):
            largest = flat[at + part.long()].abs().double().sort(descending=True).values
            c = kept_magnitude(largest, whole, b)
            found.append(c if c == 0 else max(c, SMALLEST_SCALE))
        scale = torch.tensor(found, dtype=torch.float64).to(torch.float32)
        return torch.where(torch.isfinite(moments.max_abs), scale, torch.inf), torch.ones_like(scale)

    def budget(self, numel: int) -> float:
        """Return the elements of a segment that are kept on average: one at least."""
        return max(1.0, (self.density or 0.0) * numel)
