# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled Elias codes of levels, bit by bit. Bit ``i`` of a stream is bit ``i mod 8`` of its byte ``floor(i / 8)``."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import kept

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "148e7126ae232734"


@njit(nogil=True)
def _digits(value):
    """Count the binary digits of a positive integer."""
    digits = 0
    while value > 0:
        value >>= 1
        digits += 1
    return digits


@njit(nogil=True)
def _omega_bits(value):
    """Count the bits of the code of a positive integer."""
    bits = 1
    while value > 1:
        digits = _digits(value)
        bits += digits
        value = digits - 1
    return bits


@kept(DIGEST)
def count_bits(levels, sparse):
    """Count the bits of the codes, and the levels that have a code."""
    bits, coded, before = 0, 0, -1
    for index in range(levels.size):
        magnitude = abs(np.int64(levels[index]))
        if sparse:
            if magnitude > 0:
                bits += _omega_bits(index - before) + 1 + _omega_bits(magnitude)
                before = index
                coded += 1
        else:
            bits += _omega_bits(magnitude + 1) + (1 if magnitude > 0 else 0)
            coded += 1
    return bits, coded


@njit(nogil=True)
def _put(out, at, value, bits):
    """Write the lower ``bits`` of a value, upper bit first, over zeros; return the place after the last bit."""
    for place in range(bits - 1, -1, -1):
        if (value >> place) & 1:
            out[at >> 3] |= np.uint8(1 << (at & 7))
        at += 1
    return at


@njit(nogil=True)
def _put_omega(out, at, value):
    """Write the code of a positive integer below 2^33."""
    code, bits = np.int64(0), 1
    while value > 1:
        digits = _digits(value)
        code |= np.int64(value) << bits
        bits += digits
        value = digits - 1
    return _put(out, at, code, bits)


@kept(DIGEST)
def write_levels(levels, sparse, out):
    """Write the codes to ``out``, which is zero and as long as :func:`count_bits` says."""
    at, before = 0, -1
    for index in range(levels.size):
        level = np.int64(levels[index])
        sign = 1 if level < 0 else 0
        if sparse:
            if level != 0:
                at = _put_omega(out, at, np.int64(index - before))
                at = _put(out, at, sign, 1)
                at = _put_omega(out, at, abs(level))
                before = index
        else:
            at = _put_omega(out, at, abs(level) + 1)
            if level != 0:
                at = _put(out, at, sign, 1)


@njit(nogil=True)
def _get_omega(data, at, stop):
    """Read a code from bit ``at`` on; return the integer, or 0 if there is none, and the place after the code."""
    value = np.int64(1)
    while at < stop:
        if (data[at >> 3] >> (at & 7)) & 1 == 0:
            return value, at + 1
        digits = value + 1
        if digits > 33 or at + digits > stop:
            break
        value = np.int64(0)
        for _ in range(digits):
            value = value << 1 | np.int64((data[at >> 3] >> (at & 7)) & 1)
            at += 1
    return np.int64(0), stop


@kept(DIGEST)
def read_levels(data, sparse, coded, out):
    """Invert :func:`write_levels` for ``coded`` levels; return whether codes are valid and end where ``data`` ends."""
    at, stop, index = 0, 8 * data.size, np.int64(-1)
    if sparse:
        out[:] = 0
    for _ in range(coded):
        gap, sign = np.int64(1), np.int64(0)
        if sparse:
            gap, at = _get_omega(data, at, stop)
            if gap < 1 or gap > out.size - 1 - index or at >= stop:
                return False
            sign = np.int64((data[at >> 3] >> (at & 7)) & 1)
            magnitude, at = _get_omega(data, at + 1, stop)
            if magnitude < 1:
                return False
        else:
            magnitude, at = _get_omega(data, at, stop)
            if magnitude < 1:
                return False
            magnitude -= 1
            if magnitude > 0:
                if at >= stop:
                    return False
                sign = np.int64((data[at >> 3] >> (at & 7)) & 1)
                at += 1
        if magnitude > 2**31 - 1 + sign:
            return False
        index += gap
        out[index] = -magnitude if sign else magnitude
    if stop - at > 7:
        return False
    while at < stop:
        if (data[at >> 3] >> (at & 7)) & 1:
            return False
        at += 1
    return True
