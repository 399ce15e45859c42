"""What codecs of rotated blocks share: where the blocks lie, their norms, and the layout of a payload."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.constants import Constant
from gradwire.exchange.codecs.scales import SMALLEST_SCALE
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.kernels import Coder, DigitLayout, RotationTable, byte_layout, digit_layout, packed_groups
from gradwire.seeds import OWNER, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["BlockNorms", "OwnRotationCodec", "RotatedCodec", "RotatedSummary", "draw_of"]


@dataclass(frozen=True)
class RotatedSummary:
    """Whose rotation a payload has: nothing is measured before the blocks are encoded."""

    draw: Draw | None = None
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> RotatedSummary:
        return self


@dataclass(frozen=True, eq=False)
class BlockNorms:
    """Of each block: the norm (float64), whether it is finite and can be divided by, and its reciprocal or 0.

    ``filler`` is the largest magnitude, which takes the place of a scale where a block is not finite.
    """

    norm: torch.Tensor
    finite: torch.Tensor
    usable: torch.Tensor
    factor: torch.Tensor
    filler: torch.Tensor


class RotatedCodec(Codec):
    """Blocks with the coordinates z = H D x / |x| in digits, behind a float32 scale a block and what else there is.

    Args:
        base: Of the digits.
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
        # In float64, since the norm of finite values may be beyond float32.
        norm, finite = moments.norm, torch.isfinite(moments.max_abs)
        usable = finite & (norm >= SMALLEST_SCALE)
        factor = torch.where(usable, 1 / norm, 0.0).to(torch.float32)
        return BlockNorms(norm, finite, usable, factor, moments.max_abs)

    def write_scales(self, scale: torch.Tensor, norms: BlockNorms, out: torch.Tensor) -> None:
        """Write the scales of the blocks that have one, 0 for those that cannot be divided by."""
        found = torch.where(norms.usable, scale, 0.0).to(torch.float32)
        out[: 4 * len(found)].view(torch.float32).copy_(torch.where(norms.finite, found, norms.filler))

    def scales(self, row: torch.Tensor) -> torch.Tensor:
        """Return the scales of a payload."""
        return row[: 4 * self.blocks.blocks].view(torch.float32)

    def digits(self, data: torch.Tensor) -> torch.Tensor:
        """Return the digits of a payload."""
        return data[self.side_bytes : self.payload_bytes(self.units)]


class OwnRotationCodec(RotatedCodec):
    """Rotated blocks of which each sender has a rotation of its own, and so has the owner who encodes a mean."""

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        draw, weight = draw_of(summary), torch.tensor(1.0 / self.world_size, dtype=torch.float32)
        streams = [OWNER] if draw.stream == OWNER else range(len(rows))
        for number, (row, stream) in enumerate(zip(rows, streams)):
            self.decode(row, weight, Draw(draw.round, stream), flat, accumulate=number > 0)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self.decode(data, torch.tensor(weight, dtype=torch.float32), draw_of(summary), flat, accumulate=True)

    @abstractmethod
    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        """Write ``weight`` times what a sender's payload stands for into ``flat``, or add it; the draw is that of its
        rotation."""


def draw_of(summary: Summary) -> Draw:
    """Return the draw of a rotated payload."""
    if not isinstance(summary, RotatedSummary) or summary.draw is None:
        raise TypeError(f"a codec of rotated blocks cannot decode with a {type(summary).__name__} that tells no draw")
    return summary.draw
