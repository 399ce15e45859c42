# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of levels, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.philox_scalar import five_words

__all__ = ["quantise_even", "quantise_sought", "quantise_steps", "write_levels"]

_f32, _i32, _u16 = np.float32, np.int32, np.uint16
_UNIT = _f32(1 << 24)


@njit(nogil=True)
def _count_even(scaled, uniform, grid):
    top = _f32(grid.steps)
    t = _f32(scaled * _f32(top * _f32(1 / (1 << 24))))
    if not t < top:
        t = top
    low = _i32(t)
    rest = _f32(_f32(t - _f32(low)) * _UNIT)
    return low + _i32(uniform < rest)


@njit(nogil=True)
def _count_steps(scaled, uniform, grid):
    count = _i32(0)
    for k in range(grid.steps):
        count += _i32(_f32(_f32(uniform * grid.gap[k]) + grid.edge[k]) < scaled)
    return count


@njit(nogil=True)
def _count_sought(scaled, uniform, grid):
    cells = grid.cells
    t = _f32(_f32(scaled * cells.per_unit) + cells.shift)
    if not t > 0:
        t = _f32(0)
    if not t < cells.last:
        t = _f32(cells.last)
    step = cells.step[_i32(t)]
    step += _i32(scaled > cells.border[_i32(t)])
    return _i32(step + _i32(_f32(_f32(uniform * grid.gap[step]) + grid.edge[step]) < scaled))


@njit(nogil=True)
def _quantise(count_of, x, first, count, scales, grid, noise, digits, at):
    factors = np.empty(5, np.float32)
    block, left = scales.block, scales.left
    for group in range((count + 79) // 80):
        for plane in range(5):
            factors[plane] = scales.values[block]
            left -= 16
            if left <= 0:
                left = scales.size
                if block < scales.last:
                    block += 1
        for lane in range(16):
            for plane, word in enumerate(five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _f32(_i32(word >> np.uint64(8)))
                scaled = _f32(value * factors[plane])
                if not grid.signed:
                    scaled = abs(scaled)
                c = count_of(scaled, uniform, grid)
                minus = np.signbit(value) and not grid.signed
                digits[at + e] = _u16(grid.negative - c if minus else grid.positive + c)


@njit(nogil=True)
def quantise_even(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_even, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def quantise_steps(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_steps, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def quantise_sought(x, first, count, scales, grid, noise, digits, at):
    _quantise(_count_sought, x, first, count, scales, grid, noise, digits, at)


@njit(nogil=True)
def _write_run(digits, grid, factor, target, accumulate):
    values = grid.values
    if not np.isfinite(factor):
        digits[:] = factor
    elif grid.uniform:
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
def write_levels(floats, first, count, grid, scales, x, at, accumulate, streamed):
    done, block, rest = 0, scales.block, scales.left
    while done < count:
        run = min(count - done, rest)
        digits, target = floats[first + done : first + done + run], x[at + done : at + done + run]
        _write_run(digits, grid, scales.values[block], target, accumulate)
        done, block, rest = done + run, block + 1, scales.size
