"""Levels in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.group_index import Places
from gradwire.kernels.levels.base import BlockTable, check_dequantise, check_quantise, check_sum_digits
from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.reference import pack_words, unpack_words
from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.table import GROUP_SIZE

__all__ = ["ReferenceLevels"]


class ReferenceLevels:
    """See :class:`gradwire.kernels.levels.base.LevelKernels` for what each method computes."""

    def quantise(
        self,
        x: torch.Tensor,
        blocks: BlockTable,
        inverse: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        round: int,
        stream: int,
        out: torch.Tensor,
    ) -> None:
        check_quantise(x, blocks, inverse, grid, layout, out, (round, stream))
        if not blocks.table.groups:
            return
        where = _Places(blocks, 0, blocks.table.groups)
        values = torch.where(where.inside, x.detach()[where.index], 0.0)
        uniform = uniform_integers(where.group, where.key, round, stream).reshape(-1, GROUP_SIZE).to(torch.float32)
        count = _count(values * inverse.detach()[where.block], uniform, grid)
        minus = torch.signbit(values) & (not grid.signed)
        digits = torch.where(minus, grid.negative - count, grid.positive + count)
        pack_words(digits.reshape(-1), layout, out)

    def dequantise(
        self,
        words: torch.Tensor,
        blocks: BlockTable,
        scale: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        x: torch.Tensor,
        accumulate: bool = False,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        end = check_dequantise(x, blocks, scale, grid, layout, words, groups=(begin, end))
        if begin == end:
            return
        where = _Places(blocks, begin, end)
        digits = unpack_words(words, layout)[: where.inside.numel()].reshape(-1, GROUP_SIZE).clamp(max=grid.base - 1)
        factor = scale.detach()[where.block]
        levels = torch.from_numpy(grid.values.copy())[digits]
        values = torch.where(torch.isfinite(factor), levels * factor, factor)
        target, inside = x.detach(), where.inside
        index = where.index[inside]
        target[index] = target[index] + values[inside] if accumulate else values[inside]

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        down = check_sum_digits(rows, groups, layout, out)
        digits = [unpack_words(row, layout)[: GROUP_SIZE * groups].clamp(max=layout.base - 1) for row in rows]
        pack_words(torch.stack(digits).sum(0), down, out)


def _count(scaled: torch.Tensor, uniform: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Count the steps that each value (on the scale 2^24) passes."""
    if not grid.signed:
        scaled = scaled.abs()
    if grid.uniform:
        top = float(grid.steps)
        t = scaled * torch.tensor(top / UNIT, dtype=torch.float32)
        t = torch.where(t < top, t, top)
        low = t.trunc()
        return low.to(torch.int64) + (uniform < (t - low) * UNIT)
    count = torch.zeros(scaled.shape, dtype=torch.int64)
    for edge, gap in zip(grid.edge, grid.gap):
        count += scaled > uniform * torch.tensor(gap) + torch.tensor(edge)
    return count


class _Places(Places):
    """Adds the block of each element, ``[G, 80]``."""

    def __init__(self, blocks: BlockTable, begin: int, end: int) -> None:
        super().__init__(blocks.table, begin, end)
        own, segment = np.arange(begin, end), self.segment.numpy()
        within = (own - blocks.table.first_group[segment])[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)
        block = blocks.first[segment, None] + (blocks.phase[segment, None] + within) // blocks.block_size
        # A group starts at a multiple of 80, so sixteen neighbours are one plane and share a block.
        self.block = torch.from_numpy(np.minimum(block, blocks.first[segment + 1][:, None] - 1))
