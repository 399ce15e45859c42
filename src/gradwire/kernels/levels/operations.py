"""Stochastic rounding of blocks to packed levels, and decoding: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_groups, check_matrix, check_rows, check_vector
from gradwire.kernels.levels.grid import UNIT, BlockTable, Grid
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.packing.layout import DigitLayout, digit_layout, pack_digits, unpack_digits
from gradwire.kernels.table import GROUP_SIZE, GroupIndex


def packed_groups(groups: int, layout: DigitLayout) -> int:
    """Return the number of bytes of the packed digits of whole groups."""
    return layout.packed_bytes(GROUP_SIZE * groups)


def summed(layout: DigitLayout, rows: int) -> DigitLayout:
    """Return the layout for sums of ``rows`` digits of ``layout``; its base is ``rows * (base - 1) + 1``."""
    return digit_layout(rows * (layout.base - 1) + 1)


class LevelOperations(Front):
    """The operations of the family ``levels``."""

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
        """Round all groups of ``x`` (float32) to digits of ``grid`` and pack them into ``out`` (uint8).

        ``inverse`` (float32 ``[blocks]``) is 2^24 over each block's scale, see
        :func:`gradwire.kernels.inverse_scale`. ``out`` has ``layout.packed_bytes(80 * groups)`` bytes. Elements past a
        segment's end are encoded as zeros.
        """
        check_vector("x", x, torch.float32, blocks.table.extent, at_least=True)
        check_vector("inverse", inverse, torch.float32, blocks.blocks)
        check_vector("out", out, torch.uint8, packed_groups(blocks.table.groups, layout))
        check_base(grid, layout)
        check_draw(round, stream)
        family = self._serve("levels")
        if blocks.table.groups:
            family.quantise(x.detach(), blocks, inverse.detach(), grid, layout, round, stream, out)

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
        """Write ``grid.values[digit] * scale`` (float32 ``[blocks]``) into ``x``, or add it.

        ``words`` hold the groups ``begin .. end``, by default all. Where a scale is not finite, the scale itself is
        written. A digit that no encoder writes counts as the largest.

        ``words`` and ``scale`` may also be rows, uint8 ``[N, bytes]``, any distance apart, and float32 ``[N, blocks]``.
        Then the values of the first row are written or added, and those of the others are added to ``x`` in order.
        """
        if words.ndim == 1:
            words, scale = words[None], scale[None]
        end = check_groups(blocks.table, begin, end)
        check_vector("x", x, torch.float32, blocks.table.extent, at_least=True)
        check_matrix("scale", scale, torch.float32, (len(words), blocks.blocks))
        check_rows(words, packed_groups(end - begin, layout))
        check_base(grid, layout)
        family = self._serve("levels")
        if begin < end:
            family.dequantise(words, blocks, scale.detach(), grid, layout, begin, end, x.detach(), accumulate)

    def quantise_shared(
        self,
        x: torch.Tensor,
        blocks: BlockTable,
        grid: SharedRandomGrid,
        integers: torch.Tensor,
        layout: DigitLayout,
        round: int,
        stream: int,
        out: torch.Tensor,
    ) -> None:
        """Round all groups of ``x`` (float32) to points of ``grid`` and pack the points' digits into ``out`` (uint8).

        ``integers`` (uint8 ``[blocks.block_size]``) has the shared random integer of each place in a block. ``out`` has
        ``layout.packed_bytes(80 * groups)`` bytes. Past a segment's end a digit is ``base // 2``, or one less if the
        highest bit of the element's uniform integer is 1.
        """
        check_vector("x", x, torch.float32, blocks.table.extent, at_least=True)
        _check_integers(grid, integers, blocks)
        check_vector("out", out, torch.uint8, packed_groups(blocks.table.groups, layout))
        check_base(grid, layout)
        check_draw(round, stream)
        family = self._serve("levels")
        if blocks.table.groups:
            family.quantise_shared(x.detach(), blocks, grid, integers, layout, round, stream, out)

    def add_shared(
        self,
        words: torch.Tensor,
        blocks: BlockTable,
        scale: torch.Tensor,
        grid: SharedRandomGrid,
        integers: torch.Tensor,
        layout: DigitLayout,
        x: torch.Tensor,
    ) -> None:
        """Decode digits of :meth:`quantise_shared`, multiply by ``scale`` (float32 ``[blocks]``) and add to ``x``.

        Where a scale is not finite, the scale itself is added. A digit that no encoder writes counts as the largest.
        """
        check_vector("x", x, torch.float32, blocks.table.extent, at_least=True)
        check_vector("scale", scale, torch.float32, blocks.blocks)
        check_vector("words", words, torch.uint8, packed_groups(blocks.table.groups, layout))
        _check_integers(grid, integers, blocks)
        check_base(grid, layout)
        family = self._serve("levels")
        if blocks.table.groups:
            family.add_shared(words, blocks, scale.detach(), grid, integers, layout, x.detach())

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        """Add ``N`` rows of packed digits, uint8 ``[N, packed_groups(groups, layout)]``, digit by digit.

        The sums are packed into ``out`` (uint8) in the layout of :func:`summed`. Rows may be any distance apart. A
        digit that no encoder writes counts as the largest.
        """
        check_rows(rows, packed_groups(groups, layout))
        down = summed(layout, rows.shape[0])
        check_vector("out", out, torch.uint8, packed_groups(groups, down))
        family = self._serve("levels")
        if groups:
            family.sum_digits(rows, groups, layout, down, out)


def _check_integers(grid: SharedRandomGrid, integers: torch.Tensor, blocks: BlockTable) -> None:
    check_vector("integers", integers, torch.uint8, blocks.block_size)
    if int(integers.max()) >= grid.integers:
        raise HyperparameterError(f"an integer is {int(integers.max())}: {grid!r} takes those below {grid.integers}")


def check_base(grid: Grid | SharedRandomGrid, layout: DigitLayout) -> None:
    """Refuse a layout whose base is not the number of levels.

    Raises:
        HyperparameterError: the base differs.
    """
    if layout.base != grid.base:
        raise HyperparameterError(f"digits of base {layout.base} cannot hold the {grid.base} levels of {grid!r}")


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
    where, values = GroupIndex(blocks.table, begin, end), torch.from_numpy(grid.values.copy())
    for number, (row, factors) in enumerate(zip(words, scale)):
        factor, levels = factors[_block(blocks, where)], values[unpack_digits(row, layout, end - begin)]
        where.write(torch.where(torch.isfinite(factor), levels * factor, factor), x, accumulate or number > 0)


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
    """Count the steps that each value passes, on the scale 2^24."""
    if not grid.signed:
        scaled = scaled.abs()
    if grid.uniform:
        top = float(grid.steps)
        t = scaled * torch.tensor(top / UNIT, dtype=torch.float32, device="cpu")
        t = torch.where(t < top, t, top)
        low = t.trunc()
        return low.to(torch.int64) + (uniform < (t - low) * UNIT)
    count = torch.zeros(scaled.shape, dtype=torch.int64, device="cpu")
    edges, gaps = (torch.tensor(column, dtype=torch.float32, device="cpu") for column in (grid.edge, grid.gap))
    for edge, gap in zip(edges, gaps):
        count += scaled > uniform * gap + edge
    return count


def _block(blocks: BlockTable, where: GroupIndex) -> torch.Tensor:
    """Return the block of each element, ``[G, 80]``."""
    first, phase = (torch.from_numpy(c.copy())[where.segment, None] for c in (blocks.first[:-1], blocks.phase))
    return first + (phase + where.within) // blocks.block_size


def _integers(integers: torch.Tensor, blocks: BlockTable, where: GroupIndex) -> torch.Tensor:
    """Return the shared random integer of each element, ``[G, 80]``."""
    phase = torch.from_numpy(blocks.phase.copy())[where.segment, None]
    return integers.to(torch.int64)[(phase + where.within) % blocks.block_size]
