# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar bodies of rotations, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.philox_scalar import five_words

__all__ = ["nearest_digits", "nearest_pairs", "rotate_block", "rotate_block_back"]

_u32, _f32 = np.uint32, np.float32


@njit(nogil=True)
def _flip(bits, start, noise):
    """Change the signs of a block whose first element is number ``start`` of its parameter."""
    runs = min(2048, bits.size)
    for span in range(0, bits.size, runs):
        low = (start + span) % 2048
        for lane in range(16):
            words = five_words(noise, (start + span) // 2048 * 16 + lane)
            for e in range(lane, runs, 16):
                word = words[(low + e) // 512]
                sign = _u32(_u32(word >> np.uint64((low + e) // 16 % 32)) << _u32(31))
                bits[span + e] = _u32(bits[span + e] ^ sign)


@njit(nogil=True)
def _step(values, h):
    for first in range(0, values.size, 2 * h):
        low, high = values[first : first + h], values[first + h : first + 2 * h]
        for j in range(h):
            u, v = low[j], high[j]
            low[j], high[j] = _f32(u + v), _f32(u - v)


@njit(nogil=True)
def rotate_block(x, at, numel, start, factor, noise, z, place, size, room, streamed):
    coordinates = z[place : place + size]
    for e in range(size):
        coordinates[e] = _f32(x[at + e] * factor) if e < numel else _f32(0)
    _flip(coordinates.view(_u32), start, noise)
    h = 1
    while h < size:
        _step(coordinates, h)
        h *= 2


@njit(nogil=True)
def rotate_block_back(z, place, size, start, factor, noise, x, at, numel, accumulate, room, streamed):
    coordinates = z[place : place + size]
    h = size // 2
    while h:
        _step(coordinates, h)
        h //= 2
    for e in range(size):
        coordinates[e] = _f32(coordinates[e] * factor)
    _flip(coordinates.view(_u32), start, noise)
    for e in range(numel):
        x[at + e] = _f32(x[at + e] + coordinates[e]) if accumulate else coordinates[e]


@njit(nogil=True)
def nearest_digits(z, place, size, grid, digits, at):
    sums = np.zeros(16, np.float32)
    bits = z[place : place + size].view(_u32)
    for first in range(0, size, 16):
        for lane in range(16):
            magnitude = abs(z[place + first + lane])
            count = 0
            for edge in grid.edge:
                count += _f32(magnitude * _f32(16777216.0)) > edge
            sums[lane] = _f32(sums[lane] + _f32(magnitude * grid.values[grid.positive + count]))
            below = bits[first + lane] >> _u32(31)
            digits[at + first + lane] = grid.negative - count if below else grid.positive + count
    half = 8
    while half:
        for lane in range(half):
            sums[lane] = _f32(sums[lane] + sums[lane + half])
        half //= 2
    return sums[0]


@njit(nogil=True)
def nearest_pairs(z, place, size, grid, base, out, at):
    digits = np.empty(size, np.uint16)
    kept = nearest_digits(z, place, size, grid, digits, 0)
    for word in range(size // 2):
        first = word // 16 * 32 + word % 16
        out[at + word] = digits[first] + base * digits[first + 16]
    return kept
