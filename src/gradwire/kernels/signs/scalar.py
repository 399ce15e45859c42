# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of signs, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["block_sign_sums", "decode_rows", "sign_bytes"]

_TILE = 2048

_i32, _i64, _u8, _f32 = np.int32, np.int64, np.uint8, np.float32


@njit(nogil=True)
def block_sign_sums(x, first, count, factor):
    values = x[first : first + count]
    total, size, positive = _i64(0), _i64(0), _i64(0)
    for i in range(values.size):
        q = _i64(_i32(values[i] * factor))
        total += q
        size += abs(q)
        positive += _i64(values[i] >= _f32(0))
    return total, size, positive


@njit(nogil=True)
def sign_bytes(x, first, count, out, at):
    values = x[first : first + count]
    whole = count // 8
    target = out[at : at + (count + 7) // 8]
    for i in range(whole):
        eight = values[8 * i : 8 * i + 8]
        octet = _u8(0)
        for k in range(8):
            octet |= _u8(_u8(eight[k] >= _f32(0)) << _u8(k))
        target[i] = octet
    if count % 8:
        octet = _u8(0)
        for k in range(count - 8 * whole):
            octet |= _u8(_u8(values[8 * whole + k] >= _f32(0)) << _u8(k))
        target[whole] = octet


@njit(nogil=True)
def _decode_row(octets, bit, high, low, target, add):
    for i in range(target.size):
        here = bit + i
        value = high if octets[here >> 3] >> _u8(here & 7) & _u8(1) else low
        target[i] = target[i] + value if add else value


@njit(nogil=True)
def decode_rows(rows, bit, count, values, run, x, at, accumulate, streamed):
    # A tile at a time, so that it stays within the nearest cache while all rows are added to it.
    for first in range(0, count, _TILE):
        target = x[at + first : at + min(first + _TILE, count)]
        for row in range(rows.number):
            place = 8 * row * rows.stride + bit + first
            high, low = values.above[row, run], values.below[row, run]
            _decode_row(rows.octets, place, high, low, target, accumulate or row > 0)
