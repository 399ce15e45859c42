# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of powers of two, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.philox_scalar import five_words

__all__ = ["natural_groups", "natural_sums"]

_u8, _u32, _f32 = np.uint8, np.uint32, np.float32


@njit(nogil=True)
def natural_groups(x, first, count, noise, out, exponents, signs):
    for group in range((count + 79) // 80):
        for octet in range(10):
            out[signs + 10 * group + octet] = _u8(0)
        values = x[first + 80 * group : first + min(80 * group + 80, count)].view(_u32)
        for lane in range(16):
            for plane, word in enumerate(five_words(noise, 16 * group + lane)):
                e = 16 * plane + lane
                raw = values[e] if e < values.size else _u32(0)
                bits = _u32(raw & _u32(0x7FFFFFFF))
                rounded = min(_u32(_u32(bits + _u32(word >> np.uint64(9))) >> _u32(23)), _u32(254))
                out[exponents + 80 * group + e] = _u8(255) if bits >= _u32(0x7F800000) else _u8(rounded)
                out[signs + 10 * group + e // 8] |= _u8(_u32(raw >> _u32(31)) << _u32(e % 8))


@njit(nogil=True)
def natural_sums(rows, exponents, signs, count, weight, x, first, accumulate):
    one = np.empty(1, np.uint32)
    value = one.view(np.float32)
    for e in range(count):
        total = _f32(0)
        for row in range(rows.number):
            exponent = _u32(rows.octets[row * rows.stride + exponents + e])
            octet = _u32(rows.octets[row * rows.stride + signs + e // 8])
            one[0] = _u32(_u32(exponent << _u32(23)) | _u32(_u32(octet >> _u32(e % 8)) << _u32(31)))
            part = _f32(np.inf) if exponent == _u32(255) else _f32(value[0] * weight)
            total = part if row == 0 else _f32(total + part)
        x[first + e] = _f32(x[first + e] + total) if accumulate else total
