# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and groups of trits. They decide what lies where; *bodies* do the arithmetic.

The rules, for all families: a loop's first argument says which bodies serve it, by its type: see
:mod:`gradwire.kernels.numba_core.overloads`. Tables come as one named tuple each. What is walked over group by group is
cut in pieces by :func:`gradwire.kernels.numba_core.segments.next_piece`, and nowhere else.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import MIN_STREAMED, STREAMED_GROUPS, TILE_GROUPS, Compiled, one_row, rows_of
from gradwire.kernels.numba_core.overloads import either, kept
from gradwire.kernels.numba_core.segments import draw_of, find_segment, next_piece, noise_at
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.divisions import word_table
from gradwire.kernels.packing.loops import end_streams, pack, tile_groups, unpack
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, PLANES

__all__ = ["TernaryLoops", "decode_range", "encode_range", "sum_range"]

# Of all that this is compiled from: what Numba keeps on disk is kept under this name (``make digests``).
DIGEST = "a5b0fb7a4979f7b8"

encode_groups = either("encode_groups", "ternary.scalar", "ternary.simd")
sum_to_digits = either("sum_to_digits", "ternary.scalar", "ternary.simd")
sum_to_words = either("sum_to_words", "ternary.scalar", "ternary.simd")
decode_groups = either("decode_groups", "ternary.scalar", "ternary.simd")
decode_streamed = either("decode_streamed", "ternary.scalar", "ternary.simd")
write_digits = either("write_digits", "ternary.scalar", "ternary.simd")


class TernaryLoops(Compiled):
    """The operations of trits."""

    def ternary_encode(self, x, table, limit, inverse, round, stream, begin, end, out):
        values, octets, bounds = x.numpy(), out.numpy(), (limit.numpy(), inverse.numpy())
        draw = draw_of(round, stream)

        def work(first: int, last: int) -> None:
            part = octets[GROUP_BYTES * first : GROUP_BYTES * last]
            encode_range(self.simd, values, table.columns, *bounds, draw, begin + first, begin + last, part)

        self.split(end - begin, 1, GROUP_SIZE, work)

    def ternary_sum(self, rows, layout, out):
        payloads, words, target = rows_of(rows), word_table(layout), out.numpy()
        number, groups = rows.shape[0], rows.shape[1] // GROUP_BYTES

        def work(begin: int, end: int) -> None:
            sum_range(self.simd, payloads, begin, end, words, target)

        self.split(groups, layout.digits, GROUP_SIZE * number, work)

    def decode(self, words, layout, table, scale, begin, end, x, accumulate):
        packed, factors, target = one_row(words), scale.numpy(), x.numpy()
        digits = word_table(layout, clamp=False)

        def work(first: int, last: int) -> None:
            groups = begin + first, begin + last
            decode_range(self.simd, packed, digits, table.columns, factors, *groups, first, target, accumulate)

        self.split(end - begin, layout.digits, GROUP_SIZE, work)


@kept(DIGEST)
def encode_range(simd, x, table, limit, inverse, draw, begin, end, out):
    """Encode groups ``begin .. end`` into ``out``."""
    prefer_wide()
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        encode_groups(
            simd, x, piece.at, piece.numel, limit[segment], inverse[segment], noise_at(table, piece, draw), out,
            16 * (group - begin),
        )  # fmt: skip
        group = piece.stop


@kept(DIGEST)
def sum_range(simd, rows, begin, end, layout, out):
    """Sum groups ``begin .. end`` of the rows, a whole number of ``layout.digits``, unless they are the last."""
    prefer_wide()
    if layout.digits == 5 and layout.word_bytes == 2:
        for group in range(begin, end, 64):
            sum_to_words(simd, rows, 16 * group, 16 * min(64, end - group), layout, out, 32 * group)
        return
    tile = tile_groups(layout.digits, 64)
    digits = np.empty(80 * tile + 16 * layout.digits, np.uint16)
    for group in range(begin, end, tile):
        groups = min(tile, end - group)
        sum_to_digits(simd, rows, 16 * group, 16 * groups, digits)
        pack(simd, digits, groups, layout, out, group)


@njit(nogil=True)
def _decode_some(simd, words, first, word, layout, count, scale, x, at):
    """Do as ``decode_groups``, once in the machine code for all that need no inlining."""
    decode_groups(simd, words, first, word, layout, count, scale, x, at)


@njit(nogil=True)
def _decode_long(simd, words, first, word, layout, count, scale, x, at):
    """Decode a long segment past the caches, but for its first group and its last one to three."""
    inner, size = (count // 80 - 2) & -2, 16 * layout.word_bytes
    decode_streamed(simd, words, first + size, word, layout, inner, scale, x, at + 80)
    _decode_some(simd, words, first, word, layout, 80, scale, x, at)
    done = 1 + inner
    _decode_some(simd, words, first + done * size, word, layout, count - 80 * done, scale, x, at + 80 * done)


@njit(nogil=True)
def _fill(factor, x, begin, end, accumulate):
    """Write what any digit times an infinity or NaN is defined to be: that factor."""
    for i in range(begin, end):
        x[i] = x[i] + factor if accumulate else factor


@njit(nogil=True)
def _add(floats, x, at):
    """Add decoded floats to ``x[at]`` and on."""
    prefer_wide()
    target = x[at : at + floats.size]
    for i in range(target.size):
        target[i] += floats[i]


@njit(nogil=True)
def _decode_five(simd, words, word, layout, table, scale, begin, end, skip, x, accumulate):
    """Do ``decode_range`` for words of five digits."""
    prefer_wide()
    floats = np.empty(80 * TILE_GROUPS, np.float32)
    streamed = end - begin >= STREAMED_GROUPS
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, min(end, group + TILE_GROUPS) if accumulate else end)
        segment = piece.segment
        first = (skip + group - begin) * 16 * layout.word_bytes
        factor, at, count = scale[segment], piece.at, piece.numel
        if not np.isfinite(factor):
            _fill(factor, x, at, at + count, accumulate)
        elif accumulate:
            _decode_some(simd, words, first, word, layout, count, factor, floats, 0)
            _add(floats[:count], x, at)
        elif streamed and count >= MIN_STREAMED:
            _decode_long(simd, words, first, word, layout, count, factor, x, at)
        else:
            decode_groups(simd, words, first, word, layout, count, factor, x, at)
        group = piece.stop


@kept(DIGEST)
def decode_range(simd, words, layout, table, scale, begin, end, skip, x, accumulate):
    """Decode groups ``begin .. end``; the words of ``begin`` are at group ``skip`` of ``words``, a matrix of one row.

    Words of five digits go straight to ``x``, or through a small buffer if they are to be added; others are unpacked to
    digits a tile at a time.
    """
    prefer_wide()
    if layout.digits == PLANES and layout.word_bytes == 1:
        _decode_five(simd, words.octets, np.uint8(0), layout, table, scale, begin, end, skip, x, accumulate)
        return
    if layout.digits == PLANES and layout.word_bytes == 2:
        _decode_five(simd, words.octets, np.uint16(0), layout, table, scale, begin, end, skip, x, accumulate)
        return
    tile, middle = tile_groups(layout.digits, TILE_GROUPS), np.float32(layout.base // 2)
    floats = np.empty(80 * tile + 16 * layout.digits, np.float32)
    streamed = end - begin >= STREAMED_GROUPS and not accumulate
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        unpack(simd, words, 0, tile_end - tile_begin, layout, skip + tile_begin - begin, floats)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment = piece.segment
            first, at, count, factor = 80 * (group - tile_begin), piece.at, piece.numel, scale[segment]
            if np.isfinite(factor):
                long = streamed and count >= MIN_STREAMED
                write_digits(simd, floats, first, count, middle, factor, x, at, accumulate, long)
            else:
                _fill(factor, x, at, at + count, accumulate)
            group = piece.stop
    end_streams(simd)
