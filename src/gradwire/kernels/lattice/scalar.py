# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of lattices, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.philox_scalar import five_words

__all__ = ["lattice_colours", "lattice_sums"]

_f32, _i32, _u16 = np.float32, np.int32, np.uint16
_STEP = _f32(2.0**-24)


@njit(nogil=True)
def _scaled(value, inverse, uniform, shift):
    theta = _f32(_f32(_f32(_i32((uniform + shift) & _i32(0xFFFFFF))) * _STEP) - _f32(0.5))
    t = _f32(_f32(value * inverse) - theta)
    if not abs(t) < _f32(1 << 23):
        t = _f32(0)
    return t, theta


@njit(nogil=True)
def _turned(check, turn, uniform):
    """Return a check with a turn added."""
    return _i32(check + _i32(turn * _i32(_i32(uniform * _i32(2)) + _i32(1))))


@njit(nogil=True)
def lattice_colours(x, first, count, inverse, bits, shift, noise, digits, at, checks):
    mask = _i32((1 << bits) - 1)
    for group in range((count + 79) // 80):
        for lane in range(16):
            for plane, word in enumerate(five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                t, _ = _scaled(value, inverse, uniform, shift)
                k = _i32(np.rint(t))
                digits[at + e] = _u16(k & mask)
                checks[lane] = _turned(checks[lane], _i32(k >> bits), uniform)


@njit(nogil=True)
def lattice_sums(own, x, first, count, side, colours, at, noise, checks, accumulate):
    part = _f32(1.0 / (1 << colours.bits))
    for group in range((count + 79) // 80):
        for lane in range(16):
            for plane, word in enumerate(five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = own[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                total = _f32(0)
                for row in range(colours.shifts.size):
                    t, theta = _scaled(value, side.inverse, uniform, colours.shifts[row])
                    colour = _i32(colours.digits[row * colours.distance + at + e])
                    turn = _i32(np.rint(_f32(_f32(t - _f32(colour)) * part)))
                    checks[16 * row + lane] = _turned(checks[16 * row + lane], turn, uniform)
                    k = _i32(colour + _i32(turn << colours.bits))
                    found = _f32(_f32(_f32(k) + theta) * side.scale)
                    total = found if row == 0 else _f32(total + found)
                if e < count:
                    x[first + e] = _f32(x[first + e] + total) if accumulate else total
