"""A copy of ``reference`` under another name."""

from __future__ import annotations

import torch

from gradwire.kernels.group_index import GroupIndex
from gradwire.kernels.natural.operations import natural_sign_bytes
from gradwire.kernels.table import GROUP_SIZE, SIGN_BYTES, SegmentTable

__all__ = ["natural_encode", "natural_mean"]

_INFINITY = 0x7F800000


def natural_encode(x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
    where = GroupIndex(table)
    values = where.values(x)
    bits = values.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    uniform = where.uniform(round, stream) >> 1
    exponent = torch.where(bits >= _INFINITY, 255, ((bits + uniform) >> 23).clamp(max=254))
    out[: SIGN_BYTES * table.groups] = (torch.signbit(values).reshape(-1, 8) << torch.arange(8)).sum(1)
    out[natural_sign_bytes(table.groups) :] = exponent.reshape(-1)


def natural_mean(rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool) -> None:
    factor, total = torch.tensor(weight, dtype=torch.float32), torch.zeros(())
    for number, row in enumerate(rows):
        exponent = row[natural_sign_bytes(table.groups) :].to(torch.int32)
        magnitude = (exponent << 23).view(torch.float32)
        signs = row[: SIGN_BYTES * table.groups].to(torch.int64)
        minus = (signs[:, None] >> torch.arange(8) & 1).reshape(-1) == 1
        value = torch.where(minus, -magnitude, magnitude) * factor
        value = torch.where(exponent == 255, torch.inf, value)
        total = value if number == 0 else total + value
    GroupIndex(table).write(total.reshape(-1, GROUP_SIZE), x, accumulate)
