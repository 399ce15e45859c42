# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops for signs over segments, runs and rows, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gradwire.kernels.moments.loops import block_exponent, block_maximum
from gradwire.kernels.numba_core.compiled import (
    MIN_STREAMED,
    STREAMED_GROUPS,
    Compiled,
    copy_into,
    either,
    find_segment,
    kept,
    next_piece,
    rows_of,
)
from gradwire.kernels.numba_core.vectors import power_of_two, prefer_wide
from gradwire.kernels.packing.loops import end_streams
from gradwire.kernels.signs import simd
from gradwire.kernels.table import GROUP_SIZE, SIGN_BYTES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "b2936640ae21ed2d"


_TILE = 2048

_i32, _i64, _u8, _f32 = np.int32, np.int64, np.uint8, np.float32


_TILE_BYTES = 512
"""Bytes of each row that are counted at a time: 7.5 KiB with 15 planes."""
_PLANES = 15
"""Bits of the largest count."""


@njit(nogil=True)
def plain_block_sign_sums(x, first, count, factor):
    values = x[first : first + count]
    total, size, positive = _i64(0), _i64(0), _i64(0)
    for i in range(values.size):
        q = _i64(_i32(values[i] * factor))
        total += q
        size += abs(q)
        positive += _i64(values[i] >= _f32(0))
    return total, size, positive


@njit(nogil=True)
def plain_sign_bytes(x, first, count, out, at):
    values = x[first : first + count]
    whole = count // 8
    target = out[at : at + (count + 7) // 8]
    for i in range(whole):
        eight = values[8 * i : 8 * i + 8]
        octet = _u8(0)
        for k in range(8):
            octet |= _u8(_u8(eight[k] >= _f32(0)) << _u8(k))
        target[i] = octet
    if count % 8:
        octet = _u8(0)
        for k in range(count - 8 * whole):
            octet |= _u8(_u8(values[8 * whole + k] >= _f32(0)) << _u8(k))
        target[whole] = octet


@njit(nogil=True)
def _decode_row(octets, bit, high, low, target, add):
    for i in range(target.size):
        here = bit + i
        value = high if octets[here >> 3] >> _u8(here & 7) & _u8(1) else low
        target[i] = target[i] + value if add else value


@njit(nogil=True)
def plain_decode_rows(rows, bit, count, values, run, x, at, accumulate, streamed):
    # A tile at a time, so that it stays in the L1 cache while all rows are added to it.
    for first in range(0, count, _TILE):
        target = x[at + first : at + min(first + _TILE, count)]
        for row in range(rows.number):
            place = 8 * row * rows.stride + bit + first
            high, low = values.above[row, run], values.below[row, run]
            _decode_row(rows.octets, place, high, low, target, accumulate or row > 0)


block_sign_sums = either(plain_block_sign_sums, simd.block_sign_sums)
sign_bytes = either(plain_sign_bytes, simd.sign_bytes)
decode_rows = either(plain_decode_rows, simd.decode_rows)


class SumColumns(NamedTuple):
    """The arrays for the sums of segments."""

    above: Any
    below: Any
    positive: Any


class Values(NamedTuple):
    """The values of the bits 1 and 0 for each row and run: matrices with ``columns`` columns."""

    above: Any
    below: Any
    columns: int


class SignsLoops(Compiled):
    """The operations of the family ``signs``, compiled."""

    def finite(self, x, table, out):
        values, found = x.numpy(), out.numpy()
        self.split_segments(table, lambda a, b: finite_range(self.simd, values, table.columns, a, b, found))

    def sign_sums(self, x, table, out):
        values, sums = x.numpy(), SumColumns(out.above.numpy(), out.below.numpy(), out.count.numpy())
        self.split_segments(table, lambda a, b: sign_sums_range(self.simd, values, table.columns, a, b, sums))

    def sign_encode(self, x, table, begin, end, out):
        values, octets = x.numpy(), out.numpy()

        def work(first: int, last: int) -> None:
            part = octets[SIGN_BYTES * first : SIGN_BYTES * last]
            sign_encode_range(self.simd, values, table.columns, begin + first, begin + last, part)

        self.split(end - begin, 1, GROUP_SIZE, work)

    def sign_vote(self, rows, out):
        payloads, voted = rows_of(rows), out.numpy()
        self.split(len(voted), 1, 8 * rows.shape[0], lambda begin, end: sign_vote_range(payloads, begin, end, voted))

    def sign_decode(self, rows, runs, above, below, begin, end, x, accumulate):
        values, target, payloads = Values(above.numpy(), below.numpy(), runs.runs), x.numpy(), rows_of(rows)

        def work(first: int, last: int) -> None:
            part = payloads._replace(octets=payloads.octets[SIGN_BYTES * first :])
            sign_decode_range(
                self.simd, part, runs.table.columns, runs.columns, values, begin + first, begin + last, target,
                accumulate,
            )  # fmt: skip

        self.split(end - begin, 1, GROUP_SIZE * rows.shape[0], work)


@kept(DIGEST)
def finite_range(simd, x, table, begin, end, finite):
    """Find out for segments ``begin .. end`` whether all elements are finite."""
    prefer_wide()
    for segment in range(begin, end):
        at, stop = table.offset[segment], table.offset[segment] + table.numel[segment]
        largest = np.int32(0)
        while at < stop and largest < 0x7F800000:
            count = min(stop - at, 4096)
            largest = block_maximum(simd, x, at, count)
            at += count
        finite[segment] = largest < 0x7F800000


@kept(DIGEST)
def sign_sums_range(simd, x, table, begin, end, out):
    """Add up segments ``begin .. end`` by sign."""
    prefer_wide()
    for segment in range(begin, end):
        at, stop = table.offset[segment], table.offset[segment] + table.numel[segment]
        plus, minus, number = 0.0, 0.0, 0
        while at < stop:
            count = min(stop - at, 4096)
            bits = block_maximum(simd, x, at, count)
            if bits >= 0x7F800000:
                plus, minus, number = np.inf, np.inf, 0
                break
            exponent = block_exponent(bits)
            total, size, passed = block_sign_sums(simd, x, at, count, np.float32(power_of_two(23 - exponent)))
            unit = power_of_two(exponent - 23)
            plus += np.float64((size + total) >> 1) * unit
            minus += np.float64((size - total) >> 1) * unit
            number += passed
            at += count
        out.above[segment] = plus
        out.below[segment] = minus
        out.positive[segment] = number


@kept(DIGEST)
def sign_encode_range(simd, x, table, begin, end, out):
    """Encode groups ``begin .. end`` into ``out``."""
    prefer_wide()
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        at = 10 * (group - begin)
        sign_bytes(simd, x, piece.at, piece.numel, out, at)
        # The body writes whole bytes; the rest of the last group is zero.
        for i in range(at + (piece.numel + 7) // 8, 10 * (piece.stop - begin)):
            out[i] = np.uint8(0)
        group = piece.stop


@njit(nogil=True)
def _ripple(planes, first, last, carry, size):
    """Add one bit for each position, worth 2^first, to the counts."""
    for plane in range(first, last):
        digits = planes[plane, :size]
        for i in range(digits.size):
            both = digits[i] & carry[i]
            digits[i] ^= carry[i]
            carry[i] = both


@njit(nogil=True)
def _count_four(planes, a, b, c, d, carry):
    """Add four rows to planes 0 and 1 of the counts, and write the carry for plane 2."""
    ones, twos = planes[0, : a.size], planes[1, : a.size]
    for i in range(a.size):
        low, mid = ones[i], twos[i]
        half = low ^ a[i]
        first = (low & a[i]) | (half & b[i])
        half ^= b[i]
        second = (half & c[i]) | ((half ^ c[i]) & d[i])
        ones[i] = half ^ c[i] ^ d[i]
        rest = mid ^ first
        carry[i] = (mid & first) | (rest & second)
        twos[i] = rest ^ second


@kept(DIGEST)
def sign_vote_range(rows, begin, end, out):
    """Vote on bytes ``begin .. end`` of the rows.

    Counts are stored bit by bit: plane p of a tile holds bit p of the counts of all positions.
    """
    prefer_wide()
    octets, stride, number = rows.octets, rows.stride, rows.number
    planes = np.empty((_PLANES, _TILE_BYTES), np.uint8)
    carry = np.empty(_TILE_BYTES, np.uint8)
    least = (number + 1) // 2
    for first in range(begin, end, _TILE_BYTES):
        size = min(_TILE_BYTES, end - first)
        used = 0
        while number >> used:
            planes[used, :size] = np.uint8(0)
            used += 1
        planes[1, :size] = np.uint8(0)
        row = 0
        while row + 4 <= number:
            at = first + row * stride
            a, b = octets[at : at + size], octets[at + stride : at + stride + size]
            c, d = octets[at + 2 * stride : at + 2 * stride + size], octets[at + 3 * stride : at + 3 * stride + size]
            _count_four(planes, a, b, c, d, carry[:size])
            row += 4
            # Counts up to ``row`` have no more bits than ``row``.
            last = 2
            while row >> last:
                last += 1
            _ripple(planes, 2, last, carry, size)
        while row < number:
            at = first + row * stride
            copy_into(carry[:size], octets[at : at + size])
            row += 1
            last = 0
            while row >> last:
                last += 1
            _ripple(planes, 0, last, carry, size)
        target = out[first : first + size]
        # Compared with ``least`` from the lowest bit up: a higher bit decides unless it is equal.
        target[:] = np.uint8(255)
        for plane in range(used):
            digits = planes[plane, :size]
            if least >> plane & 1:
                for i in range(target.size):
                    target[i] &= digits[i]
            else:
                for i in range(target.size):
                    target[i] |= digits[i]


@njit(nogil=True)
def _decode_end(rows, bit, count, values, run, x, at, accumulate):
    """Decode like ``decode_rows``, without reading beyond the last byte."""
    for i in range(count):
        for row in range(rows.number):
            here = 8 * row * rows.stride + bit + i
            high = rows.octets[here >> 3] >> np.uint8(here & 7) & np.uint8(1)
            value = values.above[row, run] if high else values.below[row, run]
            x[at + i] = x[at + i] + value if accumulate or row else value


@kept(DIGEST)
def sign_decode_range(simd, rows, table, runs, values, begin, end, x, accumulate):
    """Decode groups ``begin .. end``; the bits of ``begin`` are the first of each row."""
    prefer_wide()
    streamed = end - begin >= STREAMED_GROUPS
    segment, group = find_segment(table, begin), begin
    while group < end:
        piece = next_piece(table, segment, group, end)
        segment = piece.segment
        length, done = runs.length[segment], 0
        while done < piece.numel:
            place = runs.phase[segment] + piece.within + done
            run = runs.first[segment] + place // length
            count = min(piece.numel - done, length - place % length)
            at, bit = piece.at + done, 80 * (group - begin) + done
            # The bodies may read three bytes too many.
            safe = 8 * (rows.octets.size - (rows.number - 1) * rows.stride) - 32 - bit
            inner = count if count <= safe else max(0, safe & -16)
            long = streamed and inner >= MIN_STREAMED
            decode_rows(simd, rows, bit, inner, values, run, x, at, accumulate, long)
            if inner < count:
                _decode_end(rows, bit + inner, count - inner, values, run, x, at + inner, accumulate)
            done += count
        group = piece.stop
    end_streams(simd)
