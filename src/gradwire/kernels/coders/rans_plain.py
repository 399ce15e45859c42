# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies, one for each in ``rans_vector.py`` and with the same signature and promises."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.coders.checksum import MULTIPLIER

__all__ = ["check_rows", "decode_rows", "encode_rows", "lowest", "match_row"]

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_LANES = 64
_FACTOR, _LOW, _HALF = _u64(MULTIPLIER), _u64(0xFFFFFFFF), _u64(32)


@njit(nogil=True)
def decode_rows(data, stop, rows, table, states, out, first):
    for row in range(rows):
        target = out[first + _LANES * row : first + _LANES * (row + 1)]
        for turn in range(_LANES):
            lane = _LANES - 1 - turn
            state = states[lane]
            entry = table[state & _u32(4095)]
            state = _u32(_u32(_u32(entry >> _u32(20)) * _u32(state >> _u32(12))) + _u32((entry >> _u32(8)) & _u32(4095)))
            if state < _u32(1 << 16):
                stop -= 2
                state = _u32(_u32(state << _u32(16)) | _u32(data[stop]) | _u32(_u32(data[stop + 1]) << _u32(8)))
            states[lane] = state
            target[lane] = _u8(entry)
    return stop


@njit(nogil=True)
def encode_rows(symbols, first, rows, table, states, out, at, masks):
    for turn in range(rows):
        row = rows - 1 - turn
        source = symbols[first + _LANES * row : first + _LANES * (row + 1)]
        flags = _u64(0)
        for lane in range(_LANES):
            state, entry = states[lane], table[source[lane]]
            f = _u32(entry & _u32(4095))
            flags |= _u64(_u64(entry >> _u32(31)) << _u64(lane))
            if state >= _u32(f << _u32(20)):
                out[at] = _u8(state)
                out[at + 1] = _u8(state >> _u32(8))
                at += 2
                state = _u32(state >> _u32(16))
            quotient = _u32(state // f)
            start = _u32((entry >> _u32(12)) & _u32(4095))
            states[lane] = _u32(state + start + _u32(quotient * _u32(_u32(4096) - f)))
        masks[row] = flags
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
            mixed = sums[lane] ^ word
            sums[lane] = _u64((mixed & _LOW) * _FACTOR + (mixed >> _HALF))


@njit(nogil=True)
def match_row(data, at, value):
    row, found = data[at : at + _LANES], _u64(0)
    for lane in range(_LANES):
        found |= _u64(row[lane] == value) << _u64(lane)
    return found


@njit(nogil=True)
def lowest(bits):
    place = _i64(0)
    while not bits & _u64(1):
        bits >>= _u64(1)
        place += 1
    return place
