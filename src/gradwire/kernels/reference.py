"""The backend that defines every result: plain PyTorch, whole-tensor operations, clear rather than fast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.kernels.base import Moments, check_decode, check_encode, check_moments, check_pack, check_sum
from gradwire.kernels.entropy.base import Coder
from gradwire.kernels.entropy.dispatch import get_coder
from gradwire.kernels.families import FAMILIES, known_families
from gradwire.kernels.lattice.reference import ReferenceLattice
from gradwire.kernels.levels.reference import ReferenceLevels
from gradwire.kernels.moments.exact import integer_blocks
from gradwire.kernels.natural.reference import ReferenceNatural
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.reference import pack_words, unpack_words
from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.signs.reference import ReferenceSigns
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES, SegmentTable

__all__ = ["ReferenceKernels", "digits_of"]

_POWERS = torch.tensor([3**k for k in range(PLANES)])


class ReferenceKernels(ReferenceLevels, ReferenceNatural, ReferenceLattice, ReferenceSigns):
    """See :class:`gradwire.kernels.base.Kernels` for what each method computes."""

    name = "reference"

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        check_moments(x, table)
        rows = []
        for offset, numel in zip(table.offset.tolist(), table.numel.tolist()):
            rows.append(_segment_moments(x.detach()[offset : offset + numel]))
        columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        return Moments(columns[:, 0].to(torch.float32), *(columns[:, i].clone() for i in (1, 2, 3)))

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
        check_encode(x, table, limit, inverse, round, stream, begin, end, out)
        if begin == end:
            return
        segment, index, inside = _locate(table, begin, end)
        values = torch.where(inside, x.detach()[index], 0.0)  # [G, 80]
        group = (torch.from_numpy(table.start.copy())[segment] - _first(table)[segment] * GROUP_SIZE) // GROUP_SIZE
        group = group + torch.arange(begin, end)
        key = torch.from_numpy(table.key.astype("int64"))[segment]
        uniform = uniform_integers(group, key, round, stream).reshape(-1, GROUP_SIZE)
        bound, factor = limit.detach()[segment, None], inverse.detach()[segment, None]
        magnitude = values.abs()
        # Written as a comparison, so that a NaN in x stays one and never fires.
        magnitude = torch.where(bound < magnitude, bound, magnitude)
        fires = uniform.to(torch.float32) < magnitude * factor
        digits = 1 + torch.where(torch.signbit(values), -1, 1) * fires
        out.copy_((digits.reshape(-1, PLANES, LANES) * _POWERS[:, None]).sum(1).reshape(-1))

    def ternary_sum(self, rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> None:
        layout = check_sum(rows, out, layout)
        total = digits_of(rows.reshape(-1)).reshape(rows.shape[0], -1).sum(0)
        pack_words(total, layout, out)

    def pack(self, values: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        layout = check_pack(values, world_size, out)
        pack_words(values.to(torch.int64) + world_size, layout, out)

    def unpack(self, words: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        layout = check_pack(out, world_size, words)
        out.copy_(unpack_words(words, layout)[: out.numel()] - world_size)

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
        layout = check_decode(words, world_size, table, scale, begin, end, x, layout)
        if begin == end:
            return
        segment, index, inside = _locate(table, begin, end)
        factor = scale.detach()[segment, None]
        sums = unpack_words(words, layout)[: inside.numel()].reshape(-1, GROUP_SIZE) - world_size
        values = torch.where(torch.isfinite(factor), sums.to(torch.float32) * factor, factor)
        target = x.detach()
        target[index[inside]] = target[index[inside]] + values[inside] if accumulate else values[inside]

    def coder(self, name: str) -> Coder:
        return get_coder(name, "reference")

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        known_families(families)
        return 0.0


def _segment_moments(x: torch.Tensor) -> tuple[float, float, float, float]:
    """Give (max_abs, mean, std, norm) of one segment, as :meth:`Kernels.moments` defines them."""
    if x.numel() == 0:
        return 0.0, 0.0, 0.0, 0.0
    blocks = integer_blocks(x)
    if blocks is None:
        return math.inf, 0.0, 0.0, 0.0
    exponent, integers = blocks
    sums, squares = integers.sum(1), (integers * integers).sum(1)
    first = second = 0.0
    for e, s1, s2 in zip(exponent, sums.tolist(), squares.tolist()):
        first += math.ldexp(float(s1), e - 23)
        second += math.ldexp(float(s2), 2 * (e - 23))
    mean = first / x.numel()
    variance = second / x.numel() - mean * mean
    return float(x.abs().max()), mean, math.sqrt(max(variance, 0.0)), math.sqrt(second)


def _first(table: SegmentTable) -> torch.Tensor:
    return torch.from_numpy(table.first_group.copy())


def _locate(table: SegmentTable, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the elements of groups ``begin .. end``.

    Returns:
        The segment of each group, int64 ``[G]``; the index in x of each element, int64 ``[G, 80]``, clamped to the
        segment; whether the element is inside its segment, bool ``[G, 80]``.
    """
    first, group = _first(table), torch.arange(begin, end)
    segment = torch.searchsorted(first, group, right=True) - 1
    within = (group - first[segment])[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)
    numel = torch.from_numpy(table.numel.copy())[segment, None]
    index = torch.from_numpy(table.offset.copy())[segment, None] + torch.minimum(within, numel - 1)
    return segment, index, within < numel


def digits_of(payload: torch.Tensor) -> torch.Tensor:
    """Unpack bytes of five trits (uint8 ``[16 * G]``) into digits in group order, int64 ``[80 * G]``.

    The highest digit is not reduced modulo 3, so that bytes of 243 and above, which no encoder writes, show.
    """
    quotient = payload.to(torch.int64).reshape(-1, 1, LANES) // _POWERS[:, None]
    return torch.cat([quotient[:, :-1] % 3, quotient[:, -1:]], dim=1).reshape(-1)
