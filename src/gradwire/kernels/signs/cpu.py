"""Signs by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.base import check_moments
from gradwire.kernels.numba_core.compiled import Compiled, joined, segment_of
from gradwire.kernels.signs import loops
from gradwire.kernels.signs.base import (
    SIGN_BYTES,
    RunTable,
    SignSums,
    check_sign_decode,
    check_sign_encode,
    check_sign_vote,
)
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["CpuSigns"]


class CpuSigns(Compiled):
    """See :class:`gradwire.kernels.signs.base.SignKernels` for what each method computes."""

    def finite(self, x: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        check_moments(x, table)
        variant, values, found = self._variant("signs"), x.detach().numpy(), np.empty(len(table), np.bool_)

        def work(first: int, last: int) -> None:
            loops.finite_range(variant, values, table.offset, table.numel, first, last, found)

        self._split_segments(table, work)
        return torch.from_numpy(found)

    def sign_sums(self, x: torch.Tensor, table: SegmentTable) -> SignSums:
        check_moments(x, table)
        size = len(table)
        above, below, count = np.empty(size), np.empty(size), np.empty(size, np.int64)
        variant, values = self._variant("signs"), x.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.sign_sums_range(
                variant, values, table.offset, table.numel, first, last, above, below, count, np.empty(2)
            )

        self._split_segments(table, work)
        return SignSums(*(torch.from_numpy(column) for column in (above, below, count)))

    def sign_encode(self, x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
        check_sign_encode(x, table, begin, end, out)
        variant, values, octets = self._variant("signs"), x.detach().numpy(), out.numpy()

        def work(first: int, last: int) -> None:
            loops.sign_encode_range(
                variant, values, table.offset, table.numel, table.first_group, begin + first, begin + last,
                segment_of(table, begin + first), octets[SIGN_BYTES * first : SIGN_BYTES * last],
            )  # fmt: skip

        self._split(end - begin, 1, GROUP_SIZE, work)

    def sign_vote(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        check_sign_vote(rows, out)
        if not out.numel():
            return
        (flat, stride), voted = joined(rows), out.numpy()

        def work(begin: int, end: int) -> None:
            loops.sign_vote_range(flat, stride, len(rows), begin, end, voted)

        self._split(out.numel(), 1, 8 * len(rows), work)

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
        t, variant, (flat, stride) = runs.table, self._variant("signs"), joined(rows)
        highs, lows, target = above.detach().numpy(), below.detach().numpy(), x.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.sign_decode_range(
                variant, flat[SIGN_BYTES * first :], stride, len(rows), t.offset, t.numel, t.first_group, runs.length,
                runs.phase, runs.first, highs, lows, begin + first, begin + last, segment_of(t, begin + first), target,
                accumulate,
            )  # fmt: skip

        self._split(end - begin, 1, GROUP_SIZE * len(rows), work)
