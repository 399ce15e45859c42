# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops of count sketches, with a plain body. ``ternary/loops.py`` states the rules.

Sums are at random places of a table that exceeds the L2 cache: vectors draw the places, and sums are fetched ahead.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import (
    TILE_GROUPS,
    Compiled,
    Noise,
    RandomStream,
    copy_into,
    either,
    find_segment,
    kept,
    next_piece,
    noise_at,
)
from gradwire.kernels.numba_core.philox import plain_five_words
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.sketch import simd
from gradwire.kernels.sketch.operations import COLUMN_BITS
from gradwire.kernels.sketch.simd import AHEAD, MOST_IN_REGISTERS
from gradwire.kernels.table import GROUP_SIZE, LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "d0cda95d2220f53a"


_TILE = GROUP_SIZE * TILE_GROUPS
_u32, _u64, _i64, _f32, _f64 = np.uint32, np.uint64, np.int64, np.float32, np.float64
# Fields of a word of 32 bits; its lowest eight bits are no part of an element's integer.
_SIGN, _COLUMN, _SPARE = np.uint32(31), np.uint32((1 << COLUMN_BITS) - 1), np.uint32(8)
_BITS = np.uint64(COLUMN_BITS)


@njit(nogil=True)
def plain_hashes(noise, columns, places, signs):
    wide = _u64(columns)
    for group in range(places.size // 80):
        first = 80 * group
        for lane in range(16):
            for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
                e = first + 16 * plane + lane
                signs[e] = _f32(1) - _f32(2) * _f32(_u32(_u32(word) >> _SIGN))
                places[e] = _u32(_u64(_u64(_u32(_u32(word) >> _SPARE) & _COLUMN) * wide) >> _BITS)


@njit(nogil=True)
def plain_add_at(values, places, sums):
    for e in range(values.size):
        sums[places[e]] += _f64(values[e])


@njit(nogil=True)
def plain_estimate(sums, places, signs, out):
    for e in range(out.size):
        out[e] = sums[places[e]] * signs[e]


@njit(nogil=True)
def plain_medians(rows, numel, pitch, estimates):
    # Odd-even transposition sort: as many turns as rows sort them.
    for turn in range(rows):
        for row in range(turn % 2, rows - 1, 2):
            low, high = estimates[row * pitch : row * pitch + numel], estimates[(row + 1) * pitch :]
            for e in range(numel):
                a, b = low[e], high[e]
                low[e], high[e] = min(a, b), max(a, b)
    copy_into(estimates[:numel], estimates[rows // 2 * pitch :])


hashes = either(plain_hashes, simd.hashes)
add_at = either(plain_add_at, simd.add_at)
estimate = either(plain_estimate, simd.estimate)
medians = either(plain_medians, simd.medians)


class SketchLoops(Compiled):
    """The operations of the family ``sketch``, compiled."""

    def sketch(self, x, table, rows, columns, stream, out):
        values, sums, word = x.numpy(), out.numpy(), np.uint32(stream)

        def work(begin: int, end: int) -> None:
            # NumPy takes large pages for it, unlike compiled code.
            room = np.empty(columns, np.float64)
            sketch_range(self.simd, values, table.columns, table.groups, begin, end, columns, word, room, sums)

        # One thread takes a whole row, since its sums are made in order.
        self.split(rows, 1, int(table.numel.sum()), work)

    def unsketch(self, sums, table, rows, columns, stream, x):
        values, target, word = sums.numpy(), x.numpy(), np.uint32(stream)

        def work(begin: int, end: int) -> None:
            unsketch_range(self.simd, values, rows, columns, word, table.columns, begin, end, target)

        self.split(table.groups, 1, rows * GROUP_SIZE, work)


@njit(nogil=True)
def _later(noise, first):
    """Return the source of a piece's random words from its element ``first`` on."""
    return Noise(noise.key0, noise.key1, noise.round, noise.stream, noise.block + first // GROUP_SIZE * LANES)


@njit(nogil=True)
def _tile_groups(count):
    """Return the number of groups of the next tile if ``count`` elements remain."""
    return min(_i64(TILE_GROUPS), (count + GROUP_SIZE - 1) // GROUP_SIZE)


@kept(DIGEST)
def sketch_range(simd, x, table, groups, begin, end, columns, stream, sums, out):
    """Compute rows ``begin .. end`` of the sketch of all elements; ``sums`` is room for the sums of a row."""
    prefer_wide()
    # Places beyond the tile are fetched ahead, and must be in the row.
    places, signed = np.zeros(_TILE + AHEAD, np.uint32), np.empty(_TILE, np.float32)
    for row in range(begin, end):
        sums[:] = 0
        draw = RandomStream(_u64(row), stream)
        segment, group = find_segment(table, 0), 0
        while group < groups:
            piece = next_piece(table, segment, group, groups)
            segment, noise = piece.segment, noise_at(table, piece, draw)
            for first in range(0, piece.numel, _TILE):
                count = piece.numel - first
                whole = GROUP_SIZE * _tile_groups(count)
                hashes(simd, _later(noise, first), columns, places[:whole], signed)
                values = x[piece.at + first : piece.at + first + min(count, _TILE)]
                for e in range(values.size):
                    signed[e] = values[e] * signed[e]
                add_at(simd, signed[: values.size], places, sums)
            group = piece.stop
        target = out[row * columns : (row + 1) * columns]
        for c in range(target.size):
            target[c] = _f32(sums[c])


@kept(DIGEST)
def unsketch_range(simd, sums, rows, columns, stream, table, begin, end, x):
    """Estimate the elements of groups ``begin .. end``."""
    prefer_wide()
    places, signs = np.empty(_TILE, np.uint32), np.empty(_TILE, np.float32)
    estimates = np.empty(rows * _TILE, np.float32)
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        for first in range(0, piece.numel, _TILE):
            count = piece.numel - first
            whole = GROUP_SIZE * _tile_groups(count)
            for row in range(rows):
                noise = noise_at(table, piece, RandomStream(_u64(row), stream))
                hashes(simd, _later(noise, first), columns, places[:whole], signs)
                of_row = sums[row * columns : (row + 1) * columns]
                estimate(simd, of_row, places, signs, estimates[row * _TILE : row * _TILE + whole])
            if rows > MOST_IN_REGISTERS:
                plain_medians(rows, whole, _TILE, estimates)
            else:
                medians(simd, rows, whole, _TILE, estimates)
            target = x[piece.at + first : piece.at + first + min(count, _TILE)]
            for e in range(target.size):
                # Adding zero makes a negative zero positive.
                target[e] = estimates[e] + _f32(0)
        group = piece.stop
