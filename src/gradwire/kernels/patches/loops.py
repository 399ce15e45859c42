# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over words of two states of memory. ``ternary/loops.py`` states the rules.

Elements of any width are taken out of words of 64 bits, so that each loop is compiled once for all types.
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
from gradwire.kernels.numba_core.compiled import Compiled, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide, trailing_zeros
from gradwire.kernels.patches import formats, simd

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "afe7204b7653c650"


_u8, _u64, _i64 = np.uint8, np.uint64, np.int64
_KEY, _FIRST, _SECOND = _u64(formats.KEY), _u64(formats.FIRST_FACTOR), _u64(formats.SECOND_FACTOR)
_SHIFTS = (_u64(formats.FIRST_SHIFT), _u64(formats.SECOND_SHIFT), _u64(formats.THIRD_SHIFT))
_BITMAP, _WIDTH, _INVERTED = formats.BITMAP, formats.WIDTH, formats.INVERTED
_EXACT, _FIRST_CLASS, _SYMBOLS = formats.EXACT, formats.FIRST_CLASS, formats.SYMBOLS
_AHEAD = 32
"""Changes ahead of which memory is fetched."""

_rice_candidates = njit(nogil=True)(formats.rice_candidates)


class PatchesLoops(Compiled):
    """The operations of the family ``patches``, compiled."""

    def word_sum(self, data, first_word, total):
        octets, parts = data.numpy(), []

        def work(begin: int, end: int) -> None:
            parts.append(int(word_sum_range(self.simd, octets[begin:end], _u64(first_word + begin // 8))))

        self.split(len(octets), 256, 1, work)
        total[0] = np.uint64(sum(parts) % 2**64).astype(np.int64)

    def find_changes(
        self, old, new, width, floating, block, first_word, rows, positions, symbols, extra, cursor, advance
    ):
        scratch = np.empty((2, min(block, len(old) // width)), np.int32)
        find_range(
            self.simd, old.numpy(), new.numpy(), width, _u64(floating), block, _u64(first_word), rows.numpy(), scratch,
            positions.numpy(), symbols.numpy(), extra.numpy(), cursor.numpy(), advance,
        )  # fmt: skip

    def apply_changes(
        self, base, width, floating, block, first_word, rows, positions, symbols, extra, cursor, write, fault
    ):
        scratch = np.empty((2, min(block, len(base) // width)), np.int32)
        fault[0] = apply_range(
            self.simd, base.numpy(), width, _u64(floating), block, _u64(first_word), rows.numpy(), scratch,
            positions.numpy(), symbols.numpy(), extra.numpy(), cursor.numpy(), write,
        )  # fmt: skip


@njit(nogil=True)
def _load(data, at):
    """Read 64 bits, of which those behind the end of the data are zero."""
    word = _u64(0)
    if at + 8 <= data.size:
        return simd.load_word(data, at)
    for i in range(data.size - at):
        word |= _u64(data[at + i]) << _u64(8 * i)
    return word


@njit(nogil=True)
def _store(data, at, word):
    """Write 64 bits, or those before the end of the data."""
    if at + 8 <= data.size:
        simd.store_word(data, at, word)
    else:
        for i in range(data.size - at):
            data[at + i] = _u8(word >> _u64(8 * i))


@njit(nogil=True)
def _mix(value):
    value = (value ^ (value >> _SHIFTS[0])) * _FIRST
    value = (value ^ (value >> _SHIFTS[1])) * _SECOND
    return value ^ (value >> _SHIFTS[2])


@njit(nogil=True)
def plain_changed_words(old, new, at):
    found = _u64(0)
    for turn in range(64):
        found |= _u64(_load(old, at + 8 * turn) != _load(new, at + 8 * turn)) << _u64(turn)
    return found


@njit(nogil=True)
def plain_sum_turns(data, turns, key):
    total = _u64(0)
    for turn in range(32 * turns):
        total += _mix(_load(data, 8 * turn) + key)
        key += _KEY
    return total


_changed_words = either(plain_changed_words, simd.changed_words)
_sum_turns = either(plain_sum_turns, simd.sum_turns)


@njit(nogil=True)
def _sum_words(variant, data, first_word):
    turns = data.size // 256
    key = (first_word + _u64(1)) * _KEY
    total = _sum_turns(variant, data, turns, key)
    for at in range(256 * turns, data.size, 8):
        total += _mix(_load(data, at) + key + _u64(at >> 3) * _KEY)
    return total


@kept(DIGEST)
def word_sum_range(variant, data, first_word):
    """Sum the mixed words of ``data``, whose first one has the number ``first_word``."""
    prefer_wide()
    return _sum_words(variant, data, first_word)


@njit(nogil=True)
def _ordered(value, bits, floating):
    """Map the bits of an element to an integer of as many bits that ascends with its value, or back.

    Without a branch: signs of weights are a coin toss, which no CPU predicts.
    """
    sign = (value >> (bits - _u64(1))) & floating
    return value ^ ((_u64(0) - sign) & ((_u64(1) << (bits - _u64(1))) - _u64(1)))


@njit(nogil=True)
def _top_bit(value):
    """Return the place of the highest 1 of a word, which is not zero."""
    place = _i64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if value >> _u64(step):
            value >>= _u64(step)
            place += step
    return place


@njit(nogil=True)
def _complement(index, count, numel, other):
    """List the positions that ``index`` leaves out."""
    found, position = 0, _i64(0)
    for i in range(count):
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
def _pack_positions(index, numel, inverted, out):
    """Write positions in the smallest form; return the form and its bytes."""
    count = index.size
    flag = _i64(_INVERTED if inverted else 0)
    if count == 0:
        return flag, _i64(0)
    least, most = _rice_candidates(_i64(index[count - 1]) - (count - 1), count)
    middle = min(least + 1, most)
    low, mid, high, widest, before = _i64(0), _i64(0), _i64(0), _i64(0), _i64(-1)
    for i in range(count):
        gap = _i64(index[i]) - before - 1
        before = _i64(index[i])
        low += gap >> least
        mid += gap >> middle
        high += gap >> most
        widest = max(widest, gap)
    bits = _i64(0)
    while widest >> bits:
        bits += 1
    form, size = _i64(_BITMAP), (_i64(numel) + 7) >> 3
    rice = (count * (least + 1) + low + 7) >> 3
    if rice < size:
        form, size = _i64(least), rice
    rice = (count * (middle + 1) + mid + 7) >> 3
    if rice < size:
        form, size = _i64(middle), rice
    rice = (count * (most + 1) + high + 7) >> 3
    if rice < size:
        form, size = _i64(most), rice
    fixed = (count * bits + 7) >> 3
    if fixed < size:
        form, size = _WIDTH + bits, fixed
    if form == _BITMAP:
        encode_bitmap_range(index, numel, out[:size])
    elif form > _BITMAP:
        encode_codes_range(index, numel, False, form - _WIDTH, out[:size])
    else:
        encode_codes_range(index, numel, True, form, out[:size])
    return form + flag, size


@kept(DIGEST)
def find_range(
    variant, old, new, width, floating, block, first_word, rows, scratch, positions, symbols, extra, cursor, advance
):
    """Write rows, positions, symbols and extra bits of the changes; ``cursor`` holds the ends, and the sum's change."""
    prefer_wide()
    bits = _u64(8 * width)
    ones = ~_u64(0) >> (_u64(64) - bits)
    index, other = scratch[0], scratch[1]
    at_symbol, at_position = cursor[0], cursor[1]
    # Extra bits are collected in a word, which is written when it is full, and at the end.
    place, used = (cursor[2] >> 6) << 3, _u64(cursor[2] & 63)
    held = _load(extra, place) & ((_u64(1) << used) - _u64(1))
    change = _u64(0)
    for number in range(rows.shape[0]):
        begin = number * block * width
        stop = min(begin + block * width, old.size)
        count = _i64(0)
        for group in range(begin, stop, 512):
            if group + 512 <= stop:
                found = _changed_words(variant, old, new, group)
            else:
                found = _u64(0)
                for word in range(group, stop, 8):
                    found |= _u64(_load(old, word) != _load(new, word)) << _u64((word - group) >> 3)
            while found:
                at = group + 8 * _i64(trailing_zeros(found))
                found &= found - _u64(1)
                before, after = _load(old, at), _load(new, at)
                key = (first_word + _u64(at >> 3) + _u64(1)) * _KEY
                change += _mix(after + key) - _mix(before + key)
                if advance:
                    _store(old, at, after)
                left = before ^ after
                while left:
                    shift = _u64(trailing_zeros(left)) & ~(bits - _u64(1))
                    left &= ~(ones << shift)
                    index[count] = (_i64(at - begin) + (_i64(shift) >> 3)) // width
                    count += 1
                    distance = _ordered((after >> shift) & ones, bits, floating)
                    distance = (distance - _ordered((before >> shift) & ones, bits, floating)) & ones
                    negative = distance >> (bits - _u64(1))
                    distance = ((distance ^ (_u64(0) - negative)) + negative) & ones
                    if distance < _u64(_EXACT):
                        symbols[at_symbol] = _u8((distance - _u64(1)) << _u64(1) | negative)
                    else:
                        top = _top_bit(distance)
                        half = (distance >> _u64(top - 1)) & _u64(1)
                        symbols[at_symbol] = _u8(_FIRST_CLASS + 2 * (top - 6) + _i64(half))
                        value = (distance & ((_u64(1) << _u64(top - 1)) - _u64(1))) << _u64(1) | negative
                        held |= value << used
                        full = used + _u64(top)
                        if full >= _u64(64):
                            _store(extra, place, held)
                            place += 8
                            held = value >> (_u64(64) - used) if used else _u64(0)
                            full -= _u64(64)
                        used = full
                    at_symbol += 1
        numel = (stop - begin) // width
        room = positions[at_position:]
        if 2 * count > numel:
            left_out = _complement(index, count, numel, other)
            form, size = _pack_positions(other[:left_out], numel, True, room)
        else:
            form, size = _pack_positions(index[:count], numel, False, room)
        rows[number, 0], rows[number, 1], rows[number, 2] = form, count, size
        at_position += size
    _store(extra, place, held)
    cursor[0], cursor[1], cursor[2] = at_symbol, at_position, (place << 3) + _i64(used)
    cursor[3] = _i64(_u64(cursor[3]) + change)


@njit(nogil=True)
def _unpack_positions(form, size, listed, numel, positions, at, index):
    """Read ``listed`` positions; return whether they are valid."""
    data = positions[at : at + size]
    if listed == 0:
        return size == 0
    if form == _BITMAP:
        return decode_bitmap_range(data, numel, index[:listed])
    if form > _BITMAP:
        return decode_codes_range(data, numel, False, form - _WIDTH, index[:listed])
    return decode_codes_range(data, numel, True, form, index[:listed])


@kept(DIGEST)
def apply_range(
    variant, base, width, floating, block, first_word, rows, scratch, positions, symbols, extra, cursor, write
):
    """Check changes and sum up words before and after, or write the changes; return 0, or the key of a fault."""
    prefer_wide()
    bits = _u64(8 * width)
    ones = ~_u64(0) >> (_u64(64) - bits)
    at_symbol, at_position, at_bit = cursor[0], cursor[1], cursor[2]
    change, total = _u64(0), _u64(0)
    for number in range(rows.shape[0]):
        begin = number * block * width
        stop = min(begin + block * width, base.size)
        numel = (stop - begin) // width
        form, count, size = rows[number, 0], rows[number, 1], rows[number, 2]
        if form < 0 or form >= 2 * _INVERTED or count < 0 or count > numel:
            return 1
        if size < 0 or size > positions.size - at_position:
            return 2
        if count > symbols.size - at_symbol:
            return 3
        if not write:
            total += _sum_words(variant, base[begin:stop], first_word + _u64(begin >> 3))
        inverted = form >= _INVERTED
        listed = numel - count if inverted else count
        index, other = scratch[0], scratch[1]
        if not _unpack_positions(form & (_INVERTED - 1), size, listed, numel, positions, at_position, index):
            return 2
        at_position += size
        if inverted:
            _complement(index, listed, numel, other)
            index = other
        at, before, after, key = _i64(-1), _u64(0), _u64(0), _u64(0)
        for i in range(count):
            if write:
                # The sum has brought the block into the cache when changes are checked, and nothing when they are
                # written.
                simd.prefetch(base, begin + _i64(index[min(i + _AHEAD, count - 1)]) * width)
            symbol = _i64(symbols[at_symbol])
            at_symbol += 1
            if symbol < _FIRST_CLASS:
                distance, negative = _u64((symbol >> 1) + 1), _u64(symbol & 1)
            else:
                top = 6 + ((symbol - _FIRST_CLASS) >> 1)
                if symbol >= _SYMBOLS or top >= _i64(bits):
                    return 4
                if top > 8 * extra.size - at_bit:
                    return 5
                octet, shift = at_bit >> 3, _u64(at_bit & 7)
                value = _load(extra, octet) >> shift
                if top + _i64(shift) > 64:
                    value |= _u64(extra[octet + 8]) << (_u64(64) - shift)
                at_bit += top
                value &= (_u64(1) << _u64(top)) - _u64(1)
                negative = value & _u64(1)
                distance = (_u64(2 + (symbol & 1)) << _u64(top - 1)) | value >> _u64(1)
            distance = (distance ^ (_u64(0) - negative)) + negative
            octet = begin + _i64(index[i]) * width
            if octet >> 3 != at >> 3 or at < 0:
                if at >= 0:
                    if write:
                        _store(base, at, after)
                    else:
                        change += _mix(after + key) - _mix(before + key)
                at = octet & ~7
                before = _load(base, at)
                after, key = before, (first_word + _u64(at >> 3) + _u64(1)) * _KEY
            shift = _u64(8 * (octet - at))
            value = (_ordered((after >> shift) & ones, bits, floating) + distance) & ones
            after = (after & ~(ones << shift)) | _ordered(value, bits, floating) << shift
        if at >= 0:
            if write:
                _store(base, at, after)
            else:
                change += _mix(after + key) - _mix(before + key)
    cursor[0], cursor[1], cursor[2] = at_symbol, at_position, at_bit
    cursor[3] = _i64(_u64(cursor[3]) + change)
    cursor[4] = _i64(_u64(cursor[4]) + total)
    return 0
