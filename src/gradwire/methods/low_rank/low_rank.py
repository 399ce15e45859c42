"""Parameters as matrices, and factors drawn for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.exchange.method import is_whole, require
from gradwire.exchange.segments import Parameter, Segment
from gradwire.kernels import MatrixTable
from gradwire.kernels.philox import uniform_integers
from gradwire.seeds import SHARED, parameter_key

__all__ = ["Matrix", "check_matrix_rank", "draw_factor", "matrices", "matrix_table", "shape_of"]


def check_matrix_rank(owner: str, rank: object) -> None:
    """Check a number of vectors in a factor.

    Raises:
        HyperparameterError: it is no whole number of at least 1.
    """
    whole = is_whole(rank)
    require(whole and rank >= 1, owner, f"matrix_rank is at least 1, not {rank!r}")  # type: ignore[operator]


@dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix of ``rows`` by ``columns``, row by row in memory order, and the rank it is given."""

    segment: Segment
    rows: int
    columns: int
    rank: int


def shape_of(parameter: Parameter) -> tuple[int, int]:
    """Return the rows and columns of a parameter: its outermost dimension in memory by all others.

    A parameter with fewer than two dimensions has one row.
    """
    sizes = [(stride, size) for stride, size in zip(parameter.stride, parameter.shape) if size > 1]
    if len(sizes) < 2:
        return 1, parameter.numel
    rows = max(sizes)[1]
    return rows, parameter.numel // rows


def matrices(segments: Sequence[Segment], rank: int, least_saving: float) -> list[Matrix]:
    """Return the parameters that two factors of that rank describe in ``least_saving`` times fewer numbers."""
    found = []
    for segment in segments:
        rows, columns = shape_of(segment.parameter)
        use = min(rank, rows, columns)
        if not segment.dense and rows > 1 and rows * columns >= least_saving * use * (rows + columns):
            found.append(Matrix(segment, rows, columns, use))
    return found


def matrix_table(found: Sequence[Matrix]) -> MatrixTable:
    """Return where matrices and their factors lie, for the kernels."""
    return MatrixTable(
        [m.segment.offset for m in found], [m.rows for m in found], [m.columns for m in found], [m.rank for m in found]
    )


def draw_factor(name: str, length: int, rank: int, seed: int, round: int) -> torch.Tensor:
    """Return ``[rank, length]`` numbers for a parameter, uniform in [-1, 1), the same on all ranks."""
    numel = length * rank
    groups = torch.arange(-(-numel // 80))
    key = torch.tensor(parameter_key(seed, name, "factor"))
    drawn = uniform_integers(groups, key.expand(len(groups), 2), round, SHARED).reshape(-1)[:numel]
    return ((drawn - (1 << 23)).to(torch.float32) / (1 << 23)).view(rank, length)
