# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and groups for lattices; see ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.loops import digits_any
from gradwire.kernels.ternary.loops import pack_any

__all__ = ["lattice_encode_range", "lattice_mean_range"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "93f627ca6db09649"

_TILE_GROUPS = 40
_ROWS_TILE_GROUPS = 12
"""Groups of all rows decoded before they are summed: of eight rows 30 KiB."""

lattice_colours = either("lattice_colours", "lattice.scalar", "lattice.simd")
lattice_sums = either("lattice_sums", "lattice.scalar", "lattice.simd")


@njit(nogil=True, cache=True)
def lattice_encode_range(
    variant, x, offset, numel, start, key, first_group, inverse, bits, shift, round, stream, begin, end, segment,
    per_word, word_bytes, out, checks,
):  # fmt: skip
    """Encode groups ``begin .. end``, the first in ``segment``; ``checks`` (int32 ``[16]``) are added to."""
    prefer_wide()
    base = 1 << bits
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
            lattice_colours(
                variant, x, offset[segment] + within, count, inverse[segment], bits, shift, key[segment, 0],
                key[segment, 1], round, stream, (start[segment] + within) // 80 * 16, digits,
                80 * (group - tile_begin), checks,
            )  # fmt: skip
            group = stop
        size = 80 * (tile_end - tile_begin)
        blocks = (size + 16 * per_word - 1) // (16 * per_word)
        digits[size : blocks * 16 * per_word] = np.uint16(base // 2)
        pack_any(variant, digits, blocks, per_word, base, word_bytes, out, tile_begin // per_word * 5 * 16 * word_bytes)


@njit(nogil=True, cache=True)
def lattice_mean_range(
    variant, rows, stride, number, own, x, offset, numel, start, key, first_group, inverse, scale, accumulate, bits,
    shifts, round, stream, begin, end, segment, per_word, word_bytes, low, power, reciprocals, checks,
):  # fmt: skip
    """Decode groups ``begin .. end`` of all rows; ``checks`` (int32 ``[16 * number]``) are added to."""
    prefer_wide()
    base = 1 << bits
    tile = per_word * max(1, _ROWS_TILE_GROUPS // per_word)
    distance = 80 * tile + 16 * per_word
    colours = np.empty(number * distance, np.float32)
    for tile_begin in range(begin, end, tile):
        tile_end = min(end, tile_begin + tile)
        blocks = (5 * (tile_end - tile_begin) + per_word - 1) // per_word
        for row in range(number):
            position = row * stride + tile_begin // per_word * 5 * 16 * word_bytes
            digits_any(
                variant, rows, position, blocks, per_word, base, word_bytes, low, power, reciprocals,
                colours[row * distance : (row + 1) * distance],
            )  # fmt: skip
        group = tile_begin
        while group < tile_end:
            while first_group[segment + 1] <= group:
                segment += 1
            within = 80 * (group - first_group[segment])
            stop = min(tile_end, first_group[segment + 1])
            count = min(80 * (stop - group), numel[segment] - within)
            first, factor = offset[segment] + within, scale[segment]
            if np.isfinite(factor):
                lattice_sums(
                    variant, own, x, first, count, inverse[segment], factor, accumulate, bits, shifts, number, colours,
                    distance, 80 * (group - tile_begin), key[segment, 0], key[segment, 1], round, stream,
                    (start[segment] + within) // 80 * 16, checks,
                )  # fmt: skip
            else:
                for i in range(first, first + count):
                    x[i] = x[i] + factor if accumulate else factor
            group = stop
