"""Products with thin factors in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from gradwire.kernels.low_rank.matrices import MatrixTable
from gradwire.kernels.low_rank.operations import PANEL, VANISHED
from gradwire.kernels.table import LANES

__all__ = ["multiply_left", "multiply_out", "multiply_right", "orthonormalise"]


def multiply_right(x: torch.Tensor, table: MatrixTable, right: torch.Tensor, left: torch.Tensor) -> None:
    for matrix, p, q in _matrices(x, table, left, right):
        empty = -matrix.shape[1] % LANES
        blocks = pad(matrix, (0, empty)).view(len(matrix), -1, LANES)
        for vector, other in zip(p, pad(q, (0, empty)).view(len(q), -1, LANES)):
            sums = torch.zeros(len(matrix), LANES)
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
            matrix += product * torch.tensor(weight)


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
            q[i] = torch.where(vanished, torch.zeros(()), q[i] / torch.where(vanished, torch.ones(()), size))
            for other in q[i + 1 :]:
                other -= q[i] * _sum(q[i] * other)
        out[of_matrix].copy_(q[:, :length].reshape(-1))


def _matrices(
    x: torch.Tensor, table: MatrixTable, left: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """View each matrix ``[rows, columns]`` and its factors, ``[rank, rows]`` and ``[rank, columns]``."""
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
