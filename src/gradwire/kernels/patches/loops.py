# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over two states of memory. ``ternary/loops.py`` states the rules.

What changed is looked for, summed up and written by lines of 64 bytes, whatever the width of elements; the elements
themselves lie side by side meanwhile, in arrays whose type has their width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import Compiled, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide, trailing_zeros
from gradwire.kernels.patches import formats, simd
from gradwire.kernels.patches.distances import describe, distances_of, top_bit
from gradwire.kernels.patches.positions import complement, load, pack_positions, unpack_positions

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "ddb3f0529afe5e02"


_u8, _u64, _i64 = np.uint8, np.uint64, np.int64
_KEY, _FIRST, _SECOND = _u64(formats.KEY), _u64(formats.FIRST_FACTOR), _u64(formats.SECOND_FACTOR)
_SHIFTS = (_u64(formats.FIRST_SHIFT), _u64(formats.SECOND_SHIFT), _u64(formats.THIRD_SHIFT))
_INVERTED, _LINE = formats.INVERTED, formats.LINE_BYTES
_TILE = 64
"""Lines that are compared before their changes are taken out: those of both states stay in the first-level cache."""


class Room(NamedTuple):
    """Memory for what is found in a block.

    Attributes:
        lines: Numbers of the lines with changes (int32).
        index: Positions of elements (int32).
        other: Positions of the other elements (int32).
        first: Old elements, or distances; unsigned integers of their width.
        second: New elements, or distances of all elements of the lines with changes.
        old_line: The last line, if it is not whole, filled up with zeros (uint8).
        new_line: The same of the new state.
    """

    lines: Any
    index: Any
    other: Any
    first: Any
    second: Any
    old_line: Any
    new_line: Any


def _room(width: int, elements: int) -> Room:
    """Return memory for blocks of at most so many elements."""
    lines = elements * width // _LINE + 1 + simd.LINES_AHEAD
    kind = np.dtype(f"u{width}")
    # A vector is stored whole where fewer elements are kept.
    return Room(
        np.zeros(lines, np.int32),
        np.empty(elements + _LINE, np.int32),
        np.empty(elements + _LINE, np.int32),
        np.empty(elements + _LINE, kind),
        np.empty(elements + _LINE, kind),
        np.zeros(_LINE, np.uint8),
        np.zeros(_LINE, np.uint8),
    )


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
        find_range(
            self.simd, old.numpy(), new.numpy(), _u64(floating), block, _u64(first_word), rows.numpy(),
            _room(width, min(block, len(old) // width)), positions.numpy(), symbols.numpy(), extra.numpy(),
            cursor.numpy(), _i64(advance),
        )  # fmt: skip

    def apply_changes(
        self, base, width, floating, block, first_word, rows, positions, symbols, extra, cursor, mode, fault
    ):
        fault[0] = apply_range(
            self.simd, base.numpy(), _u64(floating), block, _u64(first_word), rows.numpy(),
            _room(width, min(block, len(base) // width)), positions.numpy(), symbols.numpy(), extra.numpy(),
            cursor.numpy(), _i64(mode),
        )  # fmt: skip


@njit(nogil=True)
def _mix(value):
    value = (value ^ (value >> _SHIFTS[0])) * _FIRST
    value = (value ^ (value >> _SHIFTS[1])) * _SECOND
    return value ^ (value >> _SHIFTS[2])


@njit(nogil=True)
def plain_changed_lines(old, new, at, first, count, lines):
    found = 0
    for line in range(first, first + count):
        different = _u64(0)
        for word in range(at + _LINE * line, at + _LINE * (line + 1), 8):
            different |= simd.load_word(old, word) ^ simd.load_word(new, word)
        lines[found] = line
        found += different != _u64(0)
    return found


@njit(nogil=True)
def plain_take_changes(old, new, at, lines, number, key, advance, unused, index, before, after, count):
    width = before.itemsize
    bits, change = _u64(8 * width), _u64(0)
    ones = ~_u64(0) >> (_u64(64) - bits)
    for turn in range(number):
        begin = _LINE * _i64(lines[turn])
        for word in range(begin, begin + _LINE, 8):
            first, second = simd.load_word(old, at + word), simd.load_word(new, at + word)
            left = first ^ second
            if not left:
                continue
            place = key + _u64(word >> 3) * _KEY
            change += _mix(second + place) - _mix(first + place)
            if advance:
                simd.store_word(old, at + word, second)
            while left:
                shift = _u64(trailing_zeros(left)) & ~(bits - _u64(1))
                left &= ~(ones << shift)
                index[count] = (word + (_i64(shift) >> 3)) // width
                before[count], after[count] = (first >> shift) & ones, (second >> shift) & ones
                count += 1
    return count, _i64(change)


@njit(nogil=True)
def _moved_word(word, deltas, first, flips):
    """Move the elements of a word by distances."""
    bits = _u64(8 * deltas.itemsize)
    ones = ~_u64(0) >> (_u64(64) - bits)
    for turn in range(8 // deltas.itemsize):
        shift, delta = _u64(turn) * bits, _u64(deltas[first + turn])
        if delta:
            value = (word >> shift) & ones
            value ^= (_u64(0) - (value >> (bits - _u64(1)))) & flips
            value = (value + delta) & ones
            value ^= (_u64(0) - (value >> (bits - _u64(1)))) & flips
            word = (word & ~(ones << shift)) | value << shift
    return word


@njit(nogil=True)
def plain_check_lines(base, at, lines, number, deltas, flips, ahead, stride, key, write, unused):
    elements, change = 8 // deltas.itemsize, _u64(0)
    for turn in range(number):
        for word in range(8):
            place = 8 * _i64(lines[turn]) + word
            old = simd.load_word(base, at + 8 * place)
            new = _moved_word(old, deltas, (8 * turn + word) * elements, flips)
            if new != old:
                own = key + _u64(place) * _KEY
                change += _mix(new + own) - _mix(old + own)
                if write:
                    simd.store_word(base, at + 8 * place, new)
    return change


@njit(nogil=True)
def plain_write_lines(base, at, lines, number, deltas, flips, ahead, stride):
    elements = 8 // deltas.itemsize
    for turn in range(number):
        for word in range(8):
            place = at + _LINE * _i64(lines[turn]) + 8 * word
            old = simd.load_word(base, place)
            new = _moved_word(old, deltas, (8 * turn + word) * elements, flips)
            if new != old:
                simd.store_word(base, place, new)


@njit(nogil=True)
def plain_sum_turns(data, turns, key):
    total = _u64(0)
    for turn in range(32 * turns):
        total += _mix(load(data, 8 * turn) + key)
        key += _KEY
    return total


_changed_lines = either(plain_changed_lines, simd.changed_lines)
_take_changes = either(plain_take_changes, simd.take_changes)
_check_lines = either(plain_check_lines, simd.check_lines)
_write_lines = either(plain_write_lines, simd.write_lines)
_sum_turns = either(plain_sum_turns, simd.sum_turns)


@njit(nogil=True)
def _sum_words(variant, data, first_word):
    turns = data.size // 256
    key = (first_word + _u64(1)) * _KEY
    total = _sum_turns(variant, data, turns, key)
    for at in range(256 * turns, data.size, 8):
        total += _mix(load(data, at) + key + _u64(at >> 3) * _KEY)
    return total


@kept(DIGEST)
def word_sum_range(variant, data, first_word):
    """Sum the mixed words of ``data``, whose first one has the number ``first_word``."""
    prefer_wide()
    return _sum_words(variant, data, first_word)


@njit(nogil=True)
def _clear(target):
    for i in range(target.size):
        target[i] = 0


@njit(nogil=True)
def _copy(target, at, source, start, count):
    for i in range(count):
        target[at + i] = source[start + i]


@kept(DIGEST)
def find_range(variant, old, new, floating, block, first_word, rows, room, positions, symbols, extra, cursor, advance):
    """Write rows, positions, symbols and extra bits of the changes; ``cursor`` holds the ends, and the sum's change."""
    prefer_wide()
    width = room.first.itemsize
    flips = (_u64(0) - floating) & ((_u64(1) << _u64(8 * width - 1)) - _u64(1))
    at_symbol, at_position, at_bit = cursor[0], cursor[1], cursor[2]
    change = _u64(0)
    for number in range(rows.shape[0]):
        begin = number * block * width
        stop = min(begin + block * width, old.size)
        whole, rest = (stop - begin) // _LINE, (stop - begin) % _LINE
        key = (first_word + _u64(begin >> 3) + _u64(1)) * _KEY
        count = 0
        for first in range(0, whole, _TILE):
            found = _changed_lines(variant, old, new, begin, first, min(_TILE, whole - first), room.lines)
            count, more = _take_changes(
                variant, old, new, begin, room.lines, found, key, advance, room.old_line, room.index, room.first,
                room.second, count,
            )  # fmt: skip
            change += _u64(more)
        if rest:
            _clear(room.old_line)
            _clear(room.new_line)
            _copy(room.old_line, 0, old, stop - rest, rest)
            _copy(room.new_line, 0, new, stop - rest, rest)
            room.lines[0] = whole
            count, more = _take_changes(
                variant, room.old_line, room.new_line, -_LINE * whole, room.lines, 1, key, 1, room.old_line,
                room.index, room.first, room.second, count,
            )  # fmt: skip
            change += _u64(more)
            if advance:
                _copy(old, stop - rest, room.old_line, 0, rest)
        at_bit = describe(
            room.first[:count], room.second[:count], symbols[at_symbol : at_symbol + count], flips, extra, at_bit
        )
        at_symbol += count
        numel = (stop - begin) // width
        out = positions[at_position:]
        if 2 * count > numel:
            left_out = complement(room.index[:count], numel, room.other)
            form, size = pack_positions(room.other[:left_out], numel, True, out)
        else:
            form, size = pack_positions(room.index[:count], numel, False, out)
        rows[number, 0], rows[number, 1], rows[number, 2] = form, count, size
        at_position += size
    cursor[0], cursor[1], cursor[2] = at_symbol, at_position, at_bit
    cursor[3] = _i64(_u64(cursor[3]) + change)


@njit(nogil=True)
def _group_lines(index, distances, lines, deltas, base, ahead, stride):
    """Spread the distances of ascending positions over the lines that have changes; return the number of lines."""
    elements = _LINE // distances.itemsize
    within, shift = _u64(elements - 1), _u64(top_bit(_u64(elements)))
    room = deltas[: min(index.size * elements, deltas.size)]
    for i in range(room.size):
        room[i] = 0
    count, before = _u64(0), ~_u64(0)
    for i in range(index.size):
        position = _u64(index[i])
        line = position >> shift
        # Without a branch, too: how many changes a line has cannot be predicted.
        count += _u64(line != before)
        before = line
        lines[count - _u64(1)] = line
        if stride:
            simd.fetch(base, ahead + i * stride)
        deltas[((count - _u64(1)) << shift) | (position & within)] = distances[i]
    return _i64(count)


@kept(DIGEST)
def apply_range(variant, base, floating, block, first_word, rows, room, positions, symbols, extra, cursor, mode):
    """Check changes and sum up words before and after, or write the changes; return 0, or the key of a fault."""
    prefer_wide()
    width = room.first.itemsize
    flips = (_u64(0) - floating) & ((_u64(1) << _u64(8 * width - 1)) - _u64(1))
    at_symbol, at_position, at_bit = cursor[0], cursor[1], cursor[2]
    change, total = _u64(0), _u64(0)
    writes = _i64(mode == formats.WRITE or mode == formats.WRITE_CHECKED)
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
        whole, rest = (stop - begin) // _LINE, (stop - begin) % _LINE
        # A third of the next block is fetched in each of three loops.
        ahead, stride = stop, 0
        if count and simd.FETCH_FROM * count >= whole and number + 1 < rows.shape[0]:
            stride = min(_LINE, _LINE * whole // (3 * count))
        if mode == formats.CHECK:
            total += _sum_words(variant, base[begin:stop], first_word + _u64(begin >> 3))
        listed = numel - count if form >= _INVERTED else count
        data = positions[at_position : at_position + size]
        if not unpack_positions(form & (_INVERTED - 1), listed, numel, data, room.index, base, ahead, stride):
            return 2
        at_position += size
        at_bit = distances_of(symbols[at_symbol : at_symbol + count], room.first, extra, at_bit)
        if at_bit < 0:
            return -at_bit
        at_symbol += count
        index = room.index
        if form >= _INVERTED:
            complement(room.index[:listed], numel, room.other)
            index = room.other
        ahead += count * stride
        found = _group_lines(index[:count], room.first[:count], room.lines, room.second, base, ahead, stride)
        ahead += count * stride
        last = min(_LINE, (stop + _LINE * whole - ahead) // max(found, 1)) if stride else 0
        key = (first_word + _u64(begin >> 3) + _u64(1)) * _KEY
        rest = rest if found and room.lines[found - 1] == whole else 0
        found -= 1 if rest else 0
        if mode == formats.WRITE:
            _write_lines(variant, base, begin, room.lines, found, room.second, flips, ahead, last)
        else:
            change += _check_lines(
                variant, base, begin, room.lines, found, room.second, flips, ahead, last, key, writes, room.new_line
            )
        if rest:
            _clear(room.old_line)
            _copy(room.old_line, 0, base, stop - rest, rest)
            room.lines[0] = whole
            change += _check_lines(
                variant, room.old_line, -_LINE * whole, room.lines, 1, room.second[found * (_LINE // width) :], flips,
                0, 0, key, writes, room.new_line,
            )  # fmt: skip
            if writes:
                _copy(base, stop - rest, room.old_line, 0, rest)
    cursor[0], cursor[1], cursor[2] = at_symbol, at_position, at_bit
    if mode != formats.WRITE:
        cursor[3] = _i64(_u64(cursor[3]) + change)
        cursor[4] = _i64(_u64(cursor[4]) + total)
    return 0
