# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of moments, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["block_maximum", "block_sums"]

_i32, _i64 = np.int32, np.int64


@njit(nogil=True)
def block_maximum(x, first, count):
    bits = x[first : first + count].view(_i32)
    largest = _i32(0)
    for i in range(bits.size):
        largest = max(largest, _i32(bits[i] & _i32(0x7FFFFFFF)))
    return largest


@njit(nogil=True)
def block_sums(x, first, count, factor):
    values = x[first : first + count]
    total, squares = _i64(0), _i64(0)
    for i in range(values.size):
        q = _i64(_i32(values[i] * factor))
        total += q
        squares += q * q
    return total, squares
