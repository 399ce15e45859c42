"""A copy of ``reference`` under another name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.kernels.group_index import GroupIndex
from gradwire.kernels.lattice.operations import FAR
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.reference import pack_digits, unpack_digits
from gradwire.kernels.table import SegmentTable

__all__ = ["lattice_encode", "lattice_mean"]

_WORD = 0xFFFFFFFF


def lattice_encode(
    x: torch.Tensor, table: SegmentTable, inverse: torch.Tensor, layout: DigitLayout, round: int, stream: int,
    shift: int, out: torch.Tensor, check: torch.Tensor,
) -> None:  # fmt: skip
    where, colours = GroupIndex(table), layout.base
    uniform = where.uniform(round, stream)
    t, _ = _scaled(x, where, inverse, uniform, shift)
    k = t.round().to(torch.int64)
    colour = k % colours
    pack_digits(colour.reshape(-1), layout, out)
    check[0] = _check((k - colour) // colours, uniform)


def lattice_mean(
    rows: torch.Tensor, table: SegmentTable, inverse: torch.Tensor, scale: torch.Tensor, layout: DigitLayout,
    round: int, stream: int, shifts: Sequence[int], own: torch.Tensor, x: torch.Tensor, accumulate: bool,
    checks: torch.Tensor,
) -> None:  # fmt: skip
    where, colours = GroupIndex(table), layout.base
    uniform, factor, total = where.uniform(round, stream), scale[where.segment, None], torch.zeros(())
    usable = torch.isfinite(factor)
    for number, (row, shift) in enumerate(zip(rows, shifts)):
        t, theta = _scaled(own, where, inverse, uniform, shift)
        colour = unpack_digits(row, layout, table.groups)
        turn = ((t - colour.to(torch.float32)) * (1.0 / colours)).round().to(torch.int64)
        checks[number] = _check(torch.where(usable, turn, 0), uniform)
        value = ((colour + colours * turn).to(torch.float32) + theta) * factor
        total = value if number == 0 else total + value
    where.write(torch.where(usable, total, factor), x, accumulate)


def _scaled(
    x: torch.Tensor, where: GroupIndex, inverse: torch.Tensor, uniform: torch.Tensor, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return t and theta of every element."""
    theta = ((uniform + shift) % (1 << 24)).to(torch.float32) * 2.0**-24 - 0.5
    t = where.values(x) * inverse[where.segment, None] - theta
    return torch.where(t.abs() < FAR, t, 0.0), theta


def _check(turn: torch.Tensor, uniform: torch.Tensor) -> int:
    # Terms are below 2^23 * 2^25, so that 2^15 of them could be added; reduced one by one there is no limit.
    return int((turn * (2 * uniform + 1) & _WORD).sum()) & _WORD
