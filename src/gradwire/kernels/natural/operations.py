"""Random rounding to powers of two, and their weighted sum: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.kernels.front import Front, check_draw, check_rows, check_vector
from gradwire.kernels.table import GROUP_SIZE, LANES, SIGN_BYTES, GroupIndex, SegmentTable


def natural_sign_bytes(groups: int) -> int:
    """Return the number of bytes of the signs of groups, padded to a multiple of sixteen."""
    return -(-SIGN_BYTES * groups // LANES) * LANES


def natural_bytes(groups: int) -> int:
    """Return the number of bytes of encoded groups: nine bits for each element, and padding of the signs."""
    return natural_sign_bytes(groups) + GROUP_SIZE * groups


class NaturalOperations(Front):
    """The operations of the family ``natural``."""

    def natural_encode(self, x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
        """Round all groups of ``x`` (float32) to powers of two and write them to ``out`` (uint8).

        With ``bits`` the 31 bits of |x| and ``u`` the upper 23 bits of the element's 24-bit uniform integer::

            exponent = min((bits + u) >> 23, 254), or 255 if x is an infinity or NaN

        ``out`` has :func:`natural_bytes` bytes: first the signs, one bit for each element from the lowest bit of a byte
        up, padded to a multiple of sixteen bytes (:func:`natural_sign_bytes`), then the exponents, one byte for each
        element, both in the order of groups. Elements past a segment's end count as zero.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("out", out, torch.uint8, natural_bytes(table.groups))
        check_draw(round, stream)
        family = self._serve("natural")
        out[SIGN_BYTES * table.groups : natural_sign_bytes(table.groups)] = 0
        if table.groups:
            family.natural_encode(x.detach(), table, round, stream, out)

    def natural_mean(
        self, rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool = False
    ) -> None:
        """Write the sum over rows, in their order, of ``float32(weight) * value`` into ``x``, or add it.

        ``rows`` is uint8 ``[N, natural_bytes(groups)]``; rows may be any distance apart. A value is
        ``+-2^(exponent - 127)``, but zero for the exponent 0. For the exponent 255, ``weight * value`` is +inf,
        whatever the signs.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_rows(rows, natural_bytes(table.groups))
        family = self._serve("natural")
        if table.groups:
            family.natural_mean(rows, table, weight, x.detach(), accumulate)


_INFINITY = 0x7F800000


def natural_encode(x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
    where = GroupIndex(table)
    values = where.values(x)
    bits = values.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    uniform = where.uniform(round, stream) >> 1
    exponent = torch.where(bits >= _INFINITY, 255, ((bits + uniform) >> 23).clamp(max=254))
    out[: SIGN_BYTES * table.groups] = (torch.signbit(values).reshape(-1, 8) << torch.arange(8, device="cpu")).sum(1)
    out[natural_sign_bytes(table.groups) :] = exponent.reshape(-1)


def natural_mean(rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool) -> None:
    factor, total = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (weight, 0.0))
    for number, row in enumerate(rows):
        exponent = row[natural_sign_bytes(table.groups) :].to(torch.int32)
        magnitude = (exponent << 23).view(torch.float32)
        signs = row[: SIGN_BYTES * table.groups].to(torch.int64)
        minus = (signs[:, None] >> torch.arange(8, device="cpu") & 1).reshape(-1) == 1
        value = torch.where(minus, -magnitude, magnitude) * factor
        value = torch.where(exponent == 255, torch.inf, value)
        total = value if number == 0 else total + value
    GroupIndex(table).write(total.reshape(-1, GROUP_SIZE), x, accumulate)
