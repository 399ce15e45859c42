# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled packing, unpacking and sums of digits, which divide by the base by multiplications; plain bodies."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.extending import overload

from gradwire.errors import BackendError
from gradwire.kernels.numba_core.compiled import either
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing import simd
from gradwire.kernels.packing.layout import DigitLayout

_u8, _u32, _f32 = np.uint8, np.uint32, np.float32


PART = 1 << 22
"""Numbers below this are divided in float32."""


def plain_word_width(word):
    """Return the bytes of an integer's type."""
    return word.itemsize


@overload(plain_word_width)
def _width_compiled(word):
    width = word.bitwidth // 8
    return lambda word: width


@njit(nogil=True)
def plain_word_at(words, at, width):
    """Return the little-endian word of ``width`` bytes at ``words[at]``."""
    value = _u32(0)
    for octet in range(width):
        value |= _u32(words[at + octet]) << _u32(8 * octet)
    return value


@njit(nogil=True)
def plain_pack_blocks(digits, blocks, layout, word, out, at):
    width, base, per_word = plain_word_width(word), _u32(layout.base), layout.digits
    for block in range(blocks):
        for lane in range(16):
            value = _u32(0)
            for plane in range(per_word):
                value = _u32(_u32(value * base) + _u32(digits[(block * per_word + per_word - 1 - plane) * 16 + lane]))
            for octet in range(width):
                out[at + (block * 16 + lane) * width + octet] = _u8(value >> _u32(8 * octet))


@njit(nogil=True)
def _add_words(octets, at, word, blocks, layout, floats):
    width, base, per_word = plain_word_width(word), _u32(layout.base), layout.digits
    largest = _u32(min(layout.largest, 0xFFFFFFFF))
    for block in range(blocks):
        for lane in range(16):
            value = plain_word_at(octets, at + (block * 16 + lane) * width, width)
            for digit in range(per_word - 1):
                quotient = _u32(value // base)
                floats[(block * per_word + digit) * 16 + lane] += _f32(_u32(value - _u32(quotient * base)))
                value = quotient
            floats[(block * per_word + per_word - 1) * 16 + lane] += _f32(min(value, largest))


@njit(nogil=True)
def plain_sum_words(rows, at, word, blocks, layout, floats):
    floats[: 16 * blocks * layout.digits] = _f32(0)
    for row in range(rows.number):
        _add_words(rows.octets, at + row * rows.stride, word, blocks, layout, floats)


@njit(nogil=True)
def plain_unpack_blocks(rows, at, word, blocks, layout, floats):
    floats[: 16 * blocks * layout.digits] = _f32(0)
    _add_words(rows.octets, at, word, blocks, layout, floats)


@njit(nogil=True)
def plain_end_streams():
    pass


def reciprocal16(divisor: int, largest: int) -> tuple[int, int]:
    """Return ``(multiplier, shift)``: ``v // divisor == (v * multiplier >> 16) >> shift`` for ``0 <= v <= largest``."""
    for shift in range(16):
        multiplier = -(-(1 << (16 + shift)) // divisor)
        excess = multiplier * divisor - (1 << (16 + shift))
        if multiplier < 1 << 16 and excess * largest < 1 << (16 + shift):
            return multiplier, shift
    raise BackendError(
        f"no 16-bit reciprocal of {divisor} up to {largest}: this is a defect of gradwire, please report it"
    )


class WordTable(NamedTuple):
    """A :class:`DigitLayout` as one argument of compiled code, with the factors that replace divisions by the base.

    For whole ``v`` below 2^22 and ``d = base^p``, ``v // d == trunc(fl((v + 1/2) * fl(1/d)))``: the exact product is
    at least ``1 / (2 d)`` from a whole number, and the two roundings move it by less than ``(v + 1/2) / d * 2^-23``.
    Words of one or two bytes are below 2^22. A word of four bytes is divided by ``base^low`` in float64, so that both
    parts are.

    Attributes:
        low: Number of digits in the lower part of a word.
        power: ``base^low``.
        inverse: ``fl(1 / base^p)`` for each digit, float32 ``[digits]``.
        narrow: For words of five digits in 16 bits, :func:`reciprocal16` of base, base^2 and base^4.
        largest: Bound to which the highest digit of a word is clamped.
    """

    base: int
    digits: int
    word_bytes: int
    low: int
    power: int
    inverse: npt.NDArray[np.float32]
    narrow: tuple[int, ...]
    largest: int


@cache
def word_table(layout: DigitLayout, clamp: bool = True) -> WordTable:
    """Return the table of a layout.

    Args:
        layout: The layout.
        clamp: Reduce a highest digit that no encoder writes to ``base - 1``.
    """
    base, low = layout.base, layout.digits
    if layout.word_bytes == 4:
        low = 0
        while base ** (low + 1) <= PART:
            low += 1
        if low >= layout.digits or base**low * PART < 256**4:
            raise BackendError(f"words of {layout} have no such parts: this is a defect of gradwire, please report it")
    inverse = (1.0 / np.float64(base) ** np.arange(layout.digits)).astype(np.float32)
    inverse.flags.writeable = False
    narrow: tuple[int, ...] = (0,) * 6
    if layout.digits == 5 and layout.word_bytes <= 2:
        largest = max(base**5 - 1, 255 if layout.word_bytes == 1 else 0)
        narrow = tuple(part for power in (1, 2, 4) for part in reciprocal16(base**power, largest))
    top = base - 1 if clamp else 256**layout.word_bytes
    return WordTable(base, layout.digits, layout.word_bytes, low, base**low, inverse, narrow, top)


_pack_blocks = either(plain_pack_blocks, simd.pack_blocks)
_unpack_blocks = either(plain_unpack_blocks, simd.unpack_blocks)
_sum_words = either(plain_sum_words, simd.sum_words)
end_streams = either(plain_end_streams, simd.end_streams)


@njit(nogil=True)
def tile_groups(digits, about):
    """Return a number of groups near ``about`` whose digits fill whole blocks of words: a multiple of ``digits``."""
    return digits * max(1, about // digits)


@njit(nogil=True)
def word_position(layout, group):
    """Return the byte at which the words of a group begin; ``group`` is a multiple of the digits of a word."""
    return group * 5 // layout.digits * 16 * layout.word_bytes


@njit(nogil=True)
def word_blocks(layout, groups):
    """Return the number of blocks of words that hold the digits of ``groups`` groups."""
    return (5 * groups + layout.digits - 1) // layout.digits


@njit(nogil=True)
def pack(simd, digits, groups, layout, out, group):
    """Pack the digits of ``groups`` groups into ``out``, from its group ``group`` on, and pad the last block.

    ``digits`` (uint16, or whole numbers in float32) has room for whole blocks.
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
