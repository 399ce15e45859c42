"""The codec of rotated blocks of which a random sample of the coordinates is sent, a bit each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw, Summary
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.kernels import GROUP_SIZE, WHOLE, BlockTable, Grid, SegmentTable, inverse_scale
from gradwire.methods.rotations.rotated_blocks import OwnRotationCodec
from gradwire.methods.sparse.random_places import RandomElements
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["RotatedSampleCodec"]

LEAST = 16
"""Coordinates that are sent of a block, at least."""

UNIT = float(1 << 24)
"""Magnitudes are added up as integers on this scale, so that their sum is free of order."""


class RotatedSampleCodec(OwnRotationCodec):
    """Blocks with the coordinates z = H D x / |x|, of which k in random places are sent as their signs, and a scale.

    A payload is the float32 scales of the blocks, padded to sixteen bytes, and then the signs, block after block, as
    digits in base 2. A block is decoded to ``scale D H c``, with c the signs in their places and zeros elsewhere, and
    the scale is ``|x| / <z, c>``: the estimate's part along x is x itself.

    The places are a uniform choice without replacement, drawn from the sender's stream anew in every round. All blocks
    of a length have the same, since their signs D differ.

    Args:
        share: k over the coordinates of a block, rounded; k is 16 at least.
        block_size: Elements of a block, see :class:`gradwire.kernels.RotationTable`.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        share: float,
        block_size: int,
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, base=2, block_size=block_size)
        sizes = self.blocks.sizes
        self._lengths = np.unique(sizes)
        counts = [max(LEAST, round(share * size)) for size in self._lengths.tolist()]
        key = parameter_key(seed, "", "sample")
        self._places = RandomElements(self._lengths.tolist(), [key] * len(counts), counts, contiguous=False)
        number = np.searchsorted(self._lengths, sizes)
        taken = np.array(counts, np.int64)[number]
        # Of each sent coordinate: its block, the block's first coordinate, and which of all places drawn it has.
        self._owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), taken))
        self._begin = torch.from_numpy(np.repeat(self.blocks.place[:-1], taken))
        within = np.arange(len(self._owner)) - np.repeat(np.cumsum(taken) - taken, taken)
        self._drawn = torch.from_numpy(within + np.repeat((np.cumsum(counts) - counts)[number], taken))
        self.units = -(-len(self._owner) // GROUP_SIZE)
        self._signs = BlockTable(SegmentTable([0], [GROUP_SIZE * self.units], [0], [(0, 0)]), WHOLE)
        self._grid, self._one = Grid.ordered((-1.0, 1.0)), torch.ones(1)
        self.side_bytes = padded(4 * self.blocks.blocks)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        norms, z = self.norms(flat), torch.empty(self.blocks.coordinates)
        self.kernels.rotate(flat, self.blocks, norms.factor, draw.round, draw.stream, z)
        z = z[self.sampled(draw)]
        magnitudes = (z.abs().double() * UNIT).round().long()
        kept = torch.zeros(self.blocks.blocks, dtype=torch.int64).index_add_(0, self._owner, magnitudes)
        # Few places may have nothing but zeros, of a block with few elements that are not zero.
        scale = torch.where(kept > 0, UNIT * norms.norm / kept, 0.0)
        self.write_scales(scale, norms, out)
        signs = torch.ones(self._signs.table.extent)
        signs[: len(z)][torch.signbit(z)] = -1.0
        self.kernels.quantise(
            signs, self._signs, inverse_scale(self._one), self._grid, self.layout, draw.round, draw.stream,
            self.digits(out),
        )  # fmt: skip

    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        signs, z = torch.empty(self._signs.table.extent), torch.zeros(self.blocks.coordinates)
        self.kernels.dequantise(self.digits(row), self._signs, self._one, self._grid, self.layout, signs)
        z[self.sampled(draw)] = signs[: len(self._owner)]
        scale = self.scales(row) * weight
        self.kernels.rotate_back(z, self.blocks, scale, draw.round, draw.stream, flat, accumulate)

    def sampled(self, draw: Draw) -> torch.Tensor:
        """Return the coordinates of all blocks that a sender sends."""
        return self._begin + torch.from_numpy(self._places.draw(draw.round, draw.stream))[self._drawn]
