# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled steps between digits and words of any width. See ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide

__all__ = ["end_streams", "pack", "sum_rows", "tile_groups", "unpack"]

_pack_blocks = either("pack_blocks", "packing.scalar", "packing.simd")
_unpack_blocks = either("unpack_blocks", "packing.scalar", "packing.simd")
_sum_words = either("sum_words", "packing.scalar", "packing.simd")
end_streams = either("end_streams", "packing.scalar", "packing.simd")


@njit(nogil=True)
def tile_groups(digits, about):
    """Return some ``about`` groups, a multiple of ``digits``: they make whole blocks of words."""
    return digits * max(1, about // digits)


@njit(nogil=True)
def word_position(layout, group):
    """Return where the words of a group begin, in bytes; it is a multiple of the digits of a word."""
    return group * 5 // layout.digits * 16 * layout.word_bytes


@njit(nogil=True)
def word_blocks(layout, groups):
    """Return how many blocks of words hold the digits of so many groups."""
    return (5 * groups + layout.digits - 1) // layout.digits


@njit(nogil=True)
def pack(simd, digits, groups, layout, out, group):
    """Pack the digits of ``groups`` groups, the first of which is group ``group`` of ``out``, and what fills them up.

    ``digits`` (uint16, or float32 of whole numbers) has room for whole blocks.
    """
    prefer_wide()
    blocks = word_blocks(layout, groups)
    digits[80 * groups : 16 * blocks * layout.digits] = layout.base // 2
    at = word_position(layout, group)
    if layout.word_bytes == 1:
        _pack_blocks(simd, digits, blocks, layout, np.uint8(0), out, at)
    elif layout.word_bytes == 2:
        _pack_blocks(simd, digits, blocks, layout, np.uint16(0), out, at)
    else:
        _pack_blocks(simd, digits, blocks, layout, np.uint32(0), out, at)


@njit(nogil=True)
def unpack(simd, rows, row, groups, layout, group, floats):
    """Write the digits of ``groups`` groups of a row, from group ``group`` on, to ``floats``."""
    prefer_wide()
    blocks, at = word_blocks(layout, groups), row * rows.stride + word_position(layout, group)
    if layout.word_bytes == 1:
        _unpack_blocks(simd, rows, at, np.uint8(0), blocks, layout, floats)
    elif layout.word_bytes == 2:
        _unpack_blocks(simd, rows, at, np.uint16(0), blocks, layout, floats)
    else:
        _unpack_blocks(simd, rows, at, np.uint32(0), blocks, layout, floats)


@njit(nogil=True)
def sum_rows(simd, rows, groups, layout, group, floats):
    """Write the sums over rows of the digits of ``groups`` groups, from group ``group`` on, to ``floats``."""
    prefer_wide()
    blocks, at = word_blocks(layout, groups), word_position(layout, group)
    if layout.word_bytes == 1:
        _sum_words(simd, rows, at, np.uint8(0), blocks, layout, floats)
    elif layout.word_bytes == 2:
        _sum_words(simd, rows, at, np.uint16(0), blocks, layout, floats)
    else:
        _sum_words(simd, rows, at, np.uint32(0), blocks, layout, floats)
