"""Rounding to a dithered cubic lattice, and decoding of colours: checked operations, defined in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_rows, check_vector
from gradwire.kernels.packing.layout import DigitLayout, digit_layout, pack_digits, unpack_digits
from gradwire.kernels.table import GROUP_SIZE, GroupIndex, SegmentTable

FAR = float(1 << 23)
"""Bound of the numbers of points: below it float32 represents every integer exactly."""


def dither_shifts(world_size: int) -> list[int]:
    """Return a shift for each rank, evenly spaced, so that the errors of equal vectors cancel in the mean."""
    return [(rank << 24) // world_size for rank in range(world_size)]


class LatticeOperations(Front):
    r"""The operations of the family ``lattice``.

    A point of the cubic lattice of side s has the coordinate s (k + theta) for each element, with an integer k and the
    element's dither theta. A payload has k modulo q only, the colour. With ``u`` an element's 24-bit uniform integer
    and ``shift`` the sender's shift::

        theta = ((u + shift) mod 2^24) / 2^24 - 1/2       (exact in float32)
        t = fl(fl(x * inverse) - theta)                   0 if |t| is not below 2^23
        k = round(t), to even;   colour = k mod q;   turn = (k - colour) / q
        check = sum over elements of turn * (2 u + 1)     modulo 2^32
    """

    def lattice_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shift: int,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Pack the colours of all groups of ``x`` (float32) into ``out`` (uint8), base q; return the check.

        ``inverse`` (float32 ``[S]``) is 1 / s, or 0 to encode all elements of a segment as zeros. The check is int64
        ``[1]``.
        """
        layout = _check(table, colours, round, stream, [shift])
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("inverse", inverse, torch.float32, len(table))
        check_vector("out", out, torch.uint8, layout.packed_bytes(GROUP_SIZE * table.groups))
        family, check = self._serve("lattice"), torch.zeros(1, dtype=torch.int64, device=x.device)
        if table.groups:
            family.lattice_encode(x.detach(), table, inverse.detach(), layout, round, stream, shift, out, check)
        return check

    def lattice_mean(
        self,
        rows: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        scale: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shifts: Sequence[int],
        own: torch.Tensor,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """Write the sum over rows, in their order, of ``fl(k + theta) * scale`` into ``x``, or add it.

        ``k`` is the integer with the row's colour that is nearest to the element of ``own``, whose ``t`` is::

            turn = round((t - colour) / q),   k = colour + q * turn

        ``own`` may be ``x``. A colour that no encoder writes counts as the largest. ``rows`` is uint8 ``[N, bytes]``;
        rows may be any distance apart. ``shifts`` are the shifts of their senders. Where a scale is not finite, the
        scale itself is written.

        Returns:
            The check of each row, computed from these turns, int64 ``[N]``.
        """
        layout = _check(table, colours, round, stream, shifts)
        for name, vector in (("own", own), ("x", x)):
            check_vector(name, vector, torch.float32, table.extent, at_least=True)
        for name, vector in (("inverse", inverse), ("scale", scale)):
            check_vector(name, vector, torch.float32, len(table))
        check_rows(rows, layout.packed_bytes(GROUP_SIZE * table.groups))
        if len(rows) != len(shifts):
            raise HyperparameterError(f"{len(rows)} rows need as many shifts, not {len(shifts)}")
        family, checks = self._serve("lattice"), torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        if table.groups:
            family.lattice_mean(
                rows, table, inverse.detach(), scale.detach(), layout, round, stream, shifts, own.detach(), x.detach(),
                accumulate, checks,
            )  # fmt: skip
        return checks


def _check(table: SegmentTable, colours: int, round: int, stream: int, shifts: Sequence[int]) -> DigitLayout:
    if not 4 <= colours <= 1 << 15 or colours & (colours - 1):
        raise HyperparameterError(f"colours={colours}: a power of two from 4 to {1 << 15} is needed")
    check_draw(round, stream)
    if not all(0 <= shift < 1 << 24 for shift in shifts):
        raise HyperparameterError(f"shifts {list(shifts)}: all must be of 24 bits")
    return digit_layout(colours)


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
    check[0] = _check_word((k - colour) // colours, uniform)


def lattice_mean(
    rows: torch.Tensor, table: SegmentTable, inverse: torch.Tensor, scale: torch.Tensor, layout: DigitLayout,
    round: int, stream: int, shifts: Sequence[int], own: torch.Tensor, x: torch.Tensor, accumulate: bool,
    checks: torch.Tensor,
) -> None:  # fmt: skip
    where, colours = GroupIndex(table), layout.base
    uniform, factor = where.uniform(round, stream), scale[where.segment, None]
    total = torch.zeros((), dtype=torch.float32, device="cpu")
    usable = torch.isfinite(factor)
    for number, (row, shift) in enumerate(zip(rows, shifts)):
        t, theta = _scaled(own, where, inverse, uniform, shift)
        colour = unpack_digits(row, layout, table.groups)
        turn = ((t - colour.to(torch.float32)) * (1.0 / colours)).round().to(torch.int64)
        checks[number] = _check_word(torch.where(usable, turn, 0), uniform)
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


def _check_word(turn: torch.Tensor, uniform: torch.Tensor) -> int:
    # Terms are below 2^23 * 2^25, so only 2^15 of them fit an int64. Each is reduced before it is added.
    return int((turn * (2 * uniform + 1) & _WORD).sum()) & _WORD
