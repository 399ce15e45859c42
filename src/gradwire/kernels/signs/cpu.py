"""Signs by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.base import check_moments
from gradwire.kernels.cpu_shared import Compiled, segment_of
from gradwire.kernels.signs import drivers
from gradwire.kernels.signs.base import (
    RunTable,
    SignSums,
    check_sign_decode,
    check_sign_encode,
    check_sign_vote,
)
from gradwire.kernels.table import SegmentTable

__all__ = ["CpuSigns"]


class CpuSigns(Compiled):
    """See :class:`gradwire.kernels.signs.base.SignKernels` for what each method computes."""

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        check_moments(x, table)
        found = np.empty(len(table), np.bool_)
        drivers.finite_range(
            self._variant("signs"), x.detach().numpy(), table.offset, table.numel, 0, len(table), found
        )  # fmt: skip
        return torch.from_numpy(found)

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        check_moments(x, table)
        size = len(table)
        above, below, count = np.empty(size), np.empty(size), np.empty(size, np.int64)
        drivers.sign_sums_range(
            self._variant("signs"),
            x.detach().numpy(),
            table.offset,
            table.numel,
            0,
            size,
            above,
            below,
            count,
            np.empty(2),
        )
        return SignSums(*(torch.from_numpy(column) for column in (above, below, count)))

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        check_sign_encode(x, table, begin, end, out)
        if begin == end:
            return
        drivers.sign_encode_range(
            self._variant("signs"), x.detach().numpy(), table.offset, table.numel, table.first_group, begin, end,
            segment_of(table, begin), out.numpy(),
        )  # fmt: skip

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        check_sign_vote(rows, out)
        if out.numel():
            flat, stride = _joined(rows)
            drivers.sign_vote_range(flat, stride, len(rows), 0, out.numel(), out.numpy())

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
        t = runs.table
        flat, stride = _joined(rows)
        drivers.sign_decode_range(
            self._variant("signs"), flat, stride, len(rows), t.offset, t.numel, t.first_group, runs.length, runs.phase,
            runs.first, above.detach().numpy(), below.detach().numpy(), begin, end, segment_of(t, begin),
            x.detach().numpy(), accumulate,
        )  # fmt: skip


def _joined(rows: torch.Tensor) -> tuple[npt.NDArray[np.uint8], int]:
    """Give all rows as one vector, gaps included, and the distance from one to the next."""
    number, length = rows.shape
    stride = rows.stride(0) if number > 1 else length
    return rows.as_strided(((number - 1) * stride + length,), (1,)).numpy(), stride
