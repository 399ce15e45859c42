"""Products with thin factors, and orthonormal factors: checked operations, defined in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.table import LANES


class MatrixColumns(NamedTuple):
    """The columns of a :class:`MatrixTable`, as one argument of compiled code."""

    offset: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    first_tile: npt.NDArray[np.int64]


class MatrixTable:
    """The matrices of a flat float32 vector, stored row by row, and the places of their factors in two other vectors.

    The vector of left factors has ``left_numel`` elements: the factors of all matrices in order, each ``[rank, rows]``.
    The vector of right factors has ``right_numel`` elements, each factor being ``[rank, columns]``.

    Args:
        offset: Index in the vector of each matrix's first element; matrices ascend and do not overlap.
        rows, columns: Number of rows and columns of each matrix, at least 1.
        rank: Number of vectors in each factor, at least 1.

    Attributes:
        extent: Number of elements that the vector must have at least.
        columns: The table as one argument of compiled code, with each matrix's first row and first tile of columns.

    Raises:
        HyperparameterError: the columns have different lengths, or matrices overlap or have no elements.

    Example:
        >>> table = MatrixTable(offset=[0, 100], rows=[10, 3], columns=[10, 4], rank=[2, 1])
        >>> table.extent, table.left_numel, table.right_numel
        (112, 23, 24)
    """

    __slots__ = ("columns", "extent", "left_numel", "matrices", "numel", "rank", "right_numel", "tiles", "total_rows")

    TILE = 2048
    """Columns that are summed over rows at a time, so that the sums stay in the L1 cache."""

    def __init__(self, offset: Sequence[int], rows: Sequence[int], columns: Sequence[int], rank: Sequence[int]) -> None:
        at, height, width, ranks = (np.array(column, np.int64) for column in (offset, rows, columns, rank))
        self.matrices = len(at)
        if any(column.shape != (self.matrices,) for column in (height, width, ranks)):
            raise HyperparameterError("matrix table: pass one offset, rows, columns and rank a matrix")
        if self.matrices and min(int(c.min()) for c in (height, width, ranks)) < 1:
            raise HyperparameterError("matrix table: rows, columns and rank must be at least 1")
        if self.matrices and (int(at[0]) < 0 or np.any(at[1:] < (at + height * width)[:-1])):
            raise HyperparameterError("matrix table: matrices overlap or descend: sort them by offset")
        left, right = _starts(ranks * height), _starts(ranks * width)
        first_row, first_tile = _starts(height), _starts(-(-width // self.TILE))
        self.left_numel, self.right_numel = int(left[-1]), int(right[-1])
        self.total_rows, self.tiles = int(first_row[-1]), int(first_tile[-1])
        self.numel = int((height * width).sum())
        self.extent = int(at[-1] + height[-1] * width[-1]) if self.matrices else 0
        self.columns = MatrixColumns(at, height, width, ranks, left, right, first_row, first_tile)
        for column in self.columns:
            column.flags.writeable = False

    def __repr__(self) -> str:
        return f"MatrixTable({self.matrices} matrices, {self.numel} elements)"


def _starts(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


PANEL = 256
"""Rows of a panel, whose products are summed before they are added to the sum of earlier panels."""

VANISHED = 1e-6
"""A vector counts as zero if at most this share of its length is left after the part along earlier vectors."""


class LowRankOperations(Front):
    """The operations of the family ``low_rank`` on a matrix M, its left factor P and its right factor Q.

    Factors are stored vector by vector: P is float32 ``[rank, rows]`` and Q float32 ``[rank, columns]``, so that a
    product with M reads it row by row. Every product of two floats is rounded to float32 before it is added, and sums
    have a fixed order: the bits depend neither on the machine nor on other parts of the vector.
    """

    def multiply_right(self, x: torch.Tensor, table: MatrixTable, right: torch.Tensor, left: torch.Tensor) -> None:
        """Write P = M Q of all matrices, ``left[k, i] = sum_j M[i, j] right[k, j]``, into ``left``.

        ``x`` is float32, ``right`` float32 ``[right_numel]`` and ``left`` float32 ``[left_numel]``. Sum l of
        sixteen starts at zero and adds the products of columns l, l + 16, ... in order. Then sums eight apart are
        added, then those four, two and one apart.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_right(x.detach(), table, right.detach(), left)

    def multiply_left(self, x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor) -> None:
        """Write Q = M^T P of all matrices, ``right[k, j] = sum_i M[i, j] left[k, i]``, into ``right``.

        ``x`` is float32, ``left`` float32 ``[left_numel]`` and ``right`` float32 ``[right_numel]``. The products of a
        panel of 256 rows are added in order, from zero on; then the sums of panels are added in order.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_left(x.detach(), table, left.detach(), right)

    def multiply_out(
        self, left: torch.Tensor, right: torch.Tensor, table: MatrixTable, x: torch.Tensor, weight: float | None = None
    ) -> None:
        """Write M = P Q^T of all matrices, ``sum_k left[k, i] right[k, j]`` in the order of k, into ``x``.

        ``left`` is float32 ``[left_numel]``, ``right`` float32 ``[right_numel]``, and ``x`` float32; its
        elements between matrices keep their values.

        Args:
            weight: If given, ``weight * M``, rounded to float32, is added to ``x``; None: M replaces it.

        Raises:
            HyperparameterError: a vector has another type or size.
        """
        self._check(x, table, left, right)
        if table.matrices:
            self._serve("low_rank").multiply_out(left.detach(), right.detach(), table, x, weight)

    def orthonormalise(self, factors: torch.Tensor, table: MatrixTable, side: str) -> torch.Tensor:
        """Return factors with the same spans, orthonormal, by the modified Gram-Schmidt process in float64.

        ``factors`` is float32 ``[left_numel]`` where ``side`` is "left", or ``[right_numel]`` where it is "right". A
        vector that is a linear combination of earlier ones, up to rounding, becomes zero. Sums are made by halves: of n
        elements, filled up with zeros to a power of two, i and i + n/2 are added until one is left.

        Raises:
            HyperparameterError: the vector has another type or size.
        """
        check_vector("factors", factors, torch.float32, table.left_numel if side == "left" else table.right_numel)
        found = torch.empty_like(factors)
        if table.matrices:
            self._serve("low_rank").orthonormalise(factors.detach(), table, side, found)
        return found

    @staticmethod
    def _check(x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor) -> None:
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("left", left, torch.float32, table.left_numel)
        check_vector("right", right, torch.float32, table.right_numel)


def multiply_right(x: torch.Tensor, table: MatrixTable, right: torch.Tensor, left: torch.Tensor) -> None:
    for matrix, p, q in _matrices(x, table, left, right):
        empty = -matrix.shape[1] % LANES
        blocks = pad(matrix, (0, empty)).view(len(matrix), -1, LANES)
        for vector, other in zip(p, pad(q, (0, empty)).view(len(q), -1, LANES)):
            sums = torch.zeros(len(matrix), LANES, dtype=torch.float32, device="cpu")
            for number, part in enumerate(other):
                sums += blocks[:, number] * part
            while sums.shape[1] > 1:
                half = sums.shape[1] // 2
                sums = sums[:, :half] + sums[:, half:]
            vector.copy_(sums[:, 0])


def multiply_left(x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor) -> None:
    for matrix, p, q in _matrices(x, table, left, right):
        for vector, other in zip(q, p):
            vector.zero_()
            for panel, factors in zip(matrix.split(PANEL), other.split(PANEL)):
                sums = torch.zeros_like(vector)
                for row, factor in zip(panel, factors):
                    sums += row * factor
                vector += sums


def multiply_out(
    left: torch.Tensor, right: torch.Tensor, table: MatrixTable, x: torch.Tensor, weight: float | None
) -> None:
    for matrix, p, q in _matrices(x, table, left, right):
        product = p[0][:, None] * q[0]
        for k in range(1, len(p)):
            product += p[k][:, None] * q[k]
        if weight is None:
            matrix.copy_(product)
        else:
            matrix += product * torch.tensor(weight, dtype=torch.float32, device="cpu")


def orthonormalise(factors: torch.Tensor, table: MatrixTable, side: str, out: torch.Tensor) -> None:
    columns = table.columns
    starts, lengths = (columns.left, columns.rows) if side == "left" else (columns.right, columns.columns)
    for begin, length, rank in zip(starts.tolist(), lengths.tolist(), columns.rank.tolist()):
        of_matrix = slice(begin, begin + rank * length)
        q = pad(factors[of_matrix].view(rank, length).double(), (0, (1 << (length - 1).bit_length()) - length))
        before = _sum(q * q).sqrt()
        for i in range(rank):
            size = _sum(q[i] * q[i]).sqrt()
            vanished = size <= VANISHED * before[i]
            q[i] = torch.where(vanished, 0.0, q[i] / torch.where(vanished, 1.0, size))
            for other in q[i + 1 :]:
                other -= q[i] * _sum(q[i] * other)
        out[of_matrix].copy_(q[:, :length].reshape(-1))


def _matrices(
    x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views of each matrix, ``[rows, columns]``, and its factors, ``[rank, rows]`` and ``[rank, columns]``."""
    c = table.columns
    for number in range(table.matrices):
        at, rows, columns, rank = (int(column[number]) for column in (c.offset, c.rows, c.columns, c.rank))
        p, q = int(c.left[number]), int(c.right[number])
        yield (
            x[at : at + rows * columns].view(rows, columns),
            left[p : p + rank * rows].view(rank, rows),
            right[q : q + rank * columns].view(rank, columns),
        )


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Add the elements of the last dimension, a power of two of them, by halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
