# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies, one for each in ``rans_vector.py`` and with the same signature and promises."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.coders.checksum import MULTIPLIER

__all__ = ["check_rows", "decode_rows", "encode_rows", "lowest", "match_row"]

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_LANES = 128
_FACTOR, _HALF = _u64(MULTIPLIER), _u64(32)


@njit(nogil=True)
def decode_rows(data, stop, rows, table, states, out, first):
    for row in range(rows):
        target = out[first + _LANES * row : first + _LANES * (row + 1)]
        for turn in range(_LANES):
            lane = _LANES - 1 - turn
            entry, state = _i64(table[states[lane] & _u32(4095)]), _i64(states[lane])
            state = (entry >> 20) * (state >> 12) + ((entry >> 8) & 4095)
            # No branch, which would be foretold wrongly one time in four.
            short = _i64(state < 1 << 16)
            words = data[stop - 2 : stop]
            word = _i64(words[0]) | _i64(words[1]) << 8
            stop -= 2 * short
            states[lane] = _u32(state << 16 * short | word & -short)
            target[lane] = _u8(entry & 255)
    return stop


@njit(nogil=True)
def encode_rows(symbols, first, rows, table, states, out, at, masks):
    for turn in range(rows):
        row = rows - 1 - turn
        source = symbols[first + _LANES * row : first + _LANES * (row + 1)]
        masks[2 * row : 2 * row + 2] = _u64(0)
        for lane in range(_LANES):
            state, entry = _i64(states[lane]), _i64(table[source[lane]])
            f, start = entry & 4095, (entry >> 12) & 4095
            masks[2 * row + (lane >> 6)] |= _u64(entry >> 31) << _u64(lane & 63)
            full = _i64(state >= f << 20)
            words = out[at : at + 2]
            words[0], words[1] = _u8(state & 255), _u8(state >> 8 & 255)
            at += 2 * full
            state >>= 16 * full
            quotient = _i64(_u32(state) // _u32(f))
            states[lane] = _u32(state + start + quotient * (4096 - f))
    return at


@njit(nogil=True)
def check_rows(data, rows, sums):
    words = data[: 128 * rows]
    for row in range(rows):
        for lane in range(16):
            at = 128 * row + 8 * lane
            word = _u64(0)
            for octet in range(8):
                word |= _u64(words[at + octet]) << _u64(8 * octet)
            mixed = _u64((sums[lane] ^ word) * _FACTOR)
            sums[lane] = mixed ^ (mixed >> _HALF)


@njit(nogil=True)
def match_row(data, at, value):
    row, found = data[at : at + 64], _u64(0)
    for lane in range(64):
        found |= _u64(row[lane] == value) << _u64(lane)
    return found


@njit(nogil=True)
def lowest(bits):
    place = _i64(0)
    while not bits & _u64(1):
        bits >>= _u64(1)
        place += 1
    return place
