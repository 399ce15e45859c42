"""Where the matrices of a flat vector lie, and the factors of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError

__all__ = ["MatrixColumns", "MatrixTable"]


class MatrixColumns(NamedTuple):
    """The columns of a :class:`MatrixTable`, as compiled code takes them: in one object."""

    offset: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    first_tile: npt.NDArray[np.int64]


class MatrixTable:
    """The matrices of a flat float32 vector, row by row, and where their factors lie in two other vectors.

    The left factors of all matrices lie one behind the other in a vector of ``left_numel`` elements, each ``[rank,
    rows]``; the right ones in one of ``right_numel``, each ``[rank, columns]``.

    Args:
        offset: Index in the vector of each matrix's first element; matrices ascend and do not overlap.
        rows, columns: Of each matrix, at least 1.
        rank: Vectors of each factor, at least 1.

    Attributes:
        extent: Elements that the vector must have at least.
        columns: All columns, and the rows before each matrix, and the tiles of 2048 columns before each.

    Raises:
        HyperparameterError: the columns have different lengths, or matrices overlap or have no elements.

    Example:
        >>> table = MatrixTable(offset=[0, 100], rows=[10, 3], columns=[10, 4], rank=[2, 1])
        >>> table.extent, table.left_numel, table.right_numel
        (112, 23, 24)
    """

    __slots__ = ("columns", "extent", "left_numel", "matrices", "numel", "rank", "right_numel", "tiles", "total_rows")

    TILE = 2048
    """Columns whose sums over rows are in hand at a time: with those of each vector of a factor, in the L1 cache."""

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
