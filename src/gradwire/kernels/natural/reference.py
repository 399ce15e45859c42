"""Powers of two in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import torch

from gradwire.kernels.group_index import Places
from gradwire.kernels.natural.base import SIGN_BYTES, check_natural, check_natural_mean, natural_sign_bytes
from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["ReferenceNatural"]

_INFINITY = 0x7F800000


class ReferenceNatural:
    """See :class:`gradwire.kernels.natural.base.NaturalKernels` for what each method computes."""

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        check_natural(x, table, out, round, stream)
        out.zero_()
        if not table.groups:
            return
        where = Places(table)
        values = torch.where(where.inside, x.detach()[where.index], 0.0)
        bits = values.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        uniform = uniform_integers(where.group, where.key, round, stream).reshape(-1, GROUP_SIZE) >> 1
        exponent = torch.where(bits >= _INFINITY, 255, ((bits + uniform) >> 23).clamp(max=254))
        signs = (torch.signbit(values).reshape(-1, 8) << torch.arange(8)).sum(1)
        out[: signs.numel()] = signs
        out[natural_sign_bytes(table.groups) :] = exponent.reshape(-1)

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        check_natural_mean(rows, table, x)
        if not table.groups:
            return
        where, factor = Places(table), torch.tensor(weight, dtype=torch.float32)
        total = torch.zeros(())
        for number, row in enumerate(rows):
            exponent = row[natural_sign_bytes(table.groups) :].to(torch.int32)
            magnitude = (exponent << 23).view(torch.float32)
            signs = row[: SIGN_BYTES * table.groups].to(torch.int64)
            minus = (signs[:, None] >> torch.arange(8) & 1).reshape(-1) == 1
            value = torch.where(minus, -magnitude, magnitude) * factor
            value = torch.where(exponent == 255, torch.inf, value)
            total = value if number == 0 else total + value
        found, target, index = total.reshape(-1, GROUP_SIZE)[where.inside], x.detach(), where.index[where.inside]
        target[index] = target[index] + found if accumulate else found
