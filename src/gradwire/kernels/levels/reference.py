"""Levels in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.digits import DigitLayout
from gradwire.kernels.levels.base import BlockTable, check_dequantise, check_quantise, check_sum_digits
from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.table import GROUP_SIZE
from gradwire.kernels.words import pack_words, unpack_words

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


class _Places:
    """Where the elements of groups ``begin .. end`` lie: ``[G]`` and ``[G, 80]``."""

    def __init__(self, blocks: BlockTable, begin: int, end: int) -> None:
        table = blocks.table
        number = np.arange(begin, end)
        segment = np.searchsorted(table.first_group, number, side="right") - 1
        own = number - table.first_group[segment]
        within = own[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)
        last = table.numel[segment, None] - 1
        self.inside = torch.from_numpy(within <= last)
        self.index = torch.from_numpy(table.offset[segment, None] + np.minimum(within, last))
        block = blocks.first[segment, None] + (blocks.phase[segment, None] + within) // blocks.block_size
        self.block = torch.from_numpy(np.minimum(block, blocks.first[segment + 1][:, None] - 1))
        # A group starts at a multiple of 80, so sixteen neighbours are one plane and share a block.
        self.group = torch.from_numpy(table.start[segment] // GROUP_SIZE + own)
        self.key = torch.from_numpy(table.key.astype(np.int64)[segment])
