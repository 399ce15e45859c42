"""A copy of ``reference`` under another name."""

from __future__ import annotations

import math

import torch

from gradwire.kernels.group_index import GroupIndex
from gradwire.kernels.moments.reference import integer_blocks, segments_of
from gradwire.kernels.signs.operations import SignSums
from gradwire.kernels.signs.runs import RunTable
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["finite", "sign_decode", "sign_encode", "sign_sums", "sign_vote"]

_POWERS = 2 ** torch.arange(8)


def finite(x: torch.Tensor, table: SegmentTable, out: torch.Tensor) -> None:
    for segment, values in enumerate(segments_of(x, table)):
        out[segment] = torch.isfinite(values).all()


def sign_sums(x: torch.Tensor, table: SegmentTable, out: SignSums) -> None:
    for segment, values in enumerate(segments_of(x, table)):
        out.above[segment], out.below[segment], out.count[segment] = _sums(values)


def sign_encode(x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
    where = GroupIndex(table, begin, end)
    bits = (x[where.index] >= 0) & where.inside
    out.copy_((bits.reshape(-1, 8) * _POWERS).sum(1))


def sign_vote(rows: torch.Tensor, out: torch.Tensor) -> None:
    chosen = 2 * _bits(rows).sum(0) >= rows.shape[0]
    out.copy_((chosen.reshape(-1, 8) * _POWERS).sum(1))


def sign_decode(
    rows: torch.Tensor, runs: RunTable, above: torch.Tensor, below: torch.Tensor, begin: int, end: int,
    x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    where = GroupIndex(runs.table, begin, end)
    columns = (runs.phase, runs.length, runs.first[:-1])
    phase, length, first = (torch.from_numpy(column.copy())[where.segment, None] for column in columns)
    run = first + (phase + where.within) // length
    for row, bits in enumerate(_bits(rows).reshape(len(rows), -1, GROUP_SIZE)):
        where.write(torch.where(bits == 1, above[row][run], below[row][run]), x, accumulate or row > 0)


def _sums(x: torch.Tensor) -> tuple[float, float, int]:
    blocks = integer_blocks(x)
    if blocks is None:
        return math.inf, math.inf, 0
    above = below = 0.0
    for e, integers in zip(*blocks):
        total, size = int(integers.sum()), int(integers.abs().sum())
        above += math.ldexp(float((size + total) // 2), e - 23)
        below += math.ldexp(float((size - total) // 2), e - 23)
    return above, below, int((x >= 0).sum())


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Unpack bytes ``[..., m]`` to bits, int64 ``[..., 8 m]``."""
    return (rows.to(torch.int64)[..., None] >> torch.arange(8) & 1).flatten(-2)
