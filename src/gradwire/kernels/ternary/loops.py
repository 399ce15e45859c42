# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and groups. They decide what lies where; *bodies* do the arithmetic.

Every driver's first argument says which bodies serve it: see :mod:`gradwire.kernels.numba_core.overloads`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide

__all__ = [
    "decode_range",
    "encode_range",
    "moments_range",
    "pack_run",
    "sum_range",
    "unpack_run",
]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "99ed7a062eeaa598"

TILE_GROUPS = 40
"""Groups decoded before they are scaled and stored: 12.5 KiB of int32, well within the L1 cache."""

STREAMED_GROUPS = 1 << 12
"""Groups from which on a call decodes past the caches: 1.25 MiB of floats, which would push out other data."""

MIN_STREAMED = 1280
"""Elements of a segment from which on that pays."""

block_maximum = either("block_maximum", "ternary.scalar", "moments.simd")
block_sums = either("block_sums", "ternary.scalar", "moments.simd")
encode_groups = either("encode_groups", "ternary.scalar", "moments.simd")
sum_to_digits = either("sum_to_digits", "ternary.scalar", "ternary.simd")
sum_to_words = either("sum_to_words", "ternary.scalar", "ternary.simd")
pack_blocks = either("pack_blocks", "ternary.scalar", "ternary.simd")
unpack_blocks = either("unpack_blocks", "ternary.scalar", "ternary.simd")
decode_groups = either("decode_groups", "ternary.scalar", "ternary.simd")
decode_streamed = either("decode_streamed", "ternary.scalar", "ternary.simd")


@njit(nogil=True, cache=True)
def moments_range(variant, x, offset, numel, begin, end, max_abs, mean, std, norm, scratch):
    """Compute the moments of segments ``begin .. end``. ``scratch`` (float64 ``[3]``) turns bits into numbers."""
    prefer_wide()
    double_bits = scratch.view(np.int64)
    single = scratch[2:].view(np.float32)
    single_bits = scratch[2:].view(np.int32)
    for segment in range(begin, end):
        at, rest = offset[segment], numel[segment]
        size = rest
        first, second = 0.0, 0.0
        largest = np.int32(0)
        while rest > 0:
            count = min(rest, 4096)
            bits = block_maximum(variant, x, at, count, 4096)
            largest = max(largest, bits)
            if bits >= 0x7F800000:
                break
            exponent = max((bits >> 23) - 127, -104)
            single_bits[0] = np.int32((23 - exponent + 127) << 23)
            s1, s2 = block_sums(variant, x, at, count, single[0], 4096)
            double_bits[0] = np.int64(exponent - 23 + 1023) << 52
            double_bits[1] = np.int64(2 * (exponent - 23) + 1023) << 52
            first += np.float64(s1) * scratch[0]
            second += np.float64(s2) * scratch[1]
            at += count
            rest -= count
        if largest >= 0x7F800000:
            largest = np.int32(0x7F800000)
            first, second = 0.0, 0.0
        average = first / max(size, 1)
        variance = second / max(size, 1) - average * average
        single_bits[0] = largest
        max_abs[segment] = single[0]
        mean[segment] = average
        std[segment] = np.sqrt(max(variance, 0.0))
        norm[segment] = np.sqrt(second)


@njit(nogil=True, cache=True)
def encode_range(
    variant, x, offset, numel, start, key, first_group, limit, inverse, round, stream, begin, end, segment, out
):  # fmt: skip
    """Encode groups ``begin .. end``, the first of which lies in ``segment``, into ``out``."""
    prefer_wide()
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = group - first_group[segment]
        stop = min(end, first_group[segment + 1]) - first_group[segment]
        count = min(80 * stop, numel[segment]) - 80 * within
        encode_groups(
            variant, x, offset[segment] + 80 * within, limit[segment], inverse[segment], key[segment, 0],
            key[segment, 1], round, stream, (start[segment] // 80 + within) * 16, out, 16 * (group - begin), count,
            2560,
        )  # fmt: skip
        group += stop - within


@njit(nogil=True)
def pack_any(variant, digits, blocks, per_word, base, word_bytes, out, first):
    """Do as ``pack_blocks``, for words of any width."""
    if word_bytes == 1:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint8(0), out, first)
    elif word_bytes == 2:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint16(0), out, first)
    else:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint32(0), out, first)


@njit(nogil=True)
def unpack_any(variant, words, first, blocks, per_word, base, word_bytes, reciprocal, values):
    """Do as ``unpack_blocks``, for words of any width."""
    if word_bytes == 1:
        unpack_blocks(variant, words, first, np.uint8(0), blocks, per_word, base, reciprocal, values)
    elif word_bytes == 2:
        unpack_blocks(variant, words, first, np.uint16(0), blocks, per_word, base, reciprocal, values)
    else:
        unpack_blocks(variant, words, first, np.uint32(0), blocks, per_word, base, reciprocal, values)


@njit(nogil=True, cache=True)
def sum_range(variant, rows, stride, number, begin, end, base, per_word, word_bytes, out):
    """Sum bytes ``begin .. end`` of the rows, a whole number of ``16 * per_word``, unless they are the last."""
    prefer_wide()
    if per_word == 5 and word_bytes == 2:
        for first in range(begin, end, 1024):
            sum_to_words(variant, rows, first, stride, number, min(1024, end - first), base, out, 2 * first)
        return
    # Five planes of 16 digits a group, per_word planes a block: a multiple of per_word groups makes whole blocks.
    tile = per_word * max(1, 64 // per_word) * 16
    digits = np.empty(5 * tile + 16 * per_word, np.uint16)
    for first in range(begin, end, tile):
        length = min(tile, end - first)
        sum_to_digits(variant, rows, first, stride, number, length, digits)
        blocks = -(-5 * length // (16 * per_word))
        digits[5 * length : blocks * 16 * per_word] = np.uint16(base // 2)
        pack_any(variant, digits, blocks, per_word, base, word_bytes, out, first // per_word * 5 * word_bytes)


@njit(nogil=True, cache=True)
def pack_run(variant, values, base, per_word, word_bytes, out):
    """Pack a run of int32 values in ``[-(base // 2), base // 2]``."""
    prefer_wide()
    block = 16 * per_word
    tile = block * max(1, 4096 // block)
    digits = np.empty(tile, np.uint16)
    for first in range(0, values.size, tile):
        part = values[first : first + tile]
        blocks = -(-part.size // block)
        for i in range(part.size):
            digits[i] = np.uint16(part[i] + base // 2)
        digits[part.size : blocks * block] = np.uint16(base // 2)
        pack_any(variant, digits, blocks, per_word, base, word_bytes, out, first // per_word * word_bytes)


@njit(nogil=True, cache=True)
def unpack_run(variant, words, base, per_word, word_bytes, reciprocal, out):
    """Undo ``pack_run``."""
    prefer_wide()
    block = 16 * per_word
    tile = block * max(1, 4096 // block)
    values = np.empty(tile, np.int32)
    for first in range(0, out.size, tile):
        part = out[first : first + tile]
        blocks = -(-part.size // block)
        position = first // per_word * word_bytes
        unpack_any(variant, words, position, blocks, per_word, base, word_bytes, reciprocal, values)
        part[:] = values[: part.size]


@njit(nogil=True)
def _decode_some(variant, words, first, word, count, base, reciprocals, scale, x, at):
    """Do as ``decode_groups``, once in the machine code for all that need no inlining."""
    decode_groups(variant, words, first, word, count, base, reciprocals, scale, x, at)


@njit(nogil=True)
def _decode_long(variant, words, first, word, size, count, base, reciprocals, scale, x, at):
    """Decode a long segment past the caches, but for its first group and its last one to three."""
    inner = (count // 80 - 2) & -2
    done = 1 + inner
    decode_streamed(variant, words, first + size, word, inner, base, reciprocals, scale, x, at + 80)
    _decode_some(variant, words, first, word, 80, base, reciprocals, scale, x, at)
    first, at, count = first + done * size, at + 80 * done, count - 80 * done
    _decode_some(variant, words, first, word, count, base, reciprocals, scale, x, at)


@njit(nogil=True)
def _scale(integers, count, factor, x, at, accumulate):
    """Write integers times the factor to ``x[at : at + count]``, or add them."""
    target, source = x[at : at + count], integers[:count]
    if accumulate:
        for i in range(target.size):
            target[i] += np.float32(source[i]) * factor
    else:
        for i in range(target.size):
            target[i] = np.float32(source[i]) * factor


@njit(nogil=True)
def _decode_special(factor, x, begin, end, accumulate):
    """Write what any digit times an infinity or NaN is defined to be: that factor."""
    for i in range(begin, end):
        x[i] = x[i] + factor if accumulate else factor


@njit(nogil=True)
def _add(floats, count, x, at):
    """Add decoded floats to ``x[at : at + count]``."""
    prefer_wide()
    target, source = x[at : at + count], floats[:count]
    for i in range(target.size):
        target[i] += source[i]


@njit(nogil=True)
def _decode_five(
    variant, words, word, size, base, reciprocals, offset, numel, first_group, scale, begin, end, skip, segment, x,
    accumulate,
):  # fmt: skip
    """Do ``decode_range`` for words of five digits, ``size`` bytes a group."""
    prefer_wide()
    floats = np.empty(80 * TILE_GROUPS, np.float32)
    streamed = end - begin >= STREAMED_GROUPS
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = group - first_group[segment]
        stop = min(end, first_group[segment + 1])
        if accumulate:
            stop = min(stop, group + TILE_GROUPS)
        at = offset[segment] + 80 * within
        count = min(80 * (stop - group), numel[segment] - 80 * within)
        first = (skip + group - begin) * size
        factor = scale[segment]
        if not np.isfinite(factor):
            _decode_special(factor, x, at, at + count, accumulate)
        elif accumulate:
            _decode_some(variant, words, first, word, count, base, reciprocals, factor, floats, 0)
            _add(floats, count, x, at)
        elif streamed and count >= MIN_STREAMED:
            _decode_long(variant, words, first, word, size, count, base, reciprocals, factor, x, at)
        else:
            decode_groups(variant, words, first, word, count, base, reciprocals, factor, x, at)
        group = stop


@njit(nogil=True, cache=True)
def decode_range(
    variant, words, base, per_word, word_bytes, reciprocal, reciprocals, offset, numel, first_group, scale, begin, end,
    skip, segment, x, accumulate,
):  # fmt: skip
    """Decode groups ``begin .. end``; the words of ``begin`` are at group ``skip`` of ``words``.

    Words of five digits go straight to ``x``, or through a small buffer if they are to be added; others are unpacked to
    integers a tile at a time.
    """
    prefer_wide()
    if per_word == 5 and word_bytes == 1:
        _decode_five(
            variant, words, np.uint8(0), 16, base, reciprocals, offset, numel, first_group, scale, begin, end, skip,
            segment, x, accumulate,
        )  # fmt: skip
        return
    if per_word == 5 and word_bytes == 2:
        _decode_five(
            variant, words, np.uint16(0), 32, base, reciprocals, offset, numel, first_group, scale, begin, end, skip,
            segment, x, accumulate,
        )  # fmt: skip
        return
    # A multiple of per_word groups makes whole blocks of words, so tiles may start at any such group.
    tile = per_word * max(1, TILE_GROUPS // per_word)
    integers = np.empty(80 * tile + 16 * per_word, np.int32)
    group, tile_begin, tile_end = begin, begin, begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        if group == tile_end:
            tile_begin, tile_end = group, min(end, group + tile)
            position = (skip + group - begin) * 5 // per_word * 16 * word_bytes
            blocks = -(-5 * (tile_end - group) // per_word)
            unpack_any(variant, words, position, blocks, per_word, base, word_bytes, reciprocal, integers)
        stop = min(tile_end, first_group[segment + 1])
        within = group - first_group[segment]
        at = offset[segment] + 80 * within
        count = min(80 * (stop - group), numel[segment] - 80 * within)
        factor = scale[segment]
        if not np.isfinite(factor):
            _decode_special(factor, x, at, at + count, accumulate)
        else:
            _scale(integers[80 * (group - tile_begin) :], count, factor, x, at, accumulate)
        group = stop
