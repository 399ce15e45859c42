# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled rANS coding, with plain bodies. Loops check bounds; *bodies* do the arithmetic on whole rows.

The type of the first argument chooses the bodies: plain ones for ``None``, explicit vectors for ``True`` (encoder) or
for one of ``Expanded``, ``Widened`` and ``Picked`` of ``rans_simd.py`` (decoder). A body may read or write 128 words
for each row: a loop passes as many rows as certainly fit, and repeats this for the rest.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.entropy import rans_simd
from gradwire.kernels.entropy import tables as rans_tables
from gradwire.kernels.numba_core.compiled import copy_into, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "2c5148b6d7221f20"


_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64


_LANES, _ROW_BYTES, _SLACK, _STATE_BYTES = 128, 256, 32, 512
_TABLE_AT, _FIXED = 8, 8 + 32 + 512
_TILE = 64  # rows decoded before escapes are filled in: 8 KiB, still in the L1 cache
_choose_frequencies = njit(nogil=True)(rans_tables.choose_frequencies)
_read_frequencies = njit(nogil=True)(rans_tables.read_frequencies)
_sample_step = njit(nogil=True)(rans_tables.sample_step)
_write_frequencies = njit(nogil=True)(rans_tables.write_frequencies)


@njit(nogil=True)
def plain_decode_rows(form, data, stop, rows, table, states, out, first):
    place, at = _u64(stop), _u64(first)
    for _ in range(rows):
        for turn in range(_LANES):
            lane = _u64(_LANES - 1 - turn)
            state = states[lane]
            entry = table[_u64(state & _u32(4095))]
            bias = (entry >> _u32(8)) & _u32(4095)
            # Numba widens products of 32 bits: cast back at each step.
            new = _u32(_u32(_u32(entry >> _u32(20)) * _u32(state >> _u32(12))) + bias)
            word = _u32(data[place - _u64(2)]) | _u32(data[place - _u64(1)]) << _u32(8)
            short = new < _u32(1 << 16)
            place -= _u64(2) if short else _u64(0)
            states[lane] = _u32(_u32(new << _u32(16)) | word) if short else new
            out[at + lane] = _u8(entry)
        at += _u64(_LANES)
    return _i64(place)


@njit(nogil=True)
def plain_encode_rows(symbols, first, rows, table, inverse, states, out, at, masks):
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
def plain_match_row(data, at, value):
    row, found = data[at : at + 64], _u64(0)
    for lane in range(64):
        found |= _u64(row[lane] == value) << _u64(lane)
    return found


@njit(nogil=True)
def plain_lowest(bits):
    place = _i64(0)
    while not bits & _u64(1):
        bits >>= _u64(1)
        place += 1
    return place


_decode_rows = either(plain_decode_rows, rans_simd.decode_rows)
_encode_rows = either(plain_encode_rows, rans_simd.encode_rows)
_lowest = either(plain_lowest, rans_simd.lowest)
_match_row = either(plain_match_row, rans_simd.match_row)


@njit(nogil=True)
def histogram(symbols, step, counts):
    """Count every ``step``-th row of 128 symbols, up to the last whole one, in ``counts`` (int64 ``[256]``)."""
    parts = np.zeros((4, 256), np.uint32)  # four, since two additions in a row to one counter wait for memory
    for row in range(0, symbols.size // _LANES, step):
        block = symbols[_LANES * row : _LANES * (row + 1)]
        for lane in range(0, _LANES, 4):
            parts[0, block[lane]] += _u32(1)
            parts[1, block[lane + 1]] += _u32(1)
            parts[2, block[lane + 2]] += _u32(1)
            parts[3, block[lane + 3]] += _u32(1)
    for symbol in range(256):
        for part in range(4):
            counts[symbol] += parts[part, symbol]


@kept(DIGEST)
def rans_encode(variant, symbols, room):
    """Write the body of ``symbols`` into ``room``; return its bytes, or -1 if it would not be shorter."""
    prefer_wide()
    rows = symbols.size // _LANES
    if room.size < _FIXED or rows == 0:
        return -1
    counts, frequencies = np.zeros(256, np.int64), np.zeros(257, np.int64)
    histogram(symbols, _sample_step(symbols.size), counts)
    _choose_frequencies(counts, frequencies)
    at = _write_frequencies(frequencies, room, _TABLE_AT)
    if at < 0:
        return -1
    _put_word(room, 4, at - _TABLE_AT - 32)

    table, inverse = np.empty(256, np.uint32), np.empty(256, np.uint64)
    start = frequencies[256]
    for symbol in range(256):
        table[symbol] = _u32(frequencies[256] | 1 << 31)
        if frequencies[symbol] > 0:
            table[symbol] = _u32(frequencies[symbol] | start << 12)
            start += frequencies[symbol]
        # For x below 2^20 f, the product with x is below 2^64 and exceeds 2^44 x / f by at most x, less than 2^44 / f.
        # So a shift by 44 gives floor(x / f).
        inverse[symbol] = _u64(1 << 44) // _u64(table[symbol] & _u32(4095)) + _u64(1)

    states, masks = np.full(_LANES, 1 << 16, np.uint32), np.empty(2 * rows, np.uint64)
    left = rows
    while left > 0:
        part = min(left, (room.size - at - _SLACK) // _ROW_BYTES)
        if part < 1:
            return -1
        left -= part
        at = _encode_rows(variant, symbols, _LANES * left, part, table, inverse, states, room, at, masks[2 * left :])

    rest = symbols.size - _LANES * rows
    if at + _STATE_BYTES + rest >= room.size:
        return -1
    for lane in range(_LANES):
        _put_word(room, at + 4 * lane, states[lane])
    at += _STATE_BYTES
    begin, stop = at, room.size - rest
    for half in range(2 * rows):
        mask = masks[half]
        while mask != _u64(0):
            if at >= stop:
                return -1
            room[at] = symbols[64 * half + _lowest(variant, mask)]
            at += 1
            mask &= mask - _u64(1)
    _put_word(room, 0, at - begin)
    copy_into(room[at : at + rest], symbols[_LANES * rows :])
    at += rest
    return at if at < room.size else -1


@kept(DIGEST)
def rans_decode(variant, body, out):
    """Invert :func:`rans_encode`; return 0, or the key in ``REFUSALS`` of a fault."""
    prefer_wide()
    rows = out.size // _LANES
    if body.size < _FIXED or rows == 0:
        return 1
    escapes, table_bytes, rest = _get_word(body, 0), _get_word(body, 4), out.size - _LANES * rows
    begin, side_stop = _TABLE_AT + 32 + table_bytes, body.size - rest
    side = side_stop - escapes
    stop = side - _STATE_BYTES
    if begin > stop or (stop - begin) % 2 != 0:
        return 3
    frequencies = np.zeros(257, np.int64)
    if not _read_frequencies(body, _TABLE_AT, begin, frequencies):
        return 2

    table = np.empty(4096, np.uint32)
    escape, slot = -1, 0
    for turn in range(257):
        symbol = 256 if turn == 0 else turn - 1
        if symbol < 256 and escape < 0 and frequencies[symbol] == 0:
            escape = symbol
        for bias in range(frequencies[symbol]):
            table[slot] = _u32(frequencies[symbol] << 20 | bias << 8 | (symbol & 255))
            slot += 1
    for slot in range(frequencies[256]):
        table[slot] |= _u32(escape)

    states = np.empty(_LANES, np.uint32)
    for lane in range(_LANES):
        states[lane] = _u32(_get_word(body, stop + 4 * lane))
    done = 0
    while done < rows:
        part = min(rows - done, _TILE, (stop - begin) // _ROW_BYTES)
        if part > 0:
            stop = _decode_rows(variant, variant, body, stop, part, table, states, out, _LANES * done)
        else:
            part = 1
            stop = _decode_last_row(body, begin, stop, table, states, out, _LANES * done)
            if stop < 0:
                return 4
        if escape >= 0:
            for half in range(2 * done, 2 * (done + part)):
                mask = _match_row(variant, out, 64 * half, escape)
                while mask != _u64(0):
                    if side >= side_stop:
                        return 4
                    out[64 * half + _lowest(variant, mask)] = body[side]
                    side += 1
                    mask &= mask - _u64(1)
        done += part
    copy_into(out[_LANES * rows :], body[side_stop:])
    for lane in range(_LANES):
        if states[lane] != _u32(1 << 16):
            return 4
    return 0 if stop == begin and side == side_stop else 4


@njit(nogil=True)
def _decode_last_row(body, begin, stop, table, states, out, first):
    """Decode one row, checking before each word that it exists; return the end of the unread words, or -1."""
    for turn in range(_LANES):
        lane = _LANES - 1 - turn
        entry, state = np.int64(table[states[lane] & _u32(4095)]), np.int64(states[lane])
        state = (entry >> 20) * (state >> 12) + ((entry >> 8) & 4095)
        if state < 1 << 16:
            if stop - 2 < begin:
                return -1
            stop -= 2
            state = state << 16 | np.int64(body[stop]) | np.int64(body[stop + 1]) << 8
        states[lane] = _u32(state)
        out[first + lane] = _u8(entry & 255)
    return stop


@njit(nogil=True)
def _get_word(data, at):
    """Read 32 bits."""
    value = np.int64(0)
    for octet in range(4):
        value |= np.int64(data[at + octet]) << (8 * octet)
    return value


@njit(nogil=True)
def _put_word(out, at, value):
    """Write 32 bits."""
    for octet in range(4):
        out[at + octet] = _u8(np.int64(value) >> (8 * octet) & 255)
