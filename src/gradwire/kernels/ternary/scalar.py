# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of trits, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.philox_scalar import five_words
from gradwire.kernels.packing.scalar import pack_blocks, word_at, word_width

__all__ = ["decode_groups", "decode_streamed", "encode_groups", "sum_to_digits", "sum_to_words", "write_digits"]

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
def encode_groups(x, first, count, limit, inverse, noise, out, at):
    for group in range((count + 79) // 80):
        values = x[first + 80 * group : first + min(80 * group + 80, count)]
        for lane in range(16):
            words = five_words(noise, 16 * group + lane)
            total = _i32(121)
            power = _i32(1)
            for plane, word in enumerate(words):
                if 16 * plane + lane < values.size:
                    total += power * (_digit(values[16 * plane + lane], word >> _u64(8), limit, inverse) - _i32(1))
                power *= _i32(3)
            out[at + 16 * group + lane] = _u8(total)


@njit(nogil=True)
def sum_to_digits(rows, first, length, digits):
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
def sum_to_words(rows, first, length, layout, out, at):
    digits = np.empty(5 * length, np.uint16)
    sum_to_digits(rows, first, length, digits)
    pack_blocks(digits, length // 16, layout, _u16(0), out, at)


@njit(nogil=True)
def decode_groups(words, first, word, layout, count, scale, x, at):
    width, base = word_width(word), layout.base
    for group in range((count + 79) // 80):
        target = x[at + 80 * group : at + min(80 * group + 80, count)]
        for lane in range(16):
            value = word_at(words, first + (16 * group + lane) * width, width)
            for plane in range(5):
                quotient = _u32(value // _u32(base)) if plane < 4 else _u32(0)
                digit = _i32(_i32(value - _u32(quotient * _u32(base))) - _i32(base // 2))
                if 16 * plane + lane < target.size:
                    target[16 * plane + lane] = _f32(_f32(digit) * scale)
                value = quotient


@njit(nogil=True)
def decode_streamed(words, first, word, layout, groups, scale, x, at):
    decode_groups(words, first, word, layout, 80 * groups, scale, x, at)


@njit(nogil=True)
def write_digits(floats, first, count, middle, factor, x, at, accumulate, streamed):
    source, target = floats[first : first + count], x[at : at + count]
    if accumulate:
        for i in range(target.size):
            target[i] += (source[i] - middle) * factor
    else:
        for i in range(target.size):
            target[i] = (source[i] - middle) * factor
