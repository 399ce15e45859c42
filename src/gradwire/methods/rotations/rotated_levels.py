"""The codec of rotated blocks whose coordinates are rounded to the nearest of a few levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Draw, Summary
from gradwire.exchange.codecs.constants import Constant
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.kernels import GROUP_SIZE, Grid
from gradwire.methods.rotations.rotated_blocks import OwnRotationCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["RotatedLevelCodec"]


class RotatedLevelCodec(OwnRotationCodec):
    """Blocks with the coordinates z = H D x / |x|, each rounded to the nearest level of a grid, and a scale a block.

    A payload is the float32 scales of the blocks, padded to sixteen bytes, and then the digits of all coordinates,
    packed in the layout of ``digit_layout(grid.base)``. A block is decoded to ``scale D H Q(z)``.

    Where all coordinates of a block are rounded to zero, they are multiplied by the least level above it, which does
    not change what a block is decoded to on average, and then they are not.

    Args:
        grid: Levels for standard normal values; see :meth:`gradwire.kernels.Grid.nearest`.
        block_size: Elements of a block, see :class:`gradwire.kernels.RotationTable`.
        unbiased: The scale ``|x| / <z, Q(z)>``, with which the estimate's part along x is x itself; otherwise, for two
            levels alone, that of the least error: with b coordinates at +-m, ``|x| <z, Q(z)> / (b m)^2``.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        grid: Grid,
        block_size: int,
        unbiased: bool = True,
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, base=grid.base, block_size=block_size)
        self.grid, self.unbiased = grid, unbiased
        self._lengths = Constant(torch.from_numpy(self.blocks.sizes) * float(grid.values[-1]))
        # The mean square of a block's coordinates is 1, but for rounding: one at least is not below the border at which
        # zero ends, where that is clearly below 1.
        self._may_vanish = grid.zero_ends > 0.99
        self.units = -(-self.blocks.coordinates // GROUP_SIZE)
        self.side_bytes = padded(4 * self.blocks.blocks)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        norms = self.norms(flat)
        norm, kept = norms.norm, self._round(flat, norms.factor, draw, out)
        lost = norms.usable & (kept == 0)
        if self._may_vanish and bool(lost.any()):
            # Every coordinate is nearer to the level zero than to the next. Some are at least 1 in magnitude, since
            # their mean square is 1: times that level they are beyond the border at its half.
            stretch = torch.where(lost, float(self.grid.values[self.grid.positive + 1]), 1.0)
            kept, norm = self._round(flat, norms.factor * stretch, draw, out), norm * stretch
        self.write_scales(
            norm / kept if self.unbiased else norm * (kept / self._lengths.on(flat.device).square()), norms, out
        )

    def _round(self, flat: torch.Tensor, factor: torch.Tensor, draw: Draw, out: torch.Tensor) -> torch.Tensor:
        """Write the digits of the coordinates of ``factor`` times each block; return ``<z, Q(z)>`` of each."""
        return self.kernels.encode_rotated(
            flat, self.blocks, factor, self.grid, self.layout, draw.round, draw.stream, self.digits(out)
        )

    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        scale = self.scales(row) * weight
        self.kernels.decode_rotated(
            self.digits(row), self.blocks, scale, self.grid, self.layout, draw.round, draw.stream, flat, accumulate
        )
