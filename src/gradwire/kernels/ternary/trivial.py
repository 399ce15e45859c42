"""A copy of ``reference`` under another name."""

from __future__ import annotations

import torch

from gradwire.kernels.group_index import GroupIndex
from gradwire.kernels.packing.layout import DigitLayout, digit_layout
from gradwire.kernels.packing.reference import pack_digits, unpack_digits
from gradwire.kernels.table import GROUP_BYTES, SegmentTable

__all__ = ["decode", "ternary_encode", "ternary_sum"]

_TRITS = digit_layout(3)


def ternary_encode(
    x: torch.Tensor, table: SegmentTable, limit: torch.Tensor, inverse: torch.Tensor, round: int, stream: int,
    begin: int, end: int, out: torch.Tensor,
) -> None:  # fmt: skip
    where = GroupIndex(table, begin, end)
    values = where.values(x)
    bound, factor, magnitude = limit[where.segment, None], inverse[where.segment, None], values.abs()
    # Written as a comparison, so that a NaN in x stays one and never fires.
    magnitude = torch.where(bound < magnitude, bound, magnitude)
    fires = where.uniform(round, stream).to(torch.float32) < magnitude * factor
    digits = 1 + torch.where(torch.signbit(values), -1, 1) * fires
    pack_digits(digits.reshape(-1), _TRITS, out)


def ternary_sum(rows: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    groups = rows.shape[1] // GROUP_BYTES
    digits = [unpack_digits(row, _TRITS, groups, clamp=False) for row in rows]
    pack_digits(torch.stack(digits).sum(0).reshape(-1), layout, out)


def decode(
    words: torch.Tensor, layout: DigitLayout, table: SegmentTable, scale: torch.Tensor, begin: int, end: int,
    x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    where = GroupIndex(table, begin, end)
    factor = scale[where.segment, None]
    sums = unpack_digits(words, layout, end - begin, clamp=False) - layout.base // 2
    where.write(torch.where(torch.isfinite(factor), sums.to(torch.float32) * factor, factor), x, accumulate)
