"""Codecs of rotated blocks: their common base, and sampled coordinates sent as signs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.exchange.codecs.base import SMALLEST_SCALE, Codec, Constant, Draw, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.kernels import (
    GROUP_SIZE,
    WHOLE,
    BlockTable,
    Coder,
    DigitLayout,
    Grid,
    RotationTable,
    SegmentTable,
    byte_layout,
    digit_layout,
    inverse_scale,
    packed_groups,
)
from gradwire.methods.sparse.random_places import RandomElements
from gradwire.seeds import OWNER, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True)
class RotatedSummary:
    """The draw of a payload's rotation; nothing is measured before the blocks are encoded."""

    draw: Draw | None = None
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> RotatedSummary:
        return self


@dataclass(frozen=True, eq=False)
class BlockNorms:
    """Norm of each block (float64), whether it is finite and non-zero, and its reciprocal or 0.

    ``filler`` is the largest magnitude, used instead of a scale where a block is not finite.
    """

    norm: torch.Tensor
    finite: torch.Tensor
    usable: torch.Tensor
    factor: torch.Tensor
    filler: torch.Tensor


class RotatedCodec(Codec):
    """Base of codecs that send float32 scales of blocks, other data, and coordinates z = H D x / |x| as digits.

    Args:
        base: Base of the digits.
        block_size: Elements of a block, see :class:`gradwire.kernels.RotationTable`.
    """

    grain = 1
    layout: DigitLayout

    def __init__(
        self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int, *, base: int, block_size: int
    ) -> None:
        self.kernels, self.world_size, self._base = kernels, world_size, base
        self.blocks = RotationTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, "rotation") for s in segments],
            size=block_size,
        )
        self.runs = self.blocks.runs()
        self.layout = digit_layout(base)
        self._first = Constant(self.runs.offset)

    def use_coder(self, coder: Coder) -> None:
        self.coder, self.layout = coder, byte_layout(self._base)

    def plain_payload_bytes(self, units: int) -> int:
        return self.side_bytes

    def summarise(self, flat: torch.Tensor) -> RotatedSummary:
        return RotatedSummary()

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + packed_groups(units, self.layout)

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> RotatedSummary:
        return RotatedSummary(draw)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # A scale that is not finite fills its block.
        return all_finite(flat[self._first.on(flat.device)])

    def norms(self, flat: torch.Tensor) -> BlockNorms:
        """Return the norms of all blocks."""
        moments = self.kernels.moments(flat, self.runs)
        # Float64, since the norm of finite values may exceed float32.
        norm, finite = moments.norm, torch.isfinite(moments.max_abs)
        usable = finite & (norm >= SMALLEST_SCALE)
        factor = torch.where(usable, 1 / norm, 0.0).to(torch.float32)
        return BlockNorms(norm, finite, usable, factor, moments.max_abs)

    def write_scales(self, scale: torch.Tensor, norms: BlockNorms, out: torch.Tensor) -> None:
        """Write the scale of each block, 0 where the norm cannot be divided by."""
        found = torch.where(norms.usable, scale, 0.0).to(torch.float32)
        out[: 4 * len(found)].view(torch.float32).copy_(torch.where(norms.finite, found, norms.filler))

    def scales(self, row: torch.Tensor) -> torch.Tensor:
        """Return the scales of a payload."""
        return row[: 4 * self.blocks.blocks].view(torch.float32)

    def digits(self, data: torch.Tensor) -> torch.Tensor:
        """Return the digits of a payload."""
        return data[self.side_bytes : self.payload_bytes(self.units)]


class OwnRotationCodec(RotatedCodec):
    """Codec where each sender, and the owner who encodes a mean, uses its own rotation."""

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        draw, weight = draw_of(summary), torch.tensor(1.0 / self.world_size, dtype=torch.float32, device="cpu")
        streams = [OWNER] if draw.stream == OWNER else range(len(rows))
        for number, (row, stream) in enumerate(zip(rows, streams)):
            self.decode(row, weight, Draw(draw.round, stream), flat, accumulate=number > 0)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        factor = torch.tensor(weight, dtype=torch.float32, device="cpu")
        self.decode(data, factor, draw_of(summary), flat, accumulate=True)

    @abstractmethod
    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        """Decode a sender's payload times ``weight`` into ``flat``, or add it; ``draw`` is that of its rotation."""


def draw_of(summary: Summary) -> Draw:
    """Return the draw of a rotated payload."""
    if not isinstance(summary, RotatedSummary) or summary.draw is None:
        raise TypeError(f"a codec of rotated blocks cannot decode with a {type(summary).__name__} that tells no draw")
    return summary.draw


LEAST = 16
"""Least number of coordinates of a block that are sent."""

UNIT = float(1 << 24)
"""Magnitudes are added up as integers on this scale, so that their sum does not depend on the order."""


class RotatedSampleCodec(OwnRotationCodec):
    """Codec that sends the signs of k randomly chosen coordinates z = H D x / |x| of each block, and a scale.

    A payload is the float32 scales of the blocks, padded to sixteen bytes, and then the signs, block after block, as
    digits in base 2. A block is decoded to ``scale D H c``, with c the signs in their places and zeros elsewhere, and
    the scale is ``|x| / <z, c>``, with which the estimate's projection on x is x.

    The places are a uniform choice without replacement, drawn from the sender's stream anew in every round. All blocks
    of the same length use the same places, since their signs D differ.

    Args:
        share: k over the coordinates of a block, rounded; k is at least 16.
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
        # For each sent coordinate: its block, the block's first coordinate, and the index of its place among those
        # drawn.
        self._owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), taken))
        self._begin = torch.from_numpy(np.repeat(self.blocks.place[:-1], taken))
        within = np.arange(len(self._owner)) - np.repeat(np.cumsum(taken) - taken, taken)
        self._drawn = torch.from_numpy(within + np.repeat((np.cumsum(counts) - counts)[number], taken))
        self.units = -(-len(self._owner) // GROUP_SIZE)
        self._signs = BlockTable(SegmentTable([0], [GROUP_SIZE * self.units], [0], [(0, 0)]), WHOLE)
        self._grid, self._one = Grid.ordered((-1.0, 1.0)), torch.ones(1, dtype=torch.float32, device="cpu")
        self.side_bytes = padded(4 * self.blocks.blocks)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        norms, z = self.norms(flat), torch.empty(self.blocks.coordinates, dtype=torch.float32, device="cpu")
        self.kernels.rotate(flat, self.blocks, norms.factor, draw.round, draw.stream, z)
        z = z[self.sampled(draw)]
        magnitudes = (z.abs().double() * UNIT).round().long()
        kept = torch.zeros(self.blocks.blocks, dtype=torch.int64, device="cpu").index_add_(0, self._owner, magnitudes)
        # The sampled coordinates may all be zero in a block with few non-zero elements.
        scale = torch.where(kept > 0, UNIT * norms.norm / kept, 0.0)
        self.write_scales(scale, norms, out)
        signs = torch.ones(self._signs.table.extent, dtype=torch.float32, device="cpu")
        signs[: len(z)][torch.signbit(z)] = -1.0
        self.kernels.quantise(
            signs, self._signs, inverse_scale(self._one), self._grid, self.layout, draw.round, draw.stream,
            self.digits(out),
        )  # fmt: skip

    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        signs = torch.empty(self._signs.table.extent, dtype=torch.float32, device="cpu")
        z = torch.zeros(self.blocks.coordinates, dtype=torch.float32, device="cpu")
        self.kernels.dequantise(self.digits(row), self._signs, self._one, self._grid, self.layout, signs)
        z[self.sampled(draw)] = signs[: len(self._owner)]
        scale = self.scales(row) * weight
        self.kernels.rotate_back(z, self.blocks, scale, draw.round, draw.stream, flat, accumulate)

    def sampled(self, draw: Draw) -> torch.Tensor:
        """Return the coordinates that a sender sends, of all blocks."""
        return self._begin + torch.from_numpy(self._places.draw(draw.round, draw.stream))[self._drawn]
