# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments, runs and rows of signs; see ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.ternary.loops import MIN_STREAMED, STREAMED_GROUPS, block_maximum

__all__ = ["finite_range", "sign_decode_range", "sign_encode_range", "sign_sums_range", "sign_vote_range"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "ae53055c2672e0db"

_TILE_BYTES = 512
"""Bytes of a row that are counted before the next ones: with 15 planes 7.5 KiB."""

_PLANES = 15
"""Bits of the largest count."""

block_sign_sums = either("block_sign_sums", "signs.scalar", "signs.simd")
sign_bytes = either("sign_bytes", "signs.scalar", "signs.simd")
decode_rows = either("decode_rows", "signs.scalar", "signs.simd")


@njit(nogil=True, cache=True)
def finite_range(variant, x, offset, numel, begin, end, finite):
    """Tell of segments ``begin .. end`` whether all elements are finite."""
    prefer_wide()
    for segment in range(begin, end):
        at, stop = offset[segment], offset[segment] + numel[segment]
        largest = np.int32(0)
        while at < stop and largest < 0x7F800000:
            count = min(stop - at, 4096)
            largest = block_maximum(variant, x, at, count, 4096)
            at += count
        finite[segment] = largest < 0x7F800000


@njit(nogil=True, cache=True)
def sign_sums_range(variant, x, offset, numel, begin, end, above, below, positive, scratch):
    """Add up segments ``begin .. end`` by sign. ``scratch`` (float64 ``[2]``) turns bits into numbers."""
    prefer_wide()
    double_bits = scratch.view(np.int64)
    single = scratch[1:].view(np.float32)
    single_bits = scratch[1:].view(np.int32)
    for segment in range(begin, end):
        at, stop = offset[segment], offset[segment] + numel[segment]
        plus, minus, number = 0.0, 0.0, 0
        while at < stop:
            count = min(stop - at, 4096)
            bits = block_maximum(variant, x, at, count, 4096)
            if bits >= 0x7F800000:
                plus, minus, number = np.inf, np.inf, 0
                break
            exponent = max((bits >> 23) - 127, -104)
            single_bits[0] = np.int32((23 - exponent + 127) << 23)
            total, size, passed = block_sign_sums(variant, x, at, count, single[0], 4096)
            double_bits[0] = np.int64(exponent - 23 + 1023) << 52
            plus += np.float64((size + total) >> 1) * scratch[0]
            minus += np.float64((size - total) >> 1) * scratch[0]
            number += passed
            at += count
        above[segment] = plus
        below[segment] = minus
        positive[segment] = number


@njit(nogil=True, cache=True)
def sign_encode_range(variant, x, offset, numel, first_group, begin, end, segment, out):
    """Encode groups ``begin .. end``, the first of which lies in ``segment``, into ``out``."""
    prefer_wide()
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = 80 * (group - first_group[segment])
        stop = min(end, first_group[segment + 1])
        count = min(80 * (stop - group), numel[segment] - within)
        at = 10 * (group - begin)
        sign_bytes(variant, x, offset[segment] + within, count, out, at, 2560)
        # What the body leaves of the last group: it writes whole bytes, at least.
        for i in range(at + (count + 7) // 8, 10 * (stop - begin)):
            out[i] = np.uint8(0)
        group = stop


@njit(nogil=True)
def _ripple(planes, first, last, carry, size):
    """Add a bit a position, worth 2^first, to the counts."""
    for plane in range(first, last):
        digits = planes[plane, :size]
        for i in range(digits.size):
            both = digits[i] & carry[i]
            digits[i] ^= carry[i]
            carry[i] = both


@njit(nogil=True)
def _count_four(planes, a, b, c, d, carry):
    """Add four rows to the counts but for what is carried to the plane of fours."""
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


@njit(nogil=True, cache=True)
def sign_vote_range(rows, stride, number, begin, end, out):
    """Vote on bytes ``begin .. end`` of the rows.

    Counts are kept bit by bit: plane p of a tile holds bit p of the counts of all its positions.
    """
    prefer_wide()
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
            a, b = rows[at : at + size], rows[at + stride : at + stride + size]
            c, d = rows[at + 2 * stride : at + 2 * stride + size], rows[at + 3 * stride : at + 3 * stride + size]
            _count_four(planes, a, b, c, d, carry[:size])
            row += 4
            # Counts of up to ``row`` need no plane beyond those of its bits.
            last = 2
            while row >> last:
                last += 1
            _ripple(planes, 2, last, carry, size)
        while row < number:
            at = first + row * stride
            carry[:size] = rows[at : at + size]
            row += 1
            last = 0
            while row >> last:
                last += 1
            _ripple(planes, 0, last, carry, size)
        target = out[first : first + size]
        # At least ``least``, from the lowest bit up: the higher bit decides unless it is equal.
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
def _decode_end(rows, stride, number, bit, count, above, below, run, x, at, accumulate):
    """Do as ``decode_rows``, without a look beyond the last byte."""
    for i in range(count):
        for row in range(number):
            here = 8 * row * stride + bit + i
            value = above[row, run] if rows[here >> 3] >> np.uint8(here & 7) & np.uint8(1) else below[row, run]
            x[at + i] = x[at + i] + value if accumulate or row else value


@njit(nogil=True, cache=True)
def sign_decode_range(
    variant, rows, stride, number, offset, numel, first_group, length, phase, first_run, above, below, begin, end,
    segment, x, accumulate,
):  # fmt: skip
    """Decode groups ``begin .. end``, whose bits are the first of each row."""
    prefer_wide()
    streamed = end - begin >= STREAMED_GROUPS
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = 80 * (group - first_group[segment])
        stop = min(end, first_group[segment + 1])
        last = min(80 * (stop - first_group[segment]), numel[segment])
        shift = 80 * (first_group[segment] - begin)
        while within < last:
            place = phase[segment] + within
            run = first_run[segment] + place // length[segment]
            count = min(last - within, length[segment] - place % length[segment])
            at, bit = offset[segment] + within, shift + within
            # The bodies may read three bytes too many.
            safe = 8 * (rows.size - (number - 1) * stride) - 32 - bit
            inner = count if count <= safe else max(0, safe & -16)
            decode_rows(
                variant, rows, stride, number, bit, inner, above, below, above.shape[1], run, x, at, accumulate,
                streamed and inner >= MIN_STREAMED,
            )  # fmt: skip
            if inner < count:
                _decode_end(
                    rows, stride, number, bit + inner, count - inner, above, below, run, x, at + inner, accumulate
                )
            within += count
        group = stop
