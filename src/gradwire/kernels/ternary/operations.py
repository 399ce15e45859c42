"""Trits, packed five to a byte, and their packed sums: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_groups, check_rows, check_vector
from gradwire.kernels.packing.layout import DigitLayout, digit_layout, pack_digits, sum_layout, unpack_digits
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, GroupIndex, SegmentTable


class TernaryOperations(Front):
    """The operations of the family ``ternary``."""

    def ternary_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        limit: torch.Tensor,
        inverse: torch.Tensor,
        round: int,
        stream: int,
        begin: int,
        end: int,
        out: torch.Tensor,
    ) -> None:
        """Ternarise and pack groups ``begin .. end`` of ``x`` (float32) into ``out`` (uint8 ``[16 * (end - begin)]``).

            digit = 1 + sign(x) * [u < min(|x|, limit) * inverse],    byte j = sum over planes k of digit_k * 3^k

        with ``u`` the element's 24-bit uniform integer and ``limit``, ``inverse`` float32 ``[S]``. See
        :func:`inverse_scale`. Elements past a segment's end have digit 1, the trit zero.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("limit", limit, torch.float32, len(table))
        check_vector("inverse", inverse, torch.float32, len(table))
        check_groups(table, begin, end)
        check_vector("out", out, torch.uint8, GROUP_BYTES * (end - begin))
        check_draw(round, stream)
        family = self._serve("ternary")
        if begin < end:
            family.ternary_encode(
                x.detach(), table, limit.detach(), inverse.detach(), round, stream, begin, end, out
            )  # fmt: skip

    def ternary_sum(self, rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> None:
        """Add ``N`` ternary payloads, ``rows`` uint8 ``[N, m]``, into the packed sums of their ``5 * m`` digits.

        ``m`` is a multiple of 16; rows may be any distance apart. ``layout`` has the base 2N + 1, by default
        :func:`sum_layout`; ``out`` is uint8 of the size ``layout.packed_bytes(5 * m)``.
        """
        check_rows(rows, rows.shape[-1])
        if rows.shape[1] % GROUP_BYTES:
            raise HyperparameterError(f"rows have {rows.shape[1]} bytes: whole groups of {GROUP_BYTES} are needed")
        layout = _of_sums(rows.shape[0], layout)
        check_vector("out", out, torch.uint8, layout.packed_bytes(rows.shape[1] // GROUP_BYTES * GROUP_SIZE))
        family = self._serve("ternary")
        if rows.shape[1]:
            family.ternary_sum(rows, layout, out)

    def decode(
        self,
        words: torch.Tensor,
        world_size: int,
        table: SegmentTable,
        scale: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
        layout: DigitLayout | None = None,
    ) -> None:
        """Write ``float32(v - N) * scale`` for the elements of groups ``begin .. end`` into ``x`` (float32).

        ``words`` (uint8) are the packed sums of those groups, ``80 * (end - begin)`` values in ``[0, 2N]``; ``scale``
        is float32 ``[S]``. Where a scale is not finite, the scale itself is written. ``accumulate`` adds instead of
        writing. Elements of ``x`` that belong to no segment or to other groups keep their values.

        The highest digit of a word is not clamped, so that a word that no encoder writes gives values above ``N``.
        """
        layout = _of_sums(world_size, layout)
        check_groups(table, begin, end)
        check_vector("words", words, torch.uint8, layout.packed_bytes(GROUP_SIZE * (end - begin)))
        check_vector("scale", scale, torch.float32, len(table))
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        family = self._serve("ternary")
        if begin < end:
            family.decode(words, layout, table, scale.detach(), begin, end, x.detach(), accumulate)


def _of_sums(world_size: int, layout: DigitLayout | None) -> DigitLayout:
    if layout is not None and layout.base != 2 * world_size + 1:
        raise HyperparameterError(f"digits of base {layout.base} are no sums of {world_size} trits")
    return layout or sum_layout(world_size)


_TRITS = digit_layout(3)


def ternary_encode(
    x: torch.Tensor, table: SegmentTable, limit: torch.Tensor, inverse: torch.Tensor, round: int, stream: int,
    begin: int, end: int, out: torch.Tensor,
) -> None:  # fmt: skip
    where = GroupIndex(table, begin, end)
    values = where.values(x)
    bound, factor, magnitude = limit[where.segment, None], inverse[where.segment, None], values.abs()
    # A comparison rather than a minimum, so that a NaN in x stays a NaN, which never fires.
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
