# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled Huffman coding: four independent streams are processed side by side to hide latency.

Each fast loop runs a number of turns that certainly fit, then computes it anew; a slow loop finishes each stream. There
are no explicit vectors: the same source is used on all CPUs, and LLVM joins loads and stores of neighbouring bytes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.entropy import tables as huffman
from gradwire.kernels.numba_core.compiled import copy_into, kept

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "8a558aa1ce84ac1b"


_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_AT = huffman.LENGTH_BYTES + 4 * huffman.STREAMS
_PAD = 8
_TURN = 5  # codes that fit into 64 bits after 7 other bits, with 2 bits to spare
_LOOK_BITS, _LOOKS, _SYMBOLS = 12, 4, 3  # of a lookup; _LOOKS of them fit into 64 bits after 7 other bits
_LOOK_MASK = _u64((1 << _LOOK_BITS) - 1)
_TURN_BITS, _TURN_SYMBOLS = _LOOKS * _LOOK_BITS, _LOOKS * _SYMBOLS
_MAX_LENGTH, _STREAMS = huffman.MAX_LENGTH, huffman.STREAMS

_assign_codes = njit(nogil=True)(huffman.assign_codes)
_choose_lengths = njit(nogil=True)(huffman.choose_lengths)
_read_lengths = njit(nogil=True)(huffman.read_lengths)
_write_lengths = njit(nogil=True)(huffman.write_lengths)


@njit(nogil=True)
def _load(data, at):
    """Read 64 bits; places are unsigned, since Numba checks the sign of signed indices."""
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
def _store_half(out, place, value):
    """Write 32 bits."""
    out[place] = _u8(value)
    out[place + _u64(1)] = _u8(value >> _u32(8))
    out[place + _u64(2)] = _u8(value >> _u32(16))
    out[place + _u64(3)] = _u8(value >> _u32(24))


@njit(nogil=True)
def _append(symbols, at, table, out, place, bits, used):
    """Append the codes of five symbols to the ``used`` (below 8) upper bits of ``bits``; store whole bytes.

    An entry of ``table`` has the code in its upper bits and the code's length in its lower ones. Shifting ``bits``
    right by the length and combining it with the entry appends the code. The length is copied along, below the bits in
    use (at most 62), so that only the last length must be removed.
    """
    for step in range(_TURN - 1):
        entry = table[symbols[_u64(at + step)]]
        bits = (bits >> (entry & _u64(63))) | entry
        used += entry
    entry = table[symbols[_u64(at + _TURN - 1)]]
    length = entry & _u64(63)
    bits = (bits >> length) | (entry ^ length)
    used = (used + length) & _u64(63)
    _store(out, place, bits >> ((_u64(64) - used) & _u64(63)))
    return place + _i64(used >> _u64(3)), bits, used & _u64(7)


@njit(nogil=True)
def _append_rest(symbols, at, stop, table, out, place, end, bits, used):
    """Append the rest of a stream, whose bytes end at ``end``."""
    while at + _TURN <= stop and place + 8 <= end:
        place, bits, used = _append(symbols, at, table, out, place, bits, used)
        at += _TURN
    # Byte by byte, with the bits at the lower end.
    bits = bits >> (_u64(64) - used) if used > _u64(0) else _u64(0)
    while at < stop:
        entry = table[symbols[at]]
        length = entry & _u64(63)
        bits |= entry >> (_u64(64) - length) << used
        used += length
        at += 1
        while used >= _u64(8):
            out[place] = _u8(bits & _u64(255))
            place += 1
            bits >>= _u64(8)
            used -= _u64(8)
    if used > _u64(0):
        out[place] = _u8(bits & _u64(255))


@kept(DIGEST)
def huffman_encode(symbols, room):
    """Write the body of ``symbols`` into ``room``; return its bytes, or -1 if it would not be shorter."""
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

    # The counts of each quarter give the end of its stream in advance.
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
    copy_into(room[at + _PAD : total], symbols[_STREAMS * each :])

    table = np.zeros(256, np.uint64)
    for symbol in range(256):
        if size[symbol] > 0:
            table[symbol] = _u64(codes[symbol]) << _u64(64 - size[symbol]) | _u64(size[symbol])
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
def _fill_table(size, codes, table):
    """Fill the table (uint32 ``[4096]``) that maps 12 bits to the one to three symbols whose codes they contain.

    An entry is ``bits + symbols * 2^6 + first * 2^8 + second * 2^16 + third * 2^24``.
    """
    single = np.empty(1 << _LOOK_BITS, np.uint32)
    for symbol in range(256):
        if size[symbol] > 0:
            for place in range(codes[symbol], 1 << _LOOK_BITS, 1 << size[symbol]):
                single[place] = _u32(symbol << 8 | size[symbol])
    for place in range(1 << _LOOK_BITS):
        entry, bits, count = _i64(0), _i64(0), 0
        while count < _SYMBOLS:
            following = _i64(single[place >> bits])
            if bits + (following & 63) > _LOOK_BITS:
                break
            entry |= (following >> 8) << (8 + 8 * count)
            bits += following & 63
            count += 1
        table[place] = _u32(entry | count << 6 | bits)


@njit(nogil=True)
def _take(entry, bits, out, at, used):
    """Write the symbols of an entry, and zeros up to the fourth; return the remaining bits and the next place.

    ``used`` is a sum of whole entries. Its lowest six bits are the number of bits taken, at most four times 12.
    """
    _store_half(out, at, entry >> _u32(8))
    return bits >> _u64(entry & _u32(63)), at + _u64((entry >> _u32(6)) & _u32(3)), _u32(used + entry)


@njit(nogil=True)
def _decode_rest(body, table, size, out, at, stop, place, end, area):
    """Decode the rest of a stream; return whether it ends at byte ``end``, filled up with zeros."""
    while at + _TURN_SYMBOLS < stop and place + _TURN_BITS <= 8 * area:
        bits, used, here = _load(body, place >> 3) >> _u64(place & 7), _u32(0), _u64(at)
        for _ in range(_LOOKS):
            bits, here, used = _take(table[bits & _LOOK_MASK], bits, out, here, used)
        place, at = place + _i64(used & _u32(63)), _i64(here)
    while at < stop:
        if place > 8 * end:
            return False
        symbol = _u8(table[(_load(body, place >> 3) >> _u64(place & 7)) & _LOOK_MASK] >> _u32(8))
        out[at] = symbol
        place += size[symbol]
        at += 1
    spare = 8 * end - place
    if spare < 0 or spare > 7:
        return False
    return spare == 0 or _i64(body[end - 1]) >> (8 - spare) == 0


@kept(DIGEST)
def huffman_decode(body, out):
    """Invert :func:`huffman_encode`; return 0, or the key in ``REFUSALS`` of a fault."""
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

    table = np.empty(1 << _LOOK_BITS, np.uint32)
    _fill_table(size, codes, table)
    q0, q1, q2, q3 = _i64(8 * _AT), 8 * ends[0], 8 * ends[1], 8 * ends[2]
    c0, c1, c2, c3 = _u64(0), _u64(each), _u64(2 * each), _u64(3 * each)
    while True:
        # A turn takes at most 48 bits and 12 symbols. It overwrites one more symbol, which must be of the same stream,
        # and loads up to 8 bytes too many, which are padding.
        space = min(
            min(each - _i64(c0), 2 * each - _i64(c1)), min(3 * each - _i64(c2), 4 * each - _i64(c3))
        )  # fmt: skip
        turns = min((8 * area - max(max(q0, q1), max(q2, q3))) // _TURN_BITS, (space - 1) // _TURN_SYMBOLS)
        if turns < 1:
            break
        for _ in range(turns):
            w0, w1 = _load(body, q0 >> 3) >> _u64(q0 & 7), _load(body, q1 >> 3) >> _u64(q1 & 7)
            w2, w3 = _load(body, q2 >> 3) >> _u64(q2 & 7), _load(body, q3 >> 3) >> _u64(q3 & 7)
            u0, u1, u2, u3 = _u32(0), _u32(0), _u32(0), _u32(0)
            for _ in range(_LOOKS):
                w0, c0, u0 = _take(table[w0 & _LOOK_MASK], w0, out, c0, u0)
                w1, c1, u1 = _take(table[w1 & _LOOK_MASK], w1, out, c1, u1)
                w2, c2, u2 = _take(table[w2 & _LOOK_MASK], w2, out, c2, u2)
                w3, c3, u3 = _take(table[w3 & _LOOK_MASK], w3, out, c3, u3)
            q0, q1 = q0 + _i64(u0 & _u32(63)), q1 + _i64(u1 & _u32(63))
            q2, q3 = q2 + _i64(u2 & _u32(63)), q3 + _i64(u3 & _u32(63))
    fits = _decode_rest(body, table, size, out, _i64(c0), each, q0, ends[0], area)
    fits &= _decode_rest(body, table, size, out, _i64(c1), 2 * each, q1, ends[1], area)
    fits &= _decode_rest(body, table, size, out, _i64(c2), 3 * each, q2, ends[2], area)
    fits &= _decode_rest(body, table, size, out, _i64(c3), 4 * each, q3, ends[3], area)
    copy_into(out[_STREAMS * each :], body[area + _PAD :])
    return 0 if fits else 4
