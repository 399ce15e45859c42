# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops of products with thin factors, with a plain body. ``ternary/loops.py`` states the rules.

Only sums along a row need explicit vectors: LLVM vectorises loops that treat all columns alike.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.low_rank import simd
from gradwire.kernels.low_rank.operations import PANEL, VANISHED, MatrixTable
from gradwire.kernels.numba_core.compiled import Compiled, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.table import LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "9ab87abfe4decfba"


_TILE, _PANEL, _VANISHED = MatrixTable.TILE, PANEL, VANISHED
_f32, _f64 = np.float32, np.float64


@njit(nogil=True)
def plain_dot(a, b):
    sums = np.zeros(LANES, np.float32)
    for j in range(a.size):
        sums[j % LANES] += _f32(a[j] * b[j])
    half = LANES // 2
    while half:
        for lane in range(half):
            sums[lane] += sums[lane + half]
        half //= 2
    return sums[0]


dot = either(plain_dot, simd.dot)


class LowRankLoops(Compiled):
    """The operations of the family ``low_rank``, compiled."""

    def multiply_right(self, x, table, right, left):
        values, others, out = x.numpy(), right.numpy(), left.numpy()

        def work(begin: int, end: int) -> None:
            multiply_right_range(self.simd, values, table.columns, begin, end, others, out)

        self.split(table.total_rows, 1, table.numel // table.total_rows, work)

    def multiply_left(self, x, table, left, right):
        values, others, out = x.numpy(), left.numpy(), right.numpy()

        def work(begin: int, end: int) -> None:
            multiply_left_range(self.simd, values, table.columns, begin, end, others, out)

        self.split(table.tiles, 1, table.numel // table.tiles, work)

    def multiply_out(self, left, right, table, x, weight):
        first, second, out = left.numpy(), right.numpy(), x.numpy()
        factor = _f32(0.0 if weight is None else weight)

        def work(begin: int, end: int) -> None:
            multiply_out_range(self.simd, first, second, table.columns, begin, end, weight is not None, factor, out)

        self.split(table.total_rows, 1, table.numel // table.total_rows, work)

    def orthonormalise(self, factors, table, side, out):
        values, found, c = factors.numpy(), out.numpy(), table.columns
        starts, lengths = (c.left, c.rows) if side == "left" else (c.right, c.columns)

        def work(begin: int, end: int) -> None:
            orthonormalise_range(self.simd, values, starts, lengths, c.rank, begin, end, found)

        self.split(table.matrices, 1, table.numel // table.matrices, work)


@njit(nogil=True)
def _matrix_of(starts, number):
    """Return the matrix of a row or tile, given the first row or tile of each matrix."""
    return np.searchsorted(starts, number, side="right") - 1


@njit(nogil=True)
def _row(x, begin, size):
    return x[begin : begin + size]


@kept(DIGEST)
def multiply_right_range(simd, x, table, begin, end, right, left):
    """Multiply rows ``begin .. end`` of all matrices by right factors."""
    prefer_wide()
    row = begin
    while row < end:
        m = _matrix_of(table.first_row, row)
        columns, rank = table.columns[m], table.rank[m]
        height, first = table.rows[m], table.first_row[m]
        stop = min(end, first + height)
        for i in range(row - first, stop - first):
            values = _row(x, table.offset[m] + i * columns, columns)
            for k in range(rank):
                left[table.left[m] + k * height + i] = dot(
                    simd, values, _row(right, table.right[m] + k * columns, columns)
                )
        row = stop


@kept(DIGEST)
def multiply_left_range(simd, x, table, begin, end, left, right):
    """Multiply tiles ``begin .. end`` of the columns of all matrices by left factors."""
    prefer_wide()
    for tile in range(begin, end):
        m = _matrix_of(table.first_tile, tile)
        columns, height = table.columns[m], table.rows[m]
        at = (tile - table.first_tile[m]) * _TILE
        width = min(_TILE, columns - at)
        rank = table.rank[m]
        panel_sums = np.empty((rank, width), np.float32)
        for k in range(rank):
            out = _row(right, table.right[m] + k * columns + at, width)
            out[:] = 0
        for panel in range(0, height, _PANEL):
            panel_sums[:] = 0
            stop = min(panel + _PANEL, height)
            # Four rows at a time, so that the sums are read and written a quarter as often.
            for i in range(panel, stop - 3, 4):
                begin_of_row = table.offset[m] + i * columns + at
                v0, v1 = _row(x, begin_of_row, width), _row(x, begin_of_row + columns, width)
                v2, v3 = _row(x, begin_of_row + 2 * columns, width), _row(x, begin_of_row + 3 * columns, width)
                for k in range(rank):
                    factor, target = _row(left, table.left[m] + k * height + i, 4), panel_sums[k]
                    f0, f1, f2, f3 = factor[0], factor[1], factor[2], factor[3]
                    for j in range(target.size):
                        total = _f32(_f32(target[j] + _f32(v0[j] * f0)) + _f32(v1[j] * f1))
                        target[j] = _f32(_f32(total + _f32(v2[j] * f2)) + _f32(v3[j] * f3))
            for i in range(stop - (stop - panel) % 4, stop):
                values = _row(x, table.offset[m] + i * columns + at, width)
                for k in range(rank):
                    factor_of_row, target = left[table.left[m] + k * height + i], panel_sums[k]
                    for j in range(target.size):
                        target[j] += _f32(values[j] * factor_of_row)
            for k in range(rank):
                out, part = _row(right, table.right[m] + k * columns + at, width), panel_sums[k]
                for j in range(out.size):
                    out[j] += part[j]


@kept(DIGEST)
def multiply_out_range(simd, left, right, table, begin, end, accumulate, weight, x):
    """Write, or add, rows ``begin .. end`` of all matrices, the products of their factors."""
    prefer_wide()
    room = np.empty(_TILE, np.float32)
    row = begin
    while row < end:
        m = _matrix_of(table.first_row, row)
        columns, rank = table.columns[m], table.rank[m]
        height, first = table.rows[m], table.first_row[m]
        stop = min(end, first + height)
        for i in range(row - first, stop - first):
            for at in range(0, columns, _TILE):
                width = min(_TILE, columns - at)
                out = _row(x, table.offset[m] + i * columns + at, width)
                target = room[:width] if accumulate else out
                for k in range(rank):
                    factor = left[table.left[m] + k * height + i]
                    values = _row(right, table.right[m] + k * columns + at, width)
                    if k == 0:
                        for j in range(target.size):
                            target[j] = factor * values[j]
                    else:
                        for j in range(target.size):
                            target[j] += _f32(factor * values[j])
                if accumulate:
                    for j in range(out.size):
                        out[j] += _f32(weight * target[j])
        row = stop


@njit(nogil=True)
def _halved(products):
    """Add the elements of a vector, a power of two of them, by halves; the vector is overwritten."""
    half = products.size // 2
    while half:
        lower, upper = products[:half], products[half : 2 * half]
        for j in range(lower.size):
            lower[j] += upper[j]
        half //= 2
    return products[0]


@njit(nogil=True)
def _product(a, b, products):
    """Return the sum of the products of two vectors."""
    for j in range(a.size):
        products[j] = a[j] * b[j]
    for j in range(a.size, products.size):
        products[j] = 0
    return _halved(products)


@kept(DIGEST)
def orthonormalise_range(simd, factors, starts, lengths, ranks, begin, end, out):
    """Make the factors of matrices ``begin .. end`` orthonormal."""
    prefer_wide()
    for m in range(begin, end):
        length, rank = lengths[m], ranks[m]
        size = 1
        while size < length:
            size *= 2
        products = np.empty(size, np.float64)
        q = np.empty((rank, length), np.float64)
        before = np.empty(rank, np.float64)
        for k in range(rank):
            source, vector = _row(factors, starts[m] + k * length, length), q[k]
            for j in range(vector.size):
                vector[j] = _f64(source[j])
            before[k] = np.sqrt(_product(vector, vector, products))
        for k in range(rank):
            vector, target = q[k], _row(out, starts[m] + k * length, length)
            left = np.sqrt(_product(vector, vector, products))
            if left <= _VANISHED * before[k]:
                vector[:] = 0
            else:
                for j in range(vector.size):
                    vector[j] /= left
            for j in range(vector.size):
                target[j] = _f32(vector[j])
            for later in range(k + 1, rank):
                other = q[later]
                along = _product(vector, other, products)
                for j in range(other.size):
                    other[j] -= vector[j] * along
