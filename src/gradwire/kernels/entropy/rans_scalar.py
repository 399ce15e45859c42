# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies of the rANS coder, one for each in ``rans_simd.py``, with the same signature and promises.

Lanes do not depend on one another but by the place of the next word, so that a CPU overlaps the table lookups of many.
Indices are unsigned: Numba looks at others for a sign. No branch depends on a state, since one time in four it would
be foretold wrongly.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["decode_rows", "encode_rows", "lowest", "match_row"]

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_LANES = 128


@njit(nogil=True)
def decode_rows(form, data, stop, rows, table, states, out, first):
    place, at = _u64(stop), _u64(first)
    for _ in range(rows):
        for turn in range(_LANES):
            lane = _u64(_LANES - 1 - turn)
            state = states[lane]
            entry = table[_u64(state & _u32(4095))]
            bias = (entry >> _u32(8)) & _u32(4095)
            # Numba widens products of 32 bits: cast back, so that the compiler need not.
            new = _u32(_u32(_u32(entry >> _u32(20)) * _u32(state >> _u32(12))) + bias)
            word = _u32(data[place - _u64(2)]) | _u32(data[place - _u64(1)]) << _u32(8)
            short = new < _u32(1 << 16)
            place -= _u64(2) if short else _u64(0)
            states[lane] = _u32(_u32(new << _u32(16)) | word) if short else new
            out[at + lane] = _u8(entry)
        at += _u64(_LANES)
    return _i64(place)


@njit(nogil=True)
def encode_rows(symbols, first, rows, table, inverse, states, out, at, masks):
    place, begin = _u64(at), _u64(first)
    for turn in range(rows):
        row = _u64(rows - 1 - turn)
        for half in range(2):
            rare = _u64(0)
            for bit in range(64):
                lane = _u64(64 * half + bit)
                symbol = symbols[begin + _u64(_LANES) * row + lane]
                entry, state = table[symbol], _u64(states[lane])
                f, start = _u64(entry & _u32(4095)), _u64((entry >> _u32(12)) & _u32(4095))
                rare |= _u64(entry >> _u32(31)) << _u64(bit)
                full = state >= f << _u64(20)
                out[place], out[place + _u64(1)] = _u8(state), _u8(state >> _u64(8))
                place += _u64(2) if full else _u64(0)
                state = state >> _u64(16) if full else state
                quotient = (state * inverse[symbol]) >> _u64(44)
                states[lane] = _u32(state + start + quotient * (_u64(4096) - f))
            masks[_u64(2) * row + _u64(half)] = rare
    return _i64(place)


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
