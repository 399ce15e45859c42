# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled coding of the distances of changed elements. ``loops.py`` calls it."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.patches import formats
from gradwire.kernels.patches.positions import load, store

_u8, _u64, _i64 = np.uint8, np.uint64, np.int64
_EXACT, _FIRST_CLASS, _SYMBOLS = formats.EXACT, formats.FIRST_CLASS, formats.SYMBOLS
_FAR = 255
"""Symbol of a distance whose class is not yet known."""


@njit(nogil=True)
def top_bit(value):
    """Return the place of the highest 1 of a word, which is not zero."""
    place = _i64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if value >> _u64(step):
            value >>= _u64(step)
            place += step
    return place


@njit(nogil=True)
def _magnitude(before, after, bits, flips):
    """Return the distance of two elements without its sign, and 1 if it is negative."""
    ones, top = ~_u64(0) >> (_u64(64) - bits), bits - _u64(1)
    # Without a branch: signs of weights are a coin toss, which no CPU predicts.
    distance = after ^ ((_u64(0) - (after >> top)) & flips)
    distance = (distance - (before ^ ((_u64(0) - (before >> top)) & flips))) & ones
    negative = distance >> top
    return ((distance ^ (_u64(0) - negative)) + negative) & ones, negative


@njit(nogil=True)
def describe(before, after, symbols, flips, extra, at_bit):
    """Write the symbols of distances, and the extra bits of large ones from a place on; return their end."""
    bits, far = _u64(8 * before.itemsize), 0
    for i in range(symbols.size):
        distance, negative = _magnitude(_u64(before[i]), _u64(after[i]), bits, flips)
        near = distance < _u64(_EXACT)
        symbols[i] = _u8((distance - _u64(1)) << _u64(1) | negative) if near else _u8(_FAR)
        far += 0 if near else 1
    if far == 0:
        return at_bit
    # Extra bits are collected in a word, which is written when it is full, and at the end.
    place, used = (at_bit >> 6) << 3, _u64(at_bit & 63)
    held = load(extra, place) & ((_u64(1) << used) - _u64(1))
    for i in range(symbols.size):
        if symbols[i] != _FAR:
            continue
        distance, negative = _magnitude(_u64(before[i]), _u64(after[i]), bits, flips)
        top = top_bit(distance)
        half = (distance >> _u64(top - 1)) & _u64(1)
        symbols[i] = _u8(_FIRST_CLASS + 2 * (top - 6) + _i64(half))
        value = (distance & ((_u64(1) << _u64(top - 1)) - _u64(1))) << _u64(1) | negative
        held |= value << used
        full = used + _u64(top)
        if full >= _u64(64):
            store(extra, place, held)
            place += 8
            held = value >> (_u64(64) - used) if used else _u64(0)
            full -= _u64(64)
        used = full
    store(extra, place, held)
    return (place << 3) + _i64(used)


@njit(nogil=True)
def distances_of(symbols, distances, extra, at_bit):
    """Decode distances; return the end of their extra bits, or less than 0: the key of a fault."""
    far, bits = 0, 8 * distances.itemsize
    for i in range(symbols.size):
        near = _u64(symbols[i])
        negative = near & _u64(1)
        distances[i] = (((near >> _u64(1)) + _u64(1)) ^ (_u64(0) - negative)) + negative
        far += symbols[i] >= _FIRST_CLASS
    if far == 0:
        return at_bit
    for i in range(symbols.size):
        symbol = _i64(symbols[i])
        if symbol < _FIRST_CLASS:
            continue
        top = 6 + ((symbol - _FIRST_CLASS) >> 1)
        if symbol >= _SYMBOLS or top >= bits:
            return -4
        if top > 8 * extra.size - at_bit:
            return -5
        octet, shift = at_bit >> 3, _u64(at_bit & 7)
        value = load(extra, octet) >> shift
        if top + _i64(shift) > 64:
            value |= _u64(extra[octet + 8]) << (_u64(64) - shift)
        at_bit += top
        value &= (_u64(1) << _u64(top)) - _u64(1)
        negative = value & _u64(1)
        distance = (_u64(2 + (symbol & 1)) << _u64(top - 1)) | value >> _u64(1)
        distances[i] = (distance ^ (_u64(0) - negative)) + negative
    return at_bit
