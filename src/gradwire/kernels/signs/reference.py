"""Signs in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import torch

from gradwire.kernels.base import check_moments
from gradwire.kernels.moments.exact import integer_blocks
from gradwire.kernels.signs.base import RunTable, SignSums, check_sign_decode, check_sign_encode, check_sign_vote
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["ReferenceSigns"]

_POWERS = 2 ** torch.arange(8)


class ReferenceSigns:
    """See :class:`gradwire.kernels.signs.base.SignKernels` for what each method computes."""

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        check_moments(x, table)
        rows = zip(table.offset.tolist(), table.numel.tolist())
        return torch.tensor([bool(torch.isfinite(x.detach()[a : a + n]).all()) for a, n in rows], dtype=torch.bool)

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        check_moments(x, table)
        rows = zip(table.offset.tolist(), table.numel.tolist())
        sums = [_segment_sums(x.detach()[a : a + n]) for a, n in rows]
        columns = torch.tensor(sums, dtype=torch.float64).reshape(-1, 3)
        return SignSums(columns[:, 0].clone(), columns[:, 1].clone(), columns[:, 2].to(torch.int64))

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        check_sign_encode(x, table, begin, end, out)
        if begin == end:
            return
        _, index, inside = _places(table, begin, end)
        bits = (x.detach()[index] >= 0) & inside
        out.copy_((bits.reshape(-1, 8) * _POWERS).sum(1))

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        check_sign_vote(rows, out)
        chosen = 2 * _bits(rows).sum(0) >= rows.shape[0]
        out.copy_((chosen.reshape(-1, 8) * _POWERS).sum(1))

    def sign_decode(
        self,
        rows: torch.Tensor,
        runs: RunTable,
        above: torch.Tensor,
        below: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        check_sign_decode(rows, runs, above, below, begin, end, x)
        if begin == end:
            return
        segment, index, inside = _places(runs.table, begin, end)
        within = index - torch.from_numpy(runs.table.offset.copy())[segment]
        phase, length, first = (torch.from_numpy(c.copy())[segment] for c in (runs.phase, runs.length, runs.first[:-1]))
        run = (first + (phase + within) // length)[inside]
        bits, where, target = _bits(rows).reshape(len(rows), -1, GROUP_SIZE), index[inside], x.detach()
        for i, row in enumerate(bits):
            values = torch.where(row[inside] == 1, above[i][run], below[i][run])
            target[where] = target[where] + values if accumulate or i else values


def _segment_sums(x: torch.Tensor) -> tuple[float, float, int]:
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


def _places(table: SegmentTable, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give segment, index in x (clamped to the segment) and "inside the segment" of the elements of groups, [G, 80]."""
    group = np.arange(begin, end)
    segment = np.searchsorted(table.first_group, group, side="right") - 1
    within = (group - table.first_group[segment])[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)
    last = table.numel[segment, None] - 1
    index = table.offset[segment, None] + np.minimum(within, last)
    wide = np.broadcast_to(segment[:, None], within.shape)
    return torch.from_numpy(wide.copy()), torch.from_numpy(index), torch.from_numpy(within <= last)
