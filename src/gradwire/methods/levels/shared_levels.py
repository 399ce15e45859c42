"""The codec of levels whose scales all workers share, so that digits add up to integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs.base import Draw, SummableCodec, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.kernels import Grid, inverse_scale, packed_groups, summed
from gradwire.methods.levels.level_codec import LevelCodec, LevelSummary, as_levels

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["MOST_SUM", "SharedLevelCodec"]

MOST_SUM = 32767
"""Largest s N: sums of N digits of base 2s + 1 are kept in 16 bits."""


LONG = 4096
"""Elements of a block from which it is filled by itself: five times as fast as repeating its scale."""


class SharedLevelCodec(LevelCodec, SummableCodec):
    """Even levels of scales that are the largest of all ranks': digits up, their exact sums down, nothing beside them.

    Where all ranks hold v_i steps of a block with scale R, its mean is ``float32(sum v_i) / float32(s N) * R``, the
    same bits from shards or from all rows. Blocks may straddle shards.

    A share is a whole number of words of digits and of sums: ``grain`` groups are.

    Args:
        levels: Number s of magnitudes above zero.
        owner: What an error names.

    Raises:
        IncompatibleError: s N is above :data:`MOST_SUM`.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        levels: int,
        block_size: int | None,
        owner: str,
        purpose: str = "levels",
    ) -> None:
        if levels * world_size > MOST_SUM:
            raise IncompatibleError(
                f"{owner}: sums over {world_size} workers of {levels} levels either side of zero need more than 16 "
                f"bits; with that many workers use at most levels={MOST_SUM // world_size}"
            )
        super().__init__(
            kernels, segments, world_size, seed, grid=Grid.even(levels), norm="max", block_size=block_size,
            purpose=purpose,
        )  # fmt: skip
        self.side_bytes = 0
        self.sums = Grid.even(levels * world_size)
        self.sum_layout = summed(self.layout, world_size)
        self.grain = math.lcm(*(d // math.gcd(5, d) for d in (self.layout.digits, self.sum_layout.digits)))

    def summarise(self, flat: torch.Tensor) -> LevelSummary:
        summary = super().summarise(flat)
        return replace(summary, shared=summary.scale)

    def spread(self, summary: LevelSummary, out: torch.Tensor) -> None:
        """Write the scale of every element of the segments, joined, into ``out``."""
        scales, lengths = self._scales(summary), torch.from_numpy(self.runs.numel.copy())
        if len(scales) * LONG < out.numel():
            for part, scale in zip(out.split(lengths.tolist()), scales):
                part.fill_(scale)
        else:
            out.copy_(torch.repeat_interleave(scales, lengths, output_size=out.numel()))

    def mean_bytes(self, units: int) -> int:
        return packed_groups(units, self.sum_layout)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        inverse = inverse_scale(self._scales(as_levels(summary)))
        self.kernels.quantise(
            flat, self.blocks, inverse, self.grid, self.layout, draw.round, draw.stream, self._digits(out)
        )

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        # Rows of a shard; as many groups as give rows of that size.
        groups = rows.shape[1] // self.layout.block_bytes * self.layout.digits // 5
        self.kernels.sum_digits(rows, groups, self.layout, out)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        scale = self._scales(as_levels(summary))
        words = data[: self.mean_bytes(end - begin)]
        self.kernels.dequantise(words, self.blocks, scale, self.sums, self.sum_layout, flat, begin=begin, end=end)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(self.mean_bytes(self.units), dtype=torch.uint8, device=rows.device)
        self.kernels.sum_digits(rows, self.units, self.layout, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(self._scales(as_levels(summary)))
