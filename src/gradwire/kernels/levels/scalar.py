# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies for levels, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.ternary.scalar import five_words

__all__ = ["quantise_even", "quantise_steps", "write_levels"]

_f32, _i32, _u16 = np.float32, np.int32, np.uint16
_UNIT = _f32(1 << 24)


@njit(nogil=True)
def _count_even(scaled, uniform, steps):
    top = _f32(steps)
    t = _f32(scaled * _f32(top * _f32(1 / (1 << 24))))
    if not t < top:
        t = top
    low = _i32(t)
    rest = _f32(_f32(t - _f32(low)) * _UNIT)
    return low + _i32(uniform < rest)


@njit(nogil=True)
def _count_steps(scaled, uniform, edge, gap, steps):
    count = _i32(0)
    for k in range(steps):
        count += _i32(_f32(_f32(uniform * gap[k]) + edge[k]) < scaled)
    return count


@njit(nogil=True)
def _quantise(
    even, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive, negative,
    signed, key0, key1, round, stream, block, digits, at,
):  # fmt: skip
    factors = np.empty(5, np.float32)
    for group in range((count + 79) // 80):
        for plane in range(5):
            factors[plane] = inverse[scale_at]
            left -= 16
            if left <= 0:
                left = block_size
                if scale_at < scale_last:
                    scale_at += 1
        for lane in range(16):
            words = five_words(block + 16 * group + lane, key0, key1, round, stream)
            for plane, word in enumerate(words):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _f32(_i32(word >> np.uint64(8)))
                scaled = _f32(value * factors[plane])
                if not signed:
                    scaled = abs(scaled)
                if even:
                    c = _count_even(scaled, uniform, steps)
                else:
                    c = _count_steps(scaled, uniform, edge, gap, steps)
                digits[at + e] = _u16(negative - c if np.signbit(value) and not signed else positive + c)


@njit(nogil=True)
def quantise_even(
    x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive, negative, signed,
    key0, key1, round, stream, block, digits, at,
):  # fmt: skip
    _quantise(
        True, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive, negative,
        signed, key0, key1, round, stream, block, digits, at,
    )  # fmt: skip


@njit(nogil=True)
def quantise_steps(
    x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive, negative, signed,
    key0, key1, round, stream, block, digits, at,
):  # fmt: skip
    _quantise(
        False, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive, negative,
        signed, key0, key1, round, stream, block, digits, at,
    )  # fmt: skip


@njit(nogil=True)
def _write_run(floats, first, count, values, even, factor, x, at, accumulate):
    digits, target = floats[first : first + count], x[at : at + count]
    if not np.isfinite(factor):
        digits[:] = factor
    elif even:
        middle = _f32(values.size // 2)
        # Divided as an array: Numba looks for a zero before each division of numbers.
        digits[:] = np.divide(digits - middle, middle) * factor
    else:
        for i in range(digits.size):
            digits[i] = _f32(values[_i32(digits[i])] * factor)
    if accumulate:
        target += digits
    else:
        target[:] = digits


@njit(nogil=True)
def write_levels(
    floats, first, count, values, even, scale, block, rest, block_size, x, at, accumulate, streamed
):  # fmt: skip
    done = 0
    while done < count:
        run = min(count - done, rest)
        _write_run(floats, first + done, run, values, even, scale[block], x, at + done, accumulate)
        done, block, rest = done + run, block + 1, block_size
