"""Levels in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import torch

from gradwire.kernels.group_index import GroupIndex
from gradwire.kernels.levels.blocks import BlockTable
from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.reference import pack_digits, unpack_digits

__all__ = ["add_shared", "dequantise", "quantise", "quantise_shared", "sum_digits"]


def quantise(
    x: torch.Tensor, blocks: BlockTable, inverse: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, out: torch.Tensor,
) -> None:  # fmt: skip
    where = GroupIndex(blocks.table)
    values, uniform = where.values(x), where.uniform(round, stream).to(torch.float32)
    count = _count(values * inverse[_block(blocks, where)], uniform, grid)
    minus = torch.signbit(values) & (not grid.signed)
    digits = torch.where(minus, grid.negative - count, grid.positive + count)
    pack_digits(digits.reshape(-1), layout, out)


def dequantise(
    words: torch.Tensor, blocks: BlockTable, scale: torch.Tensor, grid: Grid, layout: DigitLayout, begin: int,
    end: int, x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    where = GroupIndex(blocks.table, begin, end)
    factor = scale[_block(blocks, where)]
    levels = torch.from_numpy(grid.values.copy())[unpack_digits(words, layout, end - begin)]
    where.write(torch.where(torch.isfinite(factor), levels * factor, factor), x, accumulate)


def quantise_shared(
    x: torch.Tensor, blocks: BlockTable, grid: SharedRandomGrid, integers: torch.Tensor, layout: DigitLayout,
    round: int, stream: int, out: torch.Tensor,
) -> None:  # fmt: skip
    where = GroupIndex(blocks.table)
    uniform = where.uniform(round, stream)
    point = _count(where.values(x) * grid.inverse, uniform.to(torch.float32), grid.points)
    digits = (point + _integers(integers, blocks, where)) // grid.integers
    digits = torch.where(where.inside, digits, layout.base // 2 - (uniform >> 23))
    pack_digits(digits.reshape(-1), layout, out)


def add_shared(
    words: torch.Tensor, blocks: BlockTable, scale: torch.Tensor, grid: SharedRandomGrid, integers: torch.Tensor,
    layout: DigitLayout, x: torch.Tensor,
) -> None:  # fmt: skip
    where = GroupIndex(blocks.table)
    digits, factor = unpack_digits(words, layout, blocks.table.groups), scale[_block(blocks, where)]
    levels = torch.from_numpy(grid.values.copy())[_integers(integers, blocks, where), digits]
    where.write(torch.where(torch.isfinite(factor), levels * factor, factor), x, accumulate=True)


def sum_digits(
    rows: torch.Tensor, groups: int, layout: DigitLayout, down: DigitLayout, out: torch.Tensor
) -> None:  # fmt: skip
    digits = [unpack_digits(row, layout, groups) for row in rows]
    pack_digits(torch.stack(digits).sum(0).reshape(-1), down, out)


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


def _block(blocks: BlockTable, where: GroupIndex) -> torch.Tensor:
    """Return the block of each element, ``[G, 80]``."""
    first, phase = (torch.from_numpy(c.copy())[where.segment, None] for c in (blocks.first[:-1], blocks.phase))
    return first + (phase + where.within) // blocks.block_size


def _integers(integers: torch.Tensor, blocks: BlockTable, where: GroupIndex) -> torch.Tensor:
    """Return the integer of each element, ``[G, 80]``."""
    phase = torch.from_numpy(blocks.phase.copy())[where.segment, None]
    return integers.to(torch.int64)[(phase + where.within) % blocks.block_size]
