# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies for lattices, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.ternary.scalar import five_words

__all__ = ["lattice_colours", "lattice_sums"]

_f32, _i32, _u16, _u32 = np.float32, np.int32, np.uint16, np.uint32
_STEP = _f32(2.0**-24)


@njit(nogil=True)
def _scaled(value, inverse, uniform, shift):
    theta = _f32(_f32(_f32(_i32((uniform + shift) & _i32(0xFFFFFF))) * _STEP) - _f32(0.5))
    t = _f32(_f32(value * inverse) - theta)
    if not abs(t) < _f32(1 << 23):
        t = _f32(0)
    return t, theta


@njit(nogil=True)
def lattice_colours(x, first, count, inverse, bits, shift, key0, key1, round, stream, block, digits, at, checks):
    mask = _i32((1 << bits) - 1)
    for group in range((count + 79) // 80):
        for lane in range(16):
            words = five_words(block + 16 * group + lane, key0, key1, round, stream)
            for plane, word in enumerate(words):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                t, _ = _scaled(value, inverse, uniform, shift)
                k = _i32(np.rint(t))
                digits[at + e] = _u16(k & mask)
                turn = _i32(k >> bits)
                checks[lane] = _i32(checks[lane] + _i32(turn * _i32(_i32(uniform * _i32(2)) + _i32(1))))


@njit(nogil=True)
def lattice_sums(
    own, x, first, count, inverse, scale, accumulate, bits, shifts, number, colours, distance, at, key0, key1, round,
    stream, block, checks,
):  # fmt: skip
    part = _f32(1.0 / (1 << bits))
    for group in range((count + 79) // 80):
        for lane in range(16):
            words = five_words(block + 16 * group + lane, key0, key1, round, stream)
            for plane, word in enumerate(words):
                e = 80 * group + 16 * plane + lane
                value = own[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                total = _f32(0)
                for row in range(number):
                    t, theta = _scaled(value, inverse, uniform, shifts[row])
                    colour = _i32(colours[row * distance + at + e])
                    turn = _i32(np.rint(_f32(_f32(t - _f32(colour)) * part)))
                    i = 16 * row + lane
                    checks[i] = _i32(checks[i] + _i32(turn * _i32(_i32(uniform * _i32(2)) + _i32(1))))
                    k = _i32(colour + _i32(turn << bits))
                    found = _f32(_f32(_f32(k) + theta) * scale)
                    total = found if row == 0 else _f32(total + found)
                if e < count:
                    x[first + e] = _f32(x[first + e] + total) if accumulate else total
