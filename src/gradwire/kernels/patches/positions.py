# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled packing of the positions of a block's changes. ``loops.py`` calls it.

The two parts of Rice codes lie apart: the places of the lower parts follow from their number, and the quotients are the
distances of ones in a bitmap. So decoding has no step that waits for the length of the code before.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.indices.loops import (
    decode_bitmap_range,
    decode_codes_range,
    encode_bitmap_range,
    encode_codes_range,
)
from gradwire.kernels.numba_core.vectors import trailing_zeros
from gradwire.kernels.patches import formats, simd

_u8, _u64, _i64 = np.uint8, np.uint64, np.int64
_BITMAP, _WIDTH, _INVERTED = formats.BITMAP, formats.WIDTH, formats.INVERTED

_rice_bytes = njit(nogil=True)(formats.rice_bytes)
_rice_candidates = njit(nogil=True)(formats.rice_candidates)


@njit(nogil=True)
def load(data, at):
    """Read 64 bits, of which those behind the end of the data are zero."""
    word = _u64(0)
    if at + 8 <= data.size:
        return simd.load_word(data, at)
    for i in range(data.size - at):
        word |= _u64(data[at + i]) << _u64(8 * i)
    return word


@njit(nogil=True)
def store(data, at, word):
    """Write 64 bits, or those before the end of the data."""
    if at + 8 <= data.size:
        simd.store_word(data, at, word)
    else:
        for i in range(data.size - at):
            data[at + i] = _u8(word >> _u64(8 * i))


@njit(nogil=True)
def complement(index, numel, other):
    """List the positions that ``index`` leaves out; return how many."""
    found, position = 0, _i64(0)
    for i in range(index.size):
        while position < index[i]:
            other[found] = position
            found += 1
            position += 1
        position += 1
    while position < numel:
        other[found] = position
        found += 1
        position += 1
    return found


@njit(nogil=True)
def _quotients(index, r):
    """Return the sum of ``gap >> r``."""
    total = _i64(index[0]) >> r
    for i in range(1, index.size):
        total += (_i64(index[i]) - _i64(index[i - 1]) - 1) >> r
    return total


@njit(nogil=True)
def _widest(index):
    """Return the bits of the largest gap."""
    widest, bits = _i64(index[0]), _i64(0)
    for i in range(1, index.size):
        widest = max(widest, _i64(index[i]) - _i64(index[i - 1]) - 1)
    while widest >> bits:
        bits += 1
    return bits


@njit(nogil=True)
def pack_positions(index, numel, inverted, out):
    """Write positions in the smallest form; return the form and its bytes. ``out`` has 8 bytes more than a bitmap."""
    count = index.size
    flag = _i64(_INVERTED if inverted else 0)
    if count == 0:
        return flag, _i64(0)
    least, most = _rice_candidates(_i64(index[count - 1]) - (count - 1), count)
    form, size = _i64(_BITMAP), (_i64(numel) + 7) >> 3
    for r in range(least, most + 1):
        rice = _i64(_rice_bytes(count, _quotients(index, r), r))
        if rice < size:
            form, size = _i64(r), rice
    bits = _widest(index)
    fixed = (count * bits + 7) >> 3
    if fixed < size:
        form, size = _WIDTH + bits, fixed
    if form == _BITMAP:
        encode_bitmap_range(index, numel, out[:size])
    elif form > _BITMAP:
        encode_codes_range(index, numel, False, form - _WIDTH, out[:size])
    else:
        _pack_rice(index, form, size, out)
    return form + flag, size


@njit(nogil=True)
def _pack_rice(index, r, size, out):
    mask, held, used, place, before = (_u64(1) << _u64(r)) - _u64(1), _u64(0), _u64(0), _i64(0), _i64(-1)
    for i in range(index.size):
        gap = _u64(_i64(index[i]) - before - 1)
        before = _i64(index[i])
        held |= (gap & mask) << used
        used += _u64(r)
        # Whole words are written, and bytes that are not complete again.
        simd.store_word(out, place, held)
        place += _i64(used >> _u64(3))
        held >>= used & ~_u64(7)
        used &= _u64(7)
    begin = (index.size * _i64(r) + 7) >> 3
    for i in range(begin, size):
        out[i] = _u8(0)
    word, one, current, before = _u64(0), _i64(-1), _i64(0), _i64(-1)
    for i in range(index.size):
        one += ((_i64(index[i]) - before - 1) >> r) + 1
        before = _i64(index[i])
        if one >> 6 != current:
            simd.store_word(out, begin + 8 * current, word)
            word, current = _u64(0), one >> 6
        word |= _u64(1) << _u64(one & 63)
    store(out[:size], begin + 8 * current, word)


@njit(nogil=True)
def unpack_positions(form, listed, numel, data, index, base, ahead, stride):
    """Read ``listed`` positions, ``data`` in all; return whether an encoder writes such bytes.

    Meanwhile fetch a line of ``base`` for each position, from byte ``ahead`` on, ``stride`` bytes apart; 0: none.
    """
    if listed == 0:
        return data.size == 0
    if form == _BITMAP:
        return decode_bitmap_range(data, numel, index[:listed])
    if form > _BITMAP:
        return decode_codes_range(data, numel, False, form - _WIDTH, index[:listed])
    return _unpack_rice(data, numel, form, index[:listed], base, ahead, stride)


@njit(nogil=True)
def _unpack_rice(data, numel, r, index, base, ahead, stride):
    count = index.size
    begin = (count * r + 7) >> 3
    # Quotients of valid positions sum to at most numel >> r: no product below overflows.
    if begin >= data.size or 8 * (data.size - begin) > count + (numel >> r) + 7:
        return False
    if begin and (count * r) & 7 and data[begin - 1] >> _u8((count * r) & 7):
        return False
    mask, position, last, bit = (_u64(1) << _u64(r)) - _u64(1), _i64(-1), _i64(-1), _u64(0)
    found, room = _u64(0), _u64(count)
    # The words of all lower parts end before the data do.
    whole = begin + 8 <= data.size
    for place in range(begin, data.size, 8):
        word = load(data, place)
        first = 8 * (place - begin)
        while word:
            one = first + _i64(trailing_zeros(word))
            word &= word - _u64(1)
            if found == room:
                return False
            octet = _i64(bit >> _u64(3))
            lower = ((simd.load_word(data, octet) if whole else load(data, octet)) >> (bit & _u64(7))) & mask
            bit += _u64(r)
            position += ((one - last - 1) << r) + _i64(lower) + 1
            last = one
            index[found] = position
            found += _u64(1)
            if stride:
                simd.fetch(base, ahead)
                ahead += stride
    return found == room and last >> 3 == data.size - begin - 1 and position < numel
