# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and groups of trits, with plain bodies; the rules of all families' loops.

Loops compute addresses; *bodies* do the arithmetic. The type of a loop's first argument chooses the bodies, see
:func:`gradwire.kernels.numba_core.compiled.either`. A table is one argument, a named tuple. Only
:func:`gradwire.kernels.numba_core.compiled.next_piece` cuts a range of groups at the ends of segments.
"""

from __future__ import annotations

import numpy as np
from numba import njit

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
from gradwire.kernels.packing.loops import (
    end_streams,
    pack,
    plain_pack_blocks,
    plain_word_at,
    plain_word_width,
    tile_groups,
    unpack,
    word_table,
)
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, PLANES
from gradwire.kernels.ternary import simd

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "6aff08207ce95f1e"


_u8, _u16, _u32, _u64 = np.uint8, np.uint16, np.uint32, np.uint64
_i32, _f32 = np.int32, np.float32


@njit(nogil=True)
def _digit(value, uniform, limit, inverse):
    magnitude = abs(value)
    if limit < magnitude:
        magnitude = limit
    if _f32(_i32(uniform)) < _f32(magnitude * inverse):
        return _i32(0) if np.signbit(value) else _i32(2)
    return _i32(1)


@njit(nogil=True)
def plain_encode_groups(x, first, count, limit, inverse, noise, out, at):
    for group in range((count + 79) // 80):
        values = x[first + 80 * group : first + min(80 * group + 80, count)]
        for lane in range(16):
            words = plain_five_words(noise, 16 * group + lane)
            total = _i32(121)
            power = _i32(1)
            for plane, word in enumerate(words):
                if 16 * plane + lane < values.size:
                    total += power * (_digit(values[16 * plane + lane], word >> _u64(8), limit, inverse) - _i32(1))
                power *= _i32(3)
            out[at + 16 * group + lane] = _u8(total)


@njit(nogil=True)
def plain_sum_to_digits(rows, first, length, digits):
    target = digits[: 5 * length]
    target[:] = _u16(0)
    for row in range(rows.number):
        payload = rows.octets[first + row * rows.stride : first + row * rows.stride + length]
        for group in range(length // 16):
            values, sums = payload[16 * group : 16 * group + 16], target[80 * group : 80 * group + 80]
            for lane in range(16):
                value = _u16(values[lane])
                for plane in range(4):
                    quotient = _u16(_u16(value * _u16(171)) >> _u16(9))  # floor(value / 3) for bytes
                    sums[16 * plane + lane] += _u16(value - _u16(quotient * _u16(3)))
                    value = quotient
                sums[64 + lane] += value


@njit(nogil=True)
def plain_sum_to_words(rows, first, length, layout, out, at):
    digits = np.empty(5 * length, np.uint16)
    plain_sum_to_digits(rows, first, length, digits)
    plain_pack_blocks(digits, length // 16, layout, _u16(0), out, at)


@njit(nogil=True)
def plain_decode_groups(words, first, word, layout, count, scale, x, at):
    width, base = plain_word_width(word), layout.base
    for group in range((count + 79) // 80):
        target = x[at + 80 * group : at + min(80 * group + 80, count)]
        for lane in range(16):
            value = plain_word_at(words, first + (16 * group + lane) * width, width)
            for plane in range(5):
                quotient = _u32(value // _u32(base)) if plane < 4 else _u32(0)
                digit = _i32(_i32(value - _u32(quotient * _u32(base))) - _i32(base // 2))
                if 16 * plane + lane < target.size:
                    target[16 * plane + lane] = _f32(_f32(digit) * scale)
                value = quotient


@njit(nogil=True)
def plain_decode_streamed(words, first, word, layout, groups, scale, x, at):
    plain_decode_groups(words, first, word, layout, 80 * groups, scale, x, at)


@njit(nogil=True)
def plain_write_digits(floats, first, count, middle, factor, x, at, accumulate, streamed):
    source, target = floats[first : first + count], x[at : at + count]
    if accumulate:
        for i in range(target.size):
            target[i] += (source[i] - middle) * factor
    else:
        for i in range(target.size):
            target[i] = (source[i] - middle) * factor


encode_groups = either(plain_encode_groups, simd.encode_groups)
sum_to_digits = either(plain_sum_to_digits, simd.sum_to_digits)
sum_to_words = either(plain_sum_to_words, simd.sum_to_words)
decode_groups = either(plain_decode_groups, simd.decode_groups)
decode_streamed = either(plain_decode_streamed, simd.decode_streamed)
write_digits = either(plain_write_digits, simd.write_digits)


class TernaryLoops(Compiled):
    """The operations of the family ``ternary``, compiled."""

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
    """Sum groups ``begin .. end`` of the rows: a multiple of ``layout.digits`` groups, unless they are the last."""
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
    """Call ``decode_groups`` without inlining: callers that need no inlining share one copy of the machine code."""
    decode_groups(simd, words, first, word, layout, count, scale, x, at)


@njit(nogil=True)
def _decode_long(simd, words, first, word, layout, count, scale, x, at):
    """Decode a long segment with stores past the caches, except its first group and its last one to three."""
    inner, size = (count // 80 - 2) & -2, 16 * layout.word_bytes
    decode_streamed(simd, words, first + size, word, layout, inner, scale, x, at + 80)
    _decode_some(simd, words, first, word, layout, 80, scale, x, at)
    done = 1 + inner
    _decode_some(simd, words, first + done * size, word, layout, count - 80 * done, scale, x, at + 80 * done)


@njit(nogil=True)
def _fill(factor, x, begin, end, accumulate):
    """Write a factor that is infinite or NaN, as the product of any digit with it is defined."""
    for i in range(begin, end):
        x[i] = x[i] + factor if accumulate else factor


@njit(nogil=True)
def _add(floats, x, at):
    """Add decoded floats to ``x`` from ``at`` on."""
    prefer_wide()
    target = x[at : at + floats.size]
    for i in range(target.size):
        target[i] += floats[i]


@njit(nogil=True)
def _decode_five(simd, words, word, layout, table, scale, begin, end, skip, x, accumulate):
    """Implement :func:`decode_range` for words of five digits."""
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
    """Decode groups ``begin .. end``; ``words``, a matrix of one row, has the words of ``begin`` at group ``skip``.

    Words of five digits are decoded into ``x``, or into a small buffer that is added to ``x``. Other words are unpacked
    to digits first, a tile at a time.
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
