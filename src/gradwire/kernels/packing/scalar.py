# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies between digits and words, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

__all__ = ["end_streams", "pack_blocks", "sum_words", "unpack_blocks", "word_at", "word_width"]

_u8, _u32, _f32 = np.uint8, np.uint32, np.float32


def word_width(word):
    """Return the bytes of an integer's type."""
    return word.itemsize


@overload(word_width)
def _width_compiled(word):
    width = word.bitwidth // 8
    return lambda word: width


@njit(nogil=True)
def word_at(words, at, width):
    """Return the little-endian word of ``width`` bytes at ``words[at]``."""
    value = _u32(0)
    for octet in range(width):
        value |= _u32(words[at + octet]) << _u32(8 * octet)
    return value


@njit(nogil=True)
def pack_blocks(digits, blocks, layout, word, out, at):
    width, base, per_word = word_width(word), _u32(layout.base), layout.digits
    for block in range(blocks):
        for lane in range(16):
            value = _u32(0)
            for plane in range(per_word):
                value = _u32(_u32(value * base) + _u32(digits[(block * per_word + per_word - 1 - plane) * 16 + lane]))
            for octet in range(width):
                out[at + (block * 16 + lane) * width + octet] = _u8(value >> _u32(8 * octet))


@njit(nogil=True)
def _add_words(octets, at, word, blocks, layout, floats):
    width, base, per_word = word_width(word), _u32(layout.base), layout.digits
    largest = _u32(min(layout.largest, 0xFFFFFFFF))
    for block in range(blocks):
        for lane in range(16):
            value = word_at(octets, at + (block * 16 + lane) * width, width)
            for digit in range(per_word - 1):
                quotient = _u32(value // base)
                floats[(block * per_word + digit) * 16 + lane] += _f32(_u32(value - _u32(quotient * base)))
                value = quotient
            floats[(block * per_word + per_word - 1) * 16 + lane] += _f32(min(value, largest))


@njit(nogil=True)
def sum_words(rows, at, word, blocks, layout, floats):
    floats[: 16 * blocks * layout.digits] = _f32(0)
    for row in range(rows.number):
        _add_words(rows.octets, at + row * rows.stride, word, blocks, layout, floats)


@njit(nogil=True)
def unpack_blocks(rows, at, word, blocks, layout, floats):
    floats[: 16 * blocks * layout.digits] = _f32(0)
    _add_words(rows.octets, at, word, blocks, layout, floats)


@njit(nogil=True)
def end_streams():
    pass
