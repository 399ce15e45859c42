# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies, one for each explicit-vector one and with the same signature: for machines where those fail."""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

__all__ = [
    "block_maximum",
    "block_sums",
    "decode_groups",
    "decode_streamed",
    "encode_groups",
    "five_words",
    "pack_blocks",
    "sum_to_digits",
    "sum_to_words",
    "unpack_blocks",
    "word_at",
    "word_width",
]

# Numba widens 32-bit arithmetic to 64 bits unless every step is cast back.
_u8, _u16, _u32, _u64 = np.uint8, np.uint16, np.uint32, np.uint64
_i32, _i64, _f32 = np.int32, np.int64, np.float32
_MASK, _HALF = _u64(0xFFFFFFFF), _u64(32)
_M0, _M1 = _u64(0xD2511F53), _u64(0xCD9E8D57)
_W0, _W1 = _u32(0x9E3779B9), _u32(0xBB67AE85)
_ROUNDS = 7


def word_width(word):
    """Give the bytes of an integer's type."""
    return word.itemsize


@overload(word_width)
def _width_compiled(word):
    width = word.bitwidth // 8
    return lambda word: width


@njit(nogil=True)
def block_maximum(x, first, count, ahead):
    bits = x[first : first + count].view(_i32)
    largest = _i32(0)
    for i in range(bits.size):
        largest = max(largest, _i32(bits[i] & _i32(0x7FFFFFFF)))
    return largest


@njit(nogil=True)
def block_sums(x, first, count, factor, ahead):
    values = x[first : first + count]
    total, squares = _i64(0), _i64(0)
    for i in range(values.size):
        q = _i64(_i32(values[i] * factor))
        total += q
        squares += q * q
    return total, squares


@njit(nogil=True)
def _philox(block, key0, key1, round, stream):
    c0, c1, c2, c3 = _u64(block) & _MASK, _u64(round) & _MASK, _u64(round) >> _HALF, _u64(stream)
    k0, k1 = _u32(key0), _u32(key1)
    for _ in range(_ROUNDS):
        p0, p1 = _u64(c0 * _M0), _u64(c2 * _M1)
        c0, c1 = _u64((p1 >> _HALF) ^ c1 ^ _u64(k0)), _u64(p1 & _MASK)
        c2, c3 = _u64((p0 >> _HALF) ^ c3 ^ _u64(k1)), _u64(p0 & _MASK)
        k0, k1 = _u32(k0 + _W0), _u32(k1 + _W1)
    return c0, c1, c2, c3


@njit(nogil=True)
def five_words(block, key0, key1, round, stream):
    """Give the words of five planes: Philox's four, and one made of their spare low bytes."""
    w0, w1, w2, w3 = _philox(block, key0, key1, round, stream)
    spare = (w0 & _u64(255)) << _u64(24) | (w1 & _u64(255)) << _u64(16) | (w2 & _u64(255)) << _u64(8)
    return w0, w1, w2, w3, spare


@njit(nogil=True)
def _digit(value, uniform, limit, inverse):
    magnitude = abs(value)
    if limit < magnitude:
        magnitude = limit
    if _f32(_i32(uniform)) < _f32(magnitude * inverse):
        return _i32(0) if np.signbit(value) else _i32(2)
    return _i32(1)


@njit(nogil=True)
def _encode_group(x, first, limit, inverse, key0, key1, round, stream, block, out, out_first, count):
    values = x[first : first + count]
    for lane in range(16):
        words = five_words(_i64(block) + lane, key0, key1, round, stream)
        total = _i32(121)
        power = _i32(1)
        for plane, word in enumerate(words):
            if 16 * plane + lane < count:
                total += power * (_digit(values[16 * plane + lane], word >> _u64(8), limit, inverse) - _i32(1))
            power *= _i32(3)
        out[out_first + lane] = _u8(total)


@njit(nogil=True)
def encode_groups(x, first, limit, inverse, key0, key1, round, stream, block, out, out_first, count, ahead):
    for group in range((count + 79) // 80):
        _encode_group(
            x, first + 80 * group, limit, inverse, key0, key1, round, stream, block + 16 * group, out,
            out_first + 16 * group, min(80, count - 80 * group),
        )  # fmt: skip


@njit(nogil=True)
def sum_to_digits(rows, first, stride, number, length, digits):
    target = digits[: 5 * length]
    target[:] = _u16(0)
    for row in range(number):
        payload = rows[first + row * stride : first + row * stride + length]
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
def pack_blocks(digits, blocks, per_word, base, word, out, out_first):
    width = word_width(word)
    for block in range(blocks):
        for lane in range(16):
            value = _u32(0)
            for plane in range(per_word):
                at = (block * per_word + per_word - 1 - plane) * 16 + lane
                value = _u32(_u32(value * _u32(base)) + _u32(digits[at]))
            at = out_first + (block * 16 + lane) * width
            for octet in range(width):
                out[at + octet] = _u8(value >> _u32(8 * octet))


@njit(nogil=True)
def sum_to_words(rows, first, stride, number, length, base, out, out_first):
    digits = np.empty(5 * length, np.uint16)
    sum_to_digits(rows, first, stride, number, length, digits)
    pack_blocks(digits, length // 16, 5, base, _u16(0), out, out_first)


@njit(nogil=True)
def word_at(words, at, width):
    value = _u32(0)
    for octet in range(width):
        value |= _u32(words[at + octet]) << _u32(8 * octet)
    return value


@njit(nogil=True)
def unpack_blocks(words, first, word, blocks, per_word, base, reciprocal, values):
    width = word_width(word)
    for block in range(blocks):
        for lane in range(16):
            value = word_at(words, first + (block * 16 + lane) * width, width)
            for plane in range(per_word - 1):
                quotient = _u32(value // _u32(base))
                values[(block * per_word + plane) * 16 + lane] = _i32(value - _u32(quotient * _u32(base))) - base // 2
                value = quotient
            values[(block * per_word + per_word - 1) * 16 + lane] = _i32(value) - base // 2


@njit(nogil=True)
def _decode_group(words, first, word, count, base, reciprocals, scale, x, x_first):
    width = word_width(word)
    for lane in range(16):
        value = word_at(words, first + lane * width, width)
        for plane in range(5):
            quotient = _u32(value // _u32(base)) if plane < 4 else _u32(0)
            digit = _i32(_i32(value - _u32(quotient * _u32(base))) - _i32(base // 2))
            if 16 * plane + lane < count:
                x[x_first + 16 * plane + lane] = _f32(_f32(digit) * scale)
            value = quotient


@njit(nogil=True)
def decode_groups(words, first, word, count, base, reciprocals, scale, x, x_first):
    for group in range((count + 79) // 80):
        at, left = first + 16 * word_width(word) * group, min(80, count - 80 * group)
        _decode_group(words, at, word, left, base, reciprocals, scale, x, x_first + 80 * group)


@njit(nogil=True)
def decode_streamed(words, first, word, groups, base, reciprocals, scale, x, x_first):
    decode_groups(words, first, word, 80 * groups, base, reciprocals, scale, x, x_first)
