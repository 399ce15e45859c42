# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled Huffman coding: four streams side by side, so that one's waiting is the others' time.

Every fast loop runs a number of turns that surely fit, then asks again; a slow one finishes each stream. No vectors:
one source serves all CPUs, and LLVM makes one load or store of eight neighbouring bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.coders import lengths as huffman

__all__ = ["huffman_decode", "huffman_encode"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "bd557276218a1405"

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_AT = huffman.LENGTH_BYTES + 4 * huffman.STREAMS
_PAD = 8
_TURN = 5  # codes that fit into 64 bits with 7 bits before them
_TURN_BITS = _TURN * huffman.MAX_LENGTH
_MASK = _u64((1 << huffman.MAX_LENGTH) - 1)
_MAX_LENGTH, _STREAMS = huffman.MAX_LENGTH, huffman.STREAMS

_assign_codes = njit(nogil=True)(huffman.assign_codes)
_choose_lengths = njit(nogil=True)(huffman.choose_lengths)
_read_lengths = njit(nogil=True)(huffman.read_lengths)
_write_lengths = njit(nogil=True)(huffman.write_lengths)


@njit(nogil=True)
def _load(data, at):
    """Read 64 bits; unsigned places, since numba looks at others for a sign."""
    place = _u64(at)
    return (
        _u64(data[place]) | _u64(data[place + _u64(1)]) << _u64(8) | _u64(data[place + _u64(2)]) << _u64(16)
        | _u64(data[place + _u64(3)]) << _u64(24) | _u64(data[place + _u64(4)]) << _u64(32)
        | _u64(data[place + _u64(5)]) << _u64(40) | _u64(data[place + _u64(6)]) << _u64(48)
        | _u64(data[place + _u64(7)]) << _u64(56)
    )  # fmt: skip


@njit(nogil=True)
def _store(out, at, value):
    """Write 64 bits."""
    place = _u64(at)
    out[place] = _u8(value)
    out[place + _u64(1)] = _u8(value >> _u64(8))
    out[place + _u64(2)] = _u8(value >> _u64(16))
    out[place + _u64(3)] = _u8(value >> _u64(24))
    out[place + _u64(4)] = _u8(value >> _u64(32))
    out[place + _u64(5)] = _u8(value >> _u64(40))
    out[place + _u64(6)] = _u8(value >> _u64(48))
    out[place + _u64(7)] = _u8(value >> _u64(56))


@njit(nogil=True)
def _append(symbols, at, table, out, place, bits, used):
    """Append the codes of five symbols to ``used`` (below 8) waiting ``bits``; store whole bytes."""
    for step in range(_TURN):
        entry = table[symbols[_u64(at + step)]]
        bits |= (entry & _u64(0xFFFF)) << used
        used += entry >> _u64(16)
    _store(out, place, bits)
    return place + _i64(used >> _u64(3)), bits >> (used & _u64(56)), used & _u64(7)


@njit(nogil=True)
def _append_rest(symbols, at, stop, table, out, place, end, bits, used):
    """Append all that is left of a stream that ends at ``end``."""
    while at + _TURN <= stop and place + 8 <= end:
        place, bits, used = _append(symbols, at, table, out, place, bits, used)
        at += _TURN
    while at < stop:
        entry = table[symbols[at]]
        bits |= (entry & _u64(0xFFFF)) << used
        used += entry >> _u64(16)
        at += 1
        while used >= _u64(8):
            out[place] = _u8(bits & _u64(255))
            place += 1
            bits >>= _u64(8)
            used -= _u64(8)
    if used > _u64(0):
        out[place] = _u8(bits & _u64(255))


@njit(nogil=True, cache=True)
def huffman_encode(symbols, room):
    """Write the body of ``symbols`` into ``room``; return its bytes, or -1 where it would not be shorter."""
    each = symbols.size // _STREAMS
    parts = np.zeros((_STREAMS, 256), np.uint32)
    for at in range(each):
        parts[0, symbols[at]] += _u32(1)
        parts[1, symbols[at + each]] += _u32(1)
        parts[2, symbols[at + 2 * each]] += _u32(1)
        parts[3, symbols[at + 3 * each]] += _u32(1)
    counts, different = np.zeros(256, np.int64), 0
    for symbol in range(256):
        for part in range(_STREAMS):
            counts[symbol] += parts[part, symbol]
        different += 1 if counts[symbol] > 0 else 0
    if different < 2:
        return -1
    size, codes = np.zeros(256, np.int64), np.zeros(256, np.int64)
    weights, leaves = np.empty((2, 512), np.int64), np.empty((_MAX_LENGTH, 512), np.uint8)
    _choose_lengths(counts, size, np.empty(256, np.int64), weights, leaves)
    _assign_codes(size, codes)

    # The counts of each quarter say beforehand where its stream ends.
    ends, at = np.empty(_STREAMS, np.int64), _AT
    rest = symbols.size - _STREAMS * each
    lengths = np.empty(_STREAMS, np.int64)
    for part in range(_STREAMS):
        bits = 0
        for symbol in range(256):
            bits += _i64(parts[part, symbol]) * size[symbol]
        lengths[part] = (bits + 7) >> 3
        at += lengths[part]
        ends[part] = at
    total = at + _PAD + rest
    if total >= room.size:
        return -1
    _write_lengths(size, room, 0)
    for part in range(_STREAMS):
        for octet in range(4):
            room[huffman.LENGTH_BYTES + 4 * part + octet] = _u8(lengths[part] >> (8 * octet) & 255)
    room[at : at + _PAD] = 0
    room[at + _PAD : total] = symbols[_STREAMS * each :]

    table = np.empty(256, np.uint64)
    for symbol in range(256):
        table[symbol] = _u64(codes[symbol] | size[symbol] << 16)
    p0, p1, p2, p3 = _i64(_AT), ends[0], ends[1], ends[2]
    b0, b1, b2, b3 = _u64(0), _u64(0), _u64(0), _u64(0)
    u0, u1, u2, u3 = _u64(0), _u64(0), _u64(0), _u64(0)
    done = 0
    while True:
        space = min(min(ends[0] - p0, ends[1] - p1), min(ends[2] - p2, ends[3] - p3))
        turns = min((each - done) // _TURN, (space - 8) // 7)
        if turns < 1:
            break
        for _ in range(turns):
            p0, b0, u0 = _append(symbols, done, table, room, p0, b0, u0)
            p1, b1, u1 = _append(symbols, done + each, table, room, p1, b1, u1)
            p2, b2, u2 = _append(symbols, done + 2 * each, table, room, p2, b2, u2)
            p3, b3, u3 = _append(symbols, done + 3 * each, table, room, p3, b3, u3)
            done += _TURN
    _append_rest(symbols, done, each, table, room, p0, ends[0], b0, u0)
    _append_rest(symbols, done + each, 2 * each, table, room, p1, ends[1], b1, u1)
    _append_rest(symbols, done + 2 * each, 3 * each, table, room, p2, ends[2], b2, u2)
    _append_rest(symbols, done + 3 * each, 4 * each, table, room, p3, ends[3], b3, u3)
    return total


@njit(nogil=True)
def _pairs_table(size, codes, table):
    """Fill the table (uint32 ``[2048]``) of what the next 11 bits hold: one symbol, or two where both codes fit.

    An entry is ``first + second * 2^8 + bits * 2^16 + symbols * 2^24``.
    """
    single = np.empty(1 << _MAX_LENGTH, np.uint32)
    for symbol in range(256):
        if size[symbol] > 0:
            for place in range(codes[symbol], 1 << _MAX_LENGTH, 1 << size[symbol]):
                single[place] = _u32(symbol | size[symbol] << 8)
    for place in range(1 << _MAX_LENGTH):
        first = _i64(single[place])
        second = _i64(single[place >> (first >> 8)])
        bits = (first >> 8) + (second >> 8)
        if bits <= _MAX_LENGTH:
            table[place] = _u32((first & 255) | (second & 255) << 8 | bits << 16 | 2 << 24)
        else:
            table[place] = _u32((first & 255) | (first >> 8) << 16 | 1 << 24)


@njit(nogil=True)
def _take(entry, bits, out, at):
    """Write what an entry holds (up to two symbols); return the bits and symbols that it took."""
    place = _u64(at)
    out[place] = _u8(entry)
    out[place + _u64(1)] = _u8(entry >> _u32(8))
    taken = _u64((entry >> _u32(16)) & _u32(255))
    return bits >> taken, _i64(taken), at + _i64(entry >> _u32(24))


@njit(nogil=True)
def _decode_rest(body, table, size, out, at, stop, place, end, area):
    """Decode all that is left of a stream that ends at ``end``; tell whether it ends where it must."""
    while at + 2 * _TURN <= stop and place + _TURN_BITS <= 8 * area:
        bits = _load(body, place >> 3) >> _u64(place & 7)
        for _ in range(_TURN):
            bits, taken, at = _take(table[bits & _MASK], bits, out, at)
            place += taken
    while at < stop:
        if place > 8 * end:
            return False
        symbol = _u8(table[(_load(body, place >> 3) >> _u64(place & 7)) & _MASK] & _u32(255))
        out[at] = symbol
        place += size[symbol]
        at += 1
    spare = 8 * end - place
    if spare < 0 or spare > 7:
        return False
    return spare == 0 or _i64(body[end - 1]) >> (8 - spare) == 0


@njit(nogil=True, cache=True)
def huffman_decode(body, out):
    """Undo :func:`huffman_encode`; return 0, or the key in ``REFUSALS`` of what is wrong."""
    each = out.size // _STREAMS
    rest = out.size - _STREAMS * each
    if body.size < _AT + _PAD + rest:
        return 1
    size, codes = np.empty(256, np.int64), np.zeros(256, np.int64)
    if not _read_lengths(body, 0, size) or not _assign_codes(size, codes):
        return 2
    ends, at = np.empty(_STREAMS, np.int64), _i64(_AT)
    for part in range(_STREAMS):
        for octet in range(4):
            at += _i64(body[huffman.LENGTH_BYTES + 4 * part + octet]) << (8 * octet)
        ends[part] = at
    area = body.size - _PAD - rest
    if at != area:
        return 3
    for octet in range(_PAD):
        if body[area + octet] != 0:
            return 3

    table = np.empty(1 << _MAX_LENGTH, np.uint32)
    _pairs_table(size, codes, table)
    q0, q1, q2, q3 = _i64(8 * _AT), 8 * ends[0], 8 * ends[1], 8 * ends[2]
    c0, c1, c2, c3 = _i64(0), each, 2 * each, 3 * each
    while True:
        # A turn takes at most 55 bits and writes at most 10 symbols; loads reach 8 bytes, which the padding bears.
        space = min(min(each - c0, 2 * each - c1), min(3 * each - c2, 4 * each - c3))
        turns = min((8 * area - max(max(q0, q1), max(q2, q3))) // _TURN_BITS, space // (2 * _TURN))
        if turns < 1:
            break
        for _ in range(turns):
            w0, w1 = _load(body, q0 >> 3) >> _u64(q0 & 7), _load(body, q1 >> 3) >> _u64(q1 & 7)
            w2, w3 = _load(body, q2 >> 3) >> _u64(q2 & 7), _load(body, q3 >> 3) >> _u64(q3 & 7)
            for _ in range(_TURN):
                w0, taken, c0 = _take(table[w0 & _MASK], w0, out, c0)
                q0 += taken
                w1, taken, c1 = _take(table[w1 & _MASK], w1, out, c1)
                q1 += taken
                w2, taken, c2 = _take(table[w2 & _MASK], w2, out, c2)
                q2 += taken
                w3, taken, c3 = _take(table[w3 & _MASK], w3, out, c3)
                q3 += taken
    fits = _decode_rest(body, table, size, out, c0, each, q0, ends[0], area)
    fits &= _decode_rest(body, table, size, out, c1, 2 * each, q1, ends[1], area)
    fits &= _decode_rest(body, table, size, out, c2, 3 * each, q2, ends[2], area)
    fits &= _decode_rest(body, table, size, out, c3, 4 * each, q3, ends[3], area)
    out[_STREAMS * each :] = body[area + _PAD :]
    return 0 if fits else 4
