"""The codec of elements that are kept at random and made larger, so that the mean is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Draw
from gradwire.exchange.codecs.scales import usable
from gradwire.exchange.segments import Segment
from gradwire.kernels import SegmentTable
from gradwire.methods.atoms.atom_codec import AtomCodec
from gradwire.methods.sparse.sparse_values import CastValues, SignedValues
from gradwire.methods.sparse.units import UnitTable
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["AtomElementCodec"]


class AtomElementCodec(AtomCodec):
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
        # The draws of the operators that a norm makes of it.
        purpose = "levels" if norm == "l2" else "ternary"
        drawn = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[0] * len(segments),
            key=[parameter_key(seed, s.parameter.name, purpose) for s in segments],
        )
        values = CastValues(torch.float32) if norm is None else SignedValues()
        units = UnitTable(segments, [1] * len(segments))
        super().__init__(kernels, units, world_size, drawn=drawn, density=density or 0.0, values=values)
        self.norm = norm

    def magnitudes(self, sizes: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norm is None:
            return super().magnitudes(sizes, draw)
        moments = self.kernels.moments(sizes, self.drawn)
        norm = moments.norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
        scale = moments.max_abs if self.norm == "max" else torch.maximum(norm, moments.max_abs)
        return usable(torch.where(torch.isfinite(moments.max_abs), scale, torch.inf)), torch.ones_like(scale)

    def larger(
        self, values: torch.Tensor, chosen: torch.Tensor, size: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        # Exactly c: a product would round.
        return torch.copysign(torch.maximum(values.abs(), least), values)
