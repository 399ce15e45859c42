# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops of count sketches, with a plain body. ``ternary/loops.py`` states the rules.

Sums are at random places of a table, where explicit vectors would not help; only the random words are drawn by them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import (
    TILE_GROUPS,
    Compiled,
    Noise,
    RandomStream,
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
from gradwire.kernels.table import GROUP_SIZE, LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "a1e5d1911b32663a"


_TILE = GROUP_SIZE * TILE_GROUPS
_u32, _u64, _i64, _f32, _f64 = np.uint32, np.uint64, np.int64, np.float32, np.float64
# Fields of a word of 32 bits; its lowest eight bits are no part of an element's integer.
_SIGN, _COLUMN, _SPARE = np.uint32(31), np.uint32((1 << COLUMN_BITS) - 1), np.uint32(8)
_BITS = np.uint64(COLUMN_BITS)


@njit(nogil=True)
def plain_random_words(noise, words):
    for group in range(words.size // 80):
        of_group = words[80 * group : 80 * group + 80]
        for lane in range(16):
            w0, w1, w2, w3, w4 = plain_five_words(noise, 16 * group + lane)
            of_group[lane], of_group[16 + lane], of_group[32 + lane] = _u32(w0), _u32(w1), _u32(w2)
            of_group[48 + lane], of_group[64 + lane] = _u32(w3), _u32(w4)


random_words = either(plain_random_words, simd.random_words)


class SketchLoops(Compiled):
    """The operations of the family ``sketch``, compiled."""

    def sketch(self, x, table, rows, columns, stream, out):
        values, sums, word = x.numpy(), out.numpy(), np.uint32(stream)

        def work(begin: int, end: int) -> None:
            sketch_range(self.simd, values, table.columns, table.groups, begin, end, columns, word, sums)

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
def _hash(words, columns, signs):
    """Replace random words by columns, and write the signs, 1 or -1."""
    wide = _u64(columns)
    for e in range(words.size):
        word = words[e]
        signs[e] = _f32(1) - _f32(2) * _f32(_u32(word >> _SIGN))
        words[e] = _u32(_u64(_u64(_u32(word >> _SPARE) & _COLUMN) * wide) >> _BITS)


@njit(nogil=True)
def _tile_groups(count):
    """Return the number of groups of the next tile if ``count`` elements remain."""
    return min(_i64(TILE_GROUPS), (count + GROUP_SIZE - 1) // GROUP_SIZE)


@kept(DIGEST)
def sketch_range(simd, x, table, groups, begin, end, columns, stream, out):
    """Compute rows ``begin .. end`` of the sketch of all elements."""
    prefer_wide()
    words, signs = np.empty(_TILE, np.uint32), np.empty(_TILE, np.float32)
    sums = np.empty(columns, np.float64)
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
                random_words(simd, _later(noise, first), words[:whole])
                _hash(words[:whole], columns, signs)
                values = x[piece.at + first : piece.at + first + min(count, _TILE)]
                for e in range(values.size):
                    sums[words[e]] += _f64(values[e] * signs[e])
            group = piece.stop
        target = out[row * columns : (row + 1) * columns]
        for c in range(target.size):
            target[c] = _f32(sums[c])


@kept(DIGEST)
def unsketch_range(simd, sums, rows, columns, stream, table, begin, end, x):
    """Estimate the elements of groups ``begin .. end``."""
    prefer_wide()
    words, signs = np.empty(_TILE, np.uint32), np.empty(_TILE, np.float32)
    estimates = np.empty((rows, _TILE), np.float32)
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        for first in range(0, piece.numel, _TILE):
            count = piece.numel - first
            whole = GROUP_SIZE * _tile_groups(count)
            for row in range(rows):
                noise = noise_at(table, piece, RandomStream(_u64(row), stream))
                random_words(simd, _later(noise, first), words[:whole])
                _hash(words[:whole], columns, signs)
                of_row, found = sums[row * columns : (row + 1) * columns], estimates[row, :whole]
                for e in range(found.size):
                    found[e] = of_row[words[e]] * signs[e]
            # Odd-even transposition sort: as many turns as rows sort them.
            for turn in range(rows):
                for row in range(turn % 2, rows - 1, 2):
                    low, high = estimates[row, :whole], estimates[row + 1, :whole]
                    for e in range(low.size):
                        a, b = low[e], high[e]
                        low[e], high[e] = min(a, b), max(a, b)
            target = x[piece.at + first : piece.at + first + min(count, _TILE)]
            middle = estimates[rows // 2, : target.size]
            for e in range(target.size):
                # Adding zero makes a negative zero positive.
                target[e] = middle[e] + _f32(0)
        group = piece.stop
