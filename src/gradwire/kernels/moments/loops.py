# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and blocks for moments, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gradwire.kernels.moments import simd
from gradwire.kernels.moments.operations import inverse
from gradwire.kernels.numba_core.compiled import Compiled, either, kept
from gradwire.kernels.numba_core.vectors import power_of_two, prefer_wide

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "f97ee2c480c9a50e"


_i32, _i64 = np.int32, np.int64


@njit(nogil=True)
def plain_block_maximum(x, first, count):
    bits = x[first : first + count].view(_i32)
    largest = _i32(0)
    for i in range(bits.size):
        largest = max(largest, _i32(bits[i] & _i32(0x7FFFFFFF)))
    return largest


@njit(nogil=True)
def plain_block_sums(x, first, count, factor):
    values = x[first : first + count]
    total, squares = _i64(0), _i64(0)
    for i in range(values.size):
        q = _i64(_i32(values[i] * factor))
        total += q
        squares += q * q
    return total, squares


block_maximum = either(plain_block_maximum, simd.block_maximum)
block_sums = either(plain_block_sums, simd.block_sums)


class MomentColumns(NamedTuple):
    """The arrays for the statistics of segments."""

    max_abs: Any
    mean: Any
    std: Any
    norm: Any


class MomentsLoops(Compiled):
    """The operations of the family ``moments``, compiled but for the inverses of a few scales."""

    inverse = staticmethod(inverse)

    def moments(self, x, table, out):
        values = x.numpy()
        columns = MomentColumns(out.max_abs.numpy(), out.mean.numpy(), out.std.numpy(), out.norm.numpy())

        def work(first: int, last: int) -> None:
            moments_range(self.simd, values, table.columns, first, last, columns)

        # The blocks of a segment are added in order, so one thread takes a whole segment.
        self.split_segments(table, work)


@njit(nogil=True)
def block_exponent(bits):
    """Return the exponent of a block's largest magnitude, given its bits."""
    return max((bits >> 23) - 127, -104)


@kept(DIGEST)
def moments_range(simd, x, table, begin, end, out):
    """Compute the moments of segments ``begin .. end``."""
    prefer_wide()
    for segment in range(begin, end):
        at, size = table.offset[segment], table.numel[segment]
        rest, first, second = size, 0.0, 0.0
        largest = np.int32(0)
        while rest > 0:
            count = min(rest, 4096)
            bits = block_maximum(simd, x, at, count)
            largest = max(largest, bits)
            if bits >= 0x7F800000:
                break
            exponent = block_exponent(bits)
            s1, s2 = block_sums(simd, x, at, count, np.float32(power_of_two(23 - exponent)))
            first += np.float64(s1) * power_of_two(exponent - 23)
            second += np.float64(s2) * power_of_two(2 * (exponent - 23))
            at += count
            rest -= count
        if largest >= 0x7F800000:
            largest = np.int32(0x7F800000)
            first, second = 0.0, 0.0
        average = first / max(size, 1)
        variance = second / max(size, 1) - average * average
        out.max_abs.view(np.int32)[segment] = largest
        out.mean[segment] = average
        out.std[segment] = np.sqrt(max(variance, 0.0))
        out.norm[segment] = np.sqrt(second)
