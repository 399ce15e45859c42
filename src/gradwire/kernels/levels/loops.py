# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments, blocks and groups of levels; see ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.loops import digits_any, end_streams, sums_any
from gradwire.kernels.ternary.loops import MIN_STREAMED, STREAMED_GROUPS, pack_any

__all__ = ["dequantise_range", "quantise_range", "sum_digits_range"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "70b34578c04787ee"

_TILE_GROUPS = 40

quantise_even = either("quantise_even", "levels.scalar", "levels.simd")
quantise_steps = either("quantise_steps", "levels.scalar", "levels.simd")
write_levels = either("write_levels", "levels.scalar", "levels.simd_values")


@njit(nogil=True)
def _quantise_run(
    variant, even, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive,
    negative, signed, key0, key1, round, stream, block, digits, at,
):  # fmt: skip
    prefer_wide()
    if even:
        quantise_even(
            variant, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive,
            negative, signed, key0, key1, round, stream, block, digits, at,
        )  # fmt: skip
    else:
        quantise_steps(
            variant, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive,
            negative, signed, key0, key1, round, stream, block, digits, at,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def quantise_range(
    variant, x, offset, numel, start, key, first_group, first_block, phase, block_size, inverse, edge, gap, steps,
    positive, negative, signed, even, round, stream, begin, end, skip, segment, base, per_word, word_bytes, out,
):  # fmt: skip
    """Encode groups ``begin .. end``, the first in ``segment``, a tile at a time; that is group ``skip`` of ``out``."""
    prefer_wide()
    # A multiple of per_word groups makes whole blocks of words.
    tile = per_word * max(1, _TILE_GROUPS // per_word)
    digits = np.empty(80 * tile + 16 * per_word, np.uint16)
    for tile_begin in range(begin, end, tile):
        tile_end = min(end, tile_begin + tile)
        group = tile_begin
        while group < tile_end:
            while first_group[segment + 1] <= group:
                segment += 1
            within = 80 * (group - first_group[segment])
            stop = min(tile_end, first_group[segment + 1])
            count = min(80 * (stop - group), numel[segment] - within)
            place = phase[segment] + within
            scale_at = first_block[segment] + place // block_size
            _quantise_run(
                variant, even, x, offset[segment] + within, count, inverse, scale_at, block_size - place % block_size,
                first_block[segment + 1] - 1, block_size, edge, gap, steps, positive, negative, signed,
                key[segment, 0], key[segment, 1], round, stream, (start[segment] + within) // 80 * 16, digits,
                80 * (group - tile_begin),
            )  # fmt: skip
            group = stop
        size = 80 * (tile_end - tile_begin)
        blocks = (size + 16 * per_word - 1) // (16 * per_word)
        digits[size : blocks * 16 * per_word] = np.uint16(base // 2)
        pack_any(
            variant, digits, blocks, per_word, base, word_bytes, out,
            (skip + tile_begin - begin) // per_word * 5 * 16 * word_bytes,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def dequantise_range(
    variant, words, base, per_word, word_bytes, low, power, inverse, offset, numel, first_group, first_block, phase,
    block_size, scale, values, even, begin, end, skip, segment, x, accumulate,
):  # fmt: skip
    """Decode groups ``begin .. end``; the words of ``begin`` are at group ``skip`` of ``words``."""
    prefer_wide()
    tile = per_word * max(1, _TILE_GROUPS // per_word)
    floats = np.empty(80 * tile + 16 * per_word, np.float32)
    streamed = end - begin >= STREAMED_GROUPS and not accumulate
    for tile_begin in range(begin, end, tile):
        tile_end = min(end, tile_begin + tile)
        blocks = (5 * (tile_end - tile_begin) + per_word - 1) // per_word
        position = (skip + tile_begin - begin) // per_word * 5 * 16 * word_bytes
        digits_any(variant, words, position, blocks, per_word, base, word_bytes, low, power, inverse, floats)
        group = tile_begin
        while group < tile_end:
            while first_group[segment + 1] <= group:
                segment += 1
            within = 80 * (group - first_group[segment])
            stop = min(tile_end, first_group[segment + 1])
            count = min(80 * (stop - group), numel[segment] - within)
            place = phase[segment] + within
            write_levels(
                variant, floats, 80 * (group - tile_begin), count, values, even, scale,
                first_block[segment] + place // block_size, block_size - place % block_size, block_size, x,
                offset[segment] + within, accumulate, streamed and count >= MIN_STREAMED,
            )  # fmt: skip
            group = stop
    end_streams(variant)


@njit(nogil=True, cache=True)
def sum_digits_range(
    variant, rows, stride, number, begin, end, base, per_word, word_bytes, low, power, inverse, sum_base, sum_per_word,
    sum_word_bytes, both, out,
):  # fmt: skip
    """Add the digits of groups ``begin .. end`` of all rows; ``both`` is a multiple of the digits of either word.

    Sums are below 2^16, so exact in float32.
    """
    prefer_wide()
    tile = both * max(1, _TILE_GROUPS // both)
    digits = np.empty(80 * tile + 16 * max(per_word, sum_per_word), np.float32)
    for first in range(begin, end, tile):
        planes = 5 * min(tile, end - first)
        blocks = (planes + per_word - 1) // per_word
        position = first // per_word * 5 * 16 * word_bytes
        sums_any(
            variant, rows, position, stride, number, blocks, per_word, base, word_bytes, low, power, inverse, digits
        )  # fmt: skip
        blocks = (planes + sum_per_word - 1) // sum_per_word
        digits[16 * planes : 16 * blocks * sum_per_word] = np.float32(sum_base // 2)
        pack_any(
            variant, digits, blocks, sum_per_word, sum_base, sum_word_bytes, out,
            first // sum_per_word * 5 * 16 * sum_word_bytes,
        )  # fmt: skip
