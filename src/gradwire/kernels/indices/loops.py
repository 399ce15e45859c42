# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over positions and bits. ``ternary/loops.py`` states the rules.

Words are composed and taken apart in scalar registers, a few bits at a time. Explicit vectors would not help, so both
variants have the same code.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.indices.operations import GAPS_WRONG, NO_ROOM, TOO_WIDE
from gradwire.kernels.numba_core.compiled import Compiled, kept
from gradwire.kernels.numba_core.vectors import prefer_wide, trailing_zeros

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "85f681a16a361885"


_TILE = 2048
"""Gaps that are summed for all parameters at a time: 16 KiB."""

_u8, _u64, _i64 = np.uint8, np.uint64, np.int64


class IndicesLoops(Compiled):
    """The operations of the family ``indices``, compiled."""

    def gap_statistics(self, index, numel, sums):
        positions, parts = index.numpy(), []

        def work(begin: int, end: int) -> None:
            part = np.zeros(32, np.int64)
            gap_range(positions, begin, end, numel, part)
            parts.append(part)

        self.split(len(positions), 1, 32, work)
        found = np.stack(parts)
        out = sums.numpy()
        out[:31] = found[:, :31].sum(0)
        out[31] = -1 if found[:, 31].min() < 0 else found[:, 31].max()

    def encode_indices(self, index, numel, format, parameter, out, written):
        if format == "bitmap":
            written[0] = encode_bitmap_range(index.numpy(), numel, out.numpy())
        else:
            written[0] = encode_codes_range(index.numpy(), numel, format == "rice", parameter, out.numpy())

    def decode_indices(self, data, format, parameter, count, numel, index, valid):
        if format == "bitmap":
            valid[0] = decode_bitmap_range(data.numpy(), numel, index.numpy())
        else:
            valid[0] = decode_codes_range(data.numpy(), numel, format == "rice", parameter, index.numpy())

    def add_at(self, flat, index, offset, values, weight, state):
        counts = add_at_range(flat.numpy(), index.numpy(), offset, values.numpy(), np.float32(weight))
        state[0], state[1] = counts


@kept(DIGEST)
def gap_range(index, begin, end, numel, sums):
    """Sum ``gap >> r`` over positions ``begin .. end`` and find the largest gap, or -1 if they do not ascend."""
    prefer_wide()
    gaps = np.empty(_TILE, np.int64)
    before, largest, least = _i64(index[begin - 1]) if begin else _i64(-1), _i64(0), _i64(0)
    for first in range(begin, end, _TILE):
        positions = index[first : min(end, first + _TILE)]
        here = gaps[: positions.size]
        here[0] = positions[0] - before - 1
        for i in range(1, here.size):
            here[i] = _i64(positions[i]) - _i64(positions[i - 1]) - 1
        most = _i64(0)
        for i in range(here.size):
            most, least = max(most, here[i]), min(least, here[i])
        largest, before = max(largest, most), _i64(positions[positions.size - 1])
        shift = 0
        while most >> shift:
            total = _i64(0)
            for i in range(here.size):
                total += here[i] >> shift
            sums[shift] += total
            shift += 1
    sums[31] = -1 if least < 0 or before >= numel else largest


@kept(DIGEST)
def encode_bitmap_range(index, numel, out):
    """Write one bit for each element; return the number of bytes or a negative error."""
    prefer_wide()
    size, before = (numel + 7) // 8, _i64(-1)
    if out.size < size:
        return _i64(NO_ROOM)
    out[:size] = 0
    # The byte of the latest position, which is written when another byte's position comes.
    byte, place = _i64(0), _i64(0)
    for i in range(index.size):
        position = _i64(index[i])
        if position <= before or position >= numel:
            return _i64(GAPS_WRONG)
        if position >> 3 != place:
            out[place] = _u8(byte)
            byte, place = _i64(0), position >> 3
        byte |= _i64(1) << (position & 7)
        before = position
    if index.size:
        out[place] = _u8(byte)
    return _i64(size)


@njit(nogil=True)
def _code_bits(index, numel, rice, parameter):
    """Return the number of bits of all codes, or a negative error."""
    bits, before, wide = _i64(index.size) * (parameter + (1 if rice else 0)), _i64(-1), _i64(0)
    for i in range(index.size):
        gap = _i64(index[i]) - before - 1
        if gap < 0:
            return _i64(GAPS_WRONG)
        wide += gap >> parameter
        before = _i64(index[i])
    if before >= numel:
        return _i64(GAPS_WRONG)
    if rice:
        return bits + wide
    return _i64(TOO_WIDE) if wide else bits


@kept(DIGEST)
def encode_codes_range(index, numel, rice, parameter, out):
    """Write one code for each gap; return the number of bytes or a negative error."""
    prefer_wide()
    bits = _code_bits(index, numel, rice, parameter)
    if bits < 0:
        return bits
    size = (bits + 7) // 8
    if out.size < size:
        return _i64(NO_ROOM)
    # ``word`` holds up to seven bits of an incomplete byte.
    word, used, place, before = _u64(0), _i64(0), 0, _i64(-1)
    mask, one = _u64((1 << parameter) - 1), _u64(1 if rice else 0)
    for i in range(index.size):
        gap = _i64(index[i]) - before - 1
        before = _i64(index[i])
        code, length = _u64(gap) & mask, _i64(parameter)
        if rice:
            used += gap >> parameter
            # Zeros that complete bytes.
            while used >= 8:
                out[place] = _u8(word & _u64(255))
                word >>= _u64(8)
                used -= 8
                place += 1
            code, length = code << _u64(1) | one, length + 1
        word |= code << _u64(used)
        used += length
        while used >= 8:
            out[place] = _u8(word & _u64(255))
            word >>= _u64(8)
            used -= 8
            place += 1
    if used:
        out[place] = _u8(word)
    return size


@kept(DIGEST)
def decode_bitmap_range(data, numel, index):
    """Find the positions of ones; return whether they fill ``index`` and are all below ``numel``."""
    prefer_wide()
    if data.size != (numel + 7) // 8:
        return False
    found = 0
    for first in range(0, data.size, 8):
        word = _u64(0)
        if first + 8 <= data.size:
            octets = data[first : first + 8]
            # The compiler knows the number of turns, and makes one load of them.
            for i in range(8):
                word |= _u64(octets[i]) << _u64(8 * i)
        else:
            for i in range(data.size - first):
                word |= _u64(data[first + i]) << _u64(8 * i)
        if word == ~_u64(0) and found + 64 <= index.size:
            every = index[found : found + 64]
            for i in range(64):
                every[i] = 8 * first + i
            found += 64
            continue
        while word:
            if found == index.size:
                return False
            index[found] = 8 * first + trailing_zeros(word)
            found += 1
            word &= word - _u64(1)
    # A one in the padding would be the last position found.
    return found == index.size and (found == 0 or _i64(index[found - 1]) < numel)


@njit(nogil=True)
def _refill(data, place, word, have):
    """Append whole bytes to a word as long as they fit and data remain."""
    if place + 8 <= data.size:
        # The compiler makes one load of eight bytes; those that do not fit are read again later.
        octets, read = data[place : place + 8], _u64(0)
        for i in range(8):
            read |= _u64(octets[i]) << _u64(8 * i)
        count = (63 - have) >> 3
        kept_bits = _u64(8 * count)
        return place + count, word | (read & ((_u64(1) << kept_bits) - _u64(1))) << _u64(have), have + 8 * count
    while have <= 56 and place < data.size:
        word |= _u64(data[place]) << _u64(have)
        place += 1
        have += 8
    return place, word, have


@kept(DIGEST)
def decode_codes_range(data, numel, rice, parameter, index):
    """Read codes until ``index`` is full; return whether they are valid and end where ``data`` ends."""
    prefer_wide()
    word, have, place, position, mask = _u64(0), _i64(0), 0, _i64(-1), _u64((1 << parameter) - 1)
    most = numel >> parameter
    for i in range(index.size):
        quotient = _i64(0)
        if rice:
            place, word, have = _refill(data, place, word, have)
            while word == 0:
                # All bits that were read are zeros.
                quotient += have
                have = _i64(0)
                if place == data.size or quotient > most:
                    return False
                place, word, have = _refill(data, place, word, have)
            zeros = trailing_zeros(word)
            quotient += zeros
            word = word >> _u64(zeros) >> _u64(1)
            have -= zeros + 1
            if quotient > most:
                return False
        if have < parameter:
            place, word, have = _refill(data, place, word, have)
            if have < parameter:
                return False
        position += (quotient << parameter) + _i64(word & mask) + 1
        if position >= numel:
            return False
        word >>= _u64(parameter)
        have -= parameter
        index[i] = position
    return word == 0 and have + 8 * (data.size - place) < 8


@kept(DIGEST)
def add_at_range(flat, index, offset, values, weight):
    """Add products to places; return how many products are not finite, and how many places are outside."""
    prefer_wide()
    infinite, outside, size = _i64(0), _i64(0), flat.size
    for i in range(index.size):
        product = values[i] * weight
        place = offset + _i64(index[i])
        # The difference is a NaN for infinities and NaNs alone.
        infinite += product - product != 0
        if place < 0 or place >= size:
            outside += 1
        else:
            flat[place] += product
    return infinite, outside
