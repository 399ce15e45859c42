"""Powers of two by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.natural import loops
from gradwire.kernels.natural.base import SIGN_BYTES, check_natural, check_natural_mean, natural_sign_bytes
from gradwire.kernels.numba_core.compiled import Compiled, joined, segment_of
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["CpuNatural"]


class CpuNatural(Compiled):
    """See :class:`gradwire.kernels.natural.base.NaturalKernels` for what each method computes."""

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        check_natural(x, table, out, round, stream)
        variant, values, octets = self._variant("natural"), x.detach().numpy(), out.numpy()
        octets[SIGN_BYTES * table.groups : natural_sign_bytes(table.groups)] = 0

        def work(begin: int, end: int) -> None:
            loops.natural_encode_range(
                variant, values, table.offset, table.numel, table.start, table.key, table.first_group,
                np.uint64(round), np.uint32(stream), begin, end, segment_of(table, begin), octets,
            )  # fmt: skip

        self._split(table.groups, 1, GROUP_SIZE, work)

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        check_natural_mean(rows, table, x)
        number, (flat, stride) = len(rows), joined(rows)
        variant, target = self._variant("natural"), x.detach().numpy()

        def work(begin: int, end: int) -> None:
            loops.natural_mean_range(
                variant, flat, stride, number, table.offset, table.numel, table.first_group, np.float32(weight), begin,
                end, segment_of(table, begin), target, accumulate,
            )  # fmt: skip

        self._split(table.groups, 1, GROUP_SIZE * number, work)
