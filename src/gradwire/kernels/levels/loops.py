# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops for levels over groups and blocks, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gradwire.kernels.levels import simd
from gradwire.kernels.levels.grid import WHOLE
from gradwire.kernels.numba_core.compiled import (
    MIN_STREAMED,
    STREAMED_GROUPS,
    TILE_GROUPS,
    Compiled,
    draw_of,
    either,
    find_segment,
    kept,
    next_piece,
    noise_at,
    one_row,
    rows_of,
)
from gradwire.kernels.numba_core.philox import plain_five_words
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.loops import end_streams, pack, sum_rows, tile_groups, unpack, word_table
from gradwire.kernels.table import GROUP_SIZE

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "04b18d65333b11e0"


_f32, _i32, _u16 = np.float32, np.int32, np.uint16
_UNIT = _f32(1 << 24)


@njit(nogil=True)
def _count_even(scaled, uniform, grid):
    top = _f32(grid.steps)
    t = _f32(scaled * _f32(top * _f32(1 / (1 << 24))))
    if not t < top:
        t = top
    low = _i32(t)
    rest = _f32(_f32(t - _f32(low)) * _UNIT)
    return low + _i32(uniform < rest)


@njit(nogil=True)
def _count_steps(scaled, uniform, grid):
    count = _i32(0)
    for k in range(grid.steps):
        count += _i32(_f32(_f32(uniform * grid.gap[k]) + grid.edge[k]) < scaled)
    return count


@njit(nogil=True)
def _count_sought(scaled, uniform, grid):
    cells = grid.cells
    t = _f32(_f32(scaled * cells.per_unit) + cells.shift)
    if not t > 0:
        t = _f32(0)
    if not t < cells.last:
        t = _f32(cells.last)
    step = cells.step[_i32(t)]
    step += _i32(scaled > cells.border[_i32(t)])
    return _i32(step + _i32(_f32(_f32(uniform * grid.gap[step]) + grid.edge[step]) < scaled))


@njit(nogil=True)
def _quantise(count_of, x, first, count, scales, grid, noise, digits, at):
    factors = np.empty(5, np.float32)
    block, left = scales.block, scales.left
    for group in range((count + 79) // 80):
        for plane in range(5):
            factors[plane] = scales.values[block]
            left -= 16
            if left <= 0:
                left = scales.size
                if block < scales.last:
                    block += 1
        for lane in range(16):
            for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _f32(_i32(word >> np.uint64(8)))
                scaled = _f32(value * factors[plane])
                if not grid.signed:
                    scaled = abs(scaled)
                c = count_of(scaled, uniform, grid)
                minus = np.signbit(value) and not grid.signed
                digits[at + e] = _u16(grid.negative - c if minus else grid.positive + c)


@njit(nogil=True)
def plain_quantise_even(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_even, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def plain_quantise_steps(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_steps, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def plain_quantise_sought(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_sought, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def _write_run(digits, grid, factor, target, accumulate):
    values = grid.values
    if not np.isfinite(factor):
        digits[:] = factor
    elif grid.uniform:
        middle = _f32(values.size // 2)
        # Divided as an array: before each division of scalars Numba checks for zero.
        digits[:] = np.divide(digits - middle, middle) * factor
    else:
        for i in range(digits.size):
            digits[i] = _f32(values[_i32(digits[i])] * factor)
    if accumulate:
        target += digits
    else:
        target[:] = digits


@njit(nogil=True)
def plain_write_levels(floats, first, count, grid, scales, x, at, accumulate, streamed):
    done, block, rest = 0, scales.block, scales.left
    while done < count:
        run = min(count - done, rest)
        digits, target = floats[first + done : first + done + run], x[at + done : at + done + run]
        _write_run(digits, grid, scales.values[block], target, accumulate)
        done, block, rest = done + run, block + 1, scales.size


quantise_even = either(plain_quantise_even, simd.quantise_even)
quantise_sought = either(plain_quantise_sought, simd.quantise_sought)
quantise_steps = either(plain_quantise_steps, simd.quantise_steps)
write_levels = either(plain_write_levels, simd.write_levels)


class Scales(NamedTuple):
    """One value for each block, and the position of a piece.

    The piece begins in ``block``, of which ``left`` elements remain; ``last`` is the last block of its segment.
    """

    values: Any
    block: int
    left: int
    last: int
    size: int


class LevelsLoops(Compiled):
    """The operations of the family ``levels``, compiled."""

    def quantise(self, x, blocks, inverse, grid, layout, round, stream, out):
        table, values, factors, words = blocks.table, x.numpy(), inverse.numpy(), out.numpy()
        draw, digits = draw_of(round, stream), word_table(layout)

        def work(begin: int, end: int) -> None:
            quantise_range(
                self.simd, values, table.columns, blocks.columns, factors, grid.columns, draw, begin, end, digits, words
            )

        self.split(table.groups, layout.digits, GROUP_SIZE, work)

    def dequantise(self, words, blocks, scale, grid, layout, begin, end, x, accumulate):
        table, packed, factors, target = blocks.table, rows_of(words), scale.numpy(), x.numpy()
        digits = word_table(layout)

        def work(first: int, last: int) -> None:
            dequantise_range(
                self.simd, packed, digits, table.columns, blocks.columns, factors, grid.columns,
                (begin + first, begin + last, first), target, accumulate,
            )  # fmt: skip

        self.split(end - begin, layout.digits, GROUP_SIZE * len(words), work)

    def quantise_shared(self, x, blocks, grid, integers, layout, round, stream, out):
        table, values, words, drawn = blocks.table, x.numpy(), out.numpy(), integers.numpy()
        digits, draw = word_table(layout), draw_of(round, stream)

        def work(begin: int, end: int) -> None:
            quantise_shared_range(
                self.simd, values, table.columns, (blocks.columns, drawn), grid.columns, draw, begin, end, digits, words
            )

        self.split(table.groups, layout.digits, GROUP_SIZE, work)

    def add_shared(self, words, blocks, scale, grid, integers, layout, x):
        table, packed, factors, target = blocks.table, one_row(words), scale.numpy(), x.numpy()
        digits, drawn = word_table(layout), integers.numpy()

        def work(begin: int, end: int) -> None:
            add_shared_range(
                self.simd, packed, digits, table.columns, (blocks.columns, drawn), factors, grid.columns, begin, end,
                target,
            )  # fmt: skip

        self.split(table.groups, layout.digits, GROUP_SIZE, work)

    def sum_digits(self, rows, groups, layout, down, out):
        payloads, words, both = rows_of(rows), out.numpy(), math.lcm(layout.digits, down.digits)
        digits, sums = word_table(layout), word_table(down)

        def work(begin: int, end: int) -> None:
            sum_digits_range(self.simd, payloads, begin, end, digits, sums, both, words)

        self.split(groups, both, GROUP_SIZE * rows.shape[0], work)


@njit(nogil=True)
def scales_at(blocks, values, piece):
    """Return the blocks' values, positioned at a piece of a segment."""
    segment, place = piece.segment, blocks.phase[piece.segment] + piece.within
    block, left = blocks.first[segment] + place // blocks.size, blocks.size - place % blocks.size
    return Scales(values, block, left, blocks.first[segment + 1] - 1, blocks.size)


@njit(nogil=True)
def _quantise_uneven(simd, x, piece, scales, grid, noise, digits, at):
    prefer_wide()
    if grid.cells.last > 0:
        quantise_sought(simd, x, piece.at, piece.numel, scales, grid, noise, digits, at)
    else:
        quantise_steps(simd, x, piece.at, piece.numel, scales, grid, noise, digits, at)


@njit(nogil=True)
def _quantise_piece(simd, x, piece, scales, grid, noise, digits, at):
    prefer_wide()
    if grid.uniform:
        quantise_even(simd, x, piece.at, piece.numel, scales, grid, noise, digits, at)
    else:
        _quantise_uneven(simd, x, piece, scales, grid, noise, digits, at)


@kept(DIGEST)
def quantise_range(simd, x, table, blocks, inverse, grid, draw, begin, end, layout, out):
    """Encode groups ``begin .. end``, a tile at a time."""
    prefer_wide()
    tile = tile_groups(layout.digits, TILE_GROUPS)
    digits = np.empty(80 * tile + 16 * layout.digits, np.uint16)
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment = piece.segment
            scales, noise = scales_at(blocks, inverse, piece), noise_at(table, piece, draw)
            _quantise_piece(simd, x, piece, scales, grid, noise, digits, 80 * (group - tile_begin))
            group = piece.stop
        pack(simd, digits, tile_end - tile_begin, layout, out, tile_begin)


@kept(DIGEST)
def dequantise_range(simd, words, layout, table, blocks, scale, grid, groups, x, accumulate):
    """Decode ``groups = (begin, end, skip)`` of all rows; ``words`` has ``begin`` at its group ``skip``.

    The rows of a tile are decoded one after the other, while the tile of ``x`` is in a cache.
    """
    prefer_wide()
    begin, end, skip = groups
    tile = tile_groups(layout.digits, TILE_GROUPS)
    floats = np.empty(80 * tile + 16 * layout.digits, np.float32)
    streamed = end - begin >= STREAMED_GROUPS and not accumulate and words.number == 1
    first = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        tile_end, segment = min(end, tile_begin + tile), first
        for row in range(words.number):
            unpack(simd, words, row, tile_end - tile_begin, layout, skip + tile_begin - begin, floats)
            group, segment = tile_begin, first
            while group < tile_end:
                piece = next_piece(table, segment, group, tile_end)
                segment = piece.segment
                write_levels(
                    simd, floats, 80 * (group - tile_begin), piece.numel, grid, scales_at(blocks, scale[row], piece),
                    x, piece.at, accumulate or row > 0, streamed and piece.numel >= MIN_STREAMED,
                )  # fmt: skip
                group = piece.stop
        first = segment
    end_streams(simd)


@njit(nogil=True)
def _coarsen(digits, drawn, shift):
    """Turn numbers of points into digits, in place."""
    for i in range(digits.size):
        digits[i] = np.uint16(np.uint16(digits[i] + np.uint16(drawn[i])) >> shift)


@njit(nogil=True)
def _refine(floats, drawn, integers):
    """Turn digits into indices of levels, in place."""
    for i in range(floats.size):
        floats[i] = np.float32(floats[i] * integers) + np.float32(drawn[i])


@njit(nogil=True)
def _fill_up(digits, piece, middle, noise):
    """Write the digits past the end of a segment."""
    group, after = piece.numel // 80, piece.numel % 80
    for lane in range(16 if after else 0):
        for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
            if 16 * plane + lane >= after:
                digits[80 * group + 16 * plane + lane] = np.uint16(middle - np.int64(word >> np.uint64(31)))


@kept(DIGEST)
def quantise_shared_range(simd, x, table, blocks, grid, draw, begin, end, layout, out):
    """Encode groups ``begin .. end``, a tile at a time; ``blocks`` is the blocks' columns and the shared integers."""
    prefer_wide()
    columns, drawn = blocks
    tile = tile_groups(layout.digits, TILE_GROUPS)
    digits = np.empty(80 * tile + 16 * layout.digits, np.uint16)
    shift = np.uint16(grid.shift)
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment = piece.segment
            own, noise = digits[80 * (group - tile_begin) :], noise_at(table, piece, draw)
            one = Scales(grid.inverse, 0, WHOLE, 0, WHOLE)
            _quantise_uneven(simd, x, piece, one, grid.points, noise, own, 0)
            _fill_up(own, piece, grid.middle, noise)
            done = 0
            while done < piece.numel:
                place = (columns.phase[segment] + piece.within + done) % columns.size
                run = min(columns.size - place, piece.numel - done)
                _coarsen(own[done : done + run], drawn[place : place + run], shift)
                done += run
            group = piece.stop
        pack(simd, digits, tile_end - tile_begin, layout, out, tile_begin)


@kept(DIGEST)
def add_shared_range(simd, words, layout, table, blocks, scale, grid, begin, end, x):
    """Add the values of groups ``begin .. end``; ``blocks`` is the blocks' columns and the shared integers."""
    prefer_wide()
    columns, drawn = blocks
    tile = tile_groups(layout.digits, TILE_GROUPS)
    floats = np.empty(80 * tile + 16 * layout.digits, np.float32)
    integers = np.float32(grid.integers)
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        unpack(simd, words, 0, tile_end - tile_begin, layout, tile_begin, floats)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment, at, done = piece.segment, 80 * (group - tile_begin), 0
            while done < piece.numel:
                place = (columns.phase[segment] + piece.within + done) % columns.size
                run = min(columns.size - place, piece.numel - done)
                _refine(floats[at + done : at + done + run], drawn[place : place + run], integers)
                done += run
            write_levels(
                simd, floats, at, piece.numel, grid.values, scales_at(columns, scale, piece), x, piece.at, True, False
            )
            group = piece.stop


@kept(DIGEST)
def sum_digits_range(simd, rows, begin, end, layout, sums, both, out):
    """Add the digits of groups ``begin .. end`` of all rows.

    ``both`` is a multiple of the digits in a word of either layout. Sums are below 2^16, so exact in float32.
    """
    prefer_wide()
    tile = tile_groups(both, TILE_GROUPS)
    digits = np.empty(80 * tile + 16 * max(layout.digits, sums.digits), np.float32)
    for group in range(begin, end, tile):
        groups = min(tile, end - group)
        sum_rows(simd, rows, groups, layout, group, digits)
        pack(simd, digits, groups, sums, out, group)
