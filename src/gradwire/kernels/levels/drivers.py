# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments, blocks and groups of levels; see ``cpu_drivers.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.cpu_drivers import pack_any, unpack_any
from gradwire.kernels.variants import either
from gradwire.kernels.vectors import prefer_wide

__all__ = ["dequantise_range", "quantise_range", "sum_digits_range"]

_TILE_GROUPS = 40
_FEW = 16

quantise_even = either("quantise_even", "levels.plain", "levels.vector")
quantise_steps = either("quantise_steps", "levels.plain", "levels.vector")


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
    positive, negative, signed, even, round, stream, begin, end, segment, base, per_word, word_bytes, out,
):  # fmt: skip
    """Encode groups ``begin .. end``, the first of which lies in ``segment``, into ``out``, a tile at a time."""
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
            (tile_begin - begin) // per_word * 5 * 16 * word_bytes,
        )  # fmt: skip


@njit(nogil=True)
def _look_up(integers, count, values, even, floats):
    """Turn digits, less the middle one, into levels; a digit past the last counts as the last."""
    source, target = integers[:count], floats[:count]
    middle = np.int32(values.size // 2)
    if even:
        steps = np.float32(middle)
        for i in range(target.size):
            target[i] = np.float32(min(source[i], middle)) / steps
    elif values.size <= _FEW:
        # A comparison a level: a gather takes longer.
        target[:] = values[0]
        for k in range(1, values.size):
            digit, level = np.int32(k - middle), values[k]
            for i in range(target.size):
                target[i] = level if source[i] >= digit else target[i]
    else:
        most = np.int32(values.size - 1)
        for i in range(target.size):
            target[i] = values[min(source[i] + middle, most)]


@njit(nogil=True)
def _write(floats, count, factor, x, at, accumulate):
    target, source = x[at : at + count], floats[:count]
    if not np.isfinite(factor):
        for i in range(target.size):
            target[i] = target[i] + factor if accumulate else factor
    elif accumulate:
        for i in range(target.size):
            target[i] += source[i] * factor
    else:
        for i in range(target.size):
            target[i] = source[i] * factor


@njit(nogil=True, cache=True)
def dequantise_range(
    variant, words, base, per_word, word_bytes, reciprocal, offset, numel, first_group, first_block, phase,
    block_size, scale, values, even, begin, end, segment, x, accumulate,
):  # fmt: skip
    """Decode groups ``begin .. end``, whose words start at the first of ``words``."""
    prefer_wide()
    tile = per_word * max(1, _TILE_GROUPS // per_word)
    integers = np.empty(80 * tile + 16 * per_word, np.int32)
    floats = np.empty(80 * tile, np.float32)
    for tile_begin in range(begin, end, tile):
        tile_end = min(end, tile_begin + tile)
        blocks = (5 * (tile_end - tile_begin) + per_word - 1) // per_word
        position = (tile_begin - begin) // per_word * 5 * 16 * word_bytes
        unpack_any(variant, words, position, blocks, per_word, base, word_bytes, reciprocal, integers)
        _look_up(integers, 80 * (tile_end - tile_begin), values, even, floats)
        group = tile_begin
        while group < tile_end:
            while first_group[segment + 1] <= group:
                segment += 1
            within = 80 * (group - first_group[segment])
            stop = min(tile_end, first_group[segment + 1])
            last = min(within + 80 * (stop - group), numel[segment])
            source = 80 * (group - tile_begin)
            while within < last:
                place = phase[segment] + within
                block = place // block_size
                count = min(last, within + block_size - place % block_size) - within
                factor = scale[first_block[segment] + block]
                _write(floats[source:], count, factor, x, offset[segment] + within, accumulate)
                within += count
                source += count
            group = stop


@njit(nogil=True)
def _add_digits(integers, middle, largest, first, digits):
    """Add digits, less the middle one, to sums, or start them; a digit past the last counts as the last."""
    source, target = integers[: digits.size], digits
    if first:
        for i in range(target.size):
            target[i] = np.uint16(min(np.int32(source[i] + middle), largest))
    else:
        for i in range(target.size):
            target[i] += np.uint16(min(np.int32(source[i] + middle), largest))


@njit(nogil=True, cache=True)
def sum_digits_range(
    variant, rows, stride, number, groups, base, per_word, word_bytes, reciprocal, sum_base, sum_per_word,
    sum_word_bytes, both, out,
):  # fmt: skip
    """Add the digits of all rows; ``both`` is a multiple of the digits of a word of either layout."""
    prefer_wide()
    tile = both * max(1, _TILE_GROUPS // both)
    integers = np.empty(80 * tile + 16 * per_word, np.int32)
    digits = np.empty(80 * tile + 16 * sum_per_word, np.uint16)
    for begin in range(0, groups, tile):
        planes = 5 * min(tile, groups - begin)
        blocks = (planes + per_word - 1) // per_word
        for row in range(number):
            position = row * stride + begin // per_word * 5 * 16 * word_bytes
            unpack_any(variant, rows, position, blocks, per_word, base, word_bytes, reciprocal, integers)
            _add_digits(integers, np.int32(base // 2), np.int32(base - 1), row == 0, digits[: 16 * planes])
        blocks = (planes + sum_per_word - 1) // sum_per_word
        digits[16 * planes : 16 * blocks * sum_per_word] = np.uint16(sum_base // 2)
        pack_any(
            variant, digits, blocks, sum_per_word, sum_base, sum_word_bytes, out,
            begin // sum_per_word * 5 * 16 * sum_word_bytes,
        )  # fmt: skip
