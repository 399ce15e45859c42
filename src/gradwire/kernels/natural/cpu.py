"""Powers of two by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.cpu_shared import Compiled
from gradwire.kernels.natural import drivers
from gradwire.kernels.natural.base import check_natural, check_natural_mean
from gradwire.kernels.table import SegmentTable

__all__ = ["CpuNatural"]


class CpuNatural(Compiled):
    """See :class:`gradwire.kernels.natural.base.NaturalKernels` for what each method computes."""

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        check_natural(x, table, out, round, stream)
        drivers.natural_encode_all(
            self._variant("natural"),
            x.detach().numpy(), table.offset, table.numel, table.start, table.key, table.first_group,
            np.uint64(round), np.uint32(stream), out.numpy(),
        )  # fmt: skip

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        check_natural_mean(rows, table, x)
        if not table.groups:
            return
        number, size = rows.shape
        stride = rows.stride(0) if number > 1 else size
        flat = rows.as_strided(((number - 1) * stride + size,), (1,)).numpy()
        drivers.natural_mean_all(
            self._variant("natural"),
            flat, stride, number, table.offset, table.numel, table.first_group, np.float32(weight),
            x.detach().numpy(), accumulate,
        )  # fmt: skip
