# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of trits. A tile is several groups of 80 elements by the 16 lanes of a group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.packing.layout import DigitLayout, digit_layout
from gradwire.kernels.packing.triton import aligned, digit, sum_rows
from gradwire.kernels.table import GROUP_BYTES, SegmentTable
from gradwire.kernels.triton_core.device_tables import groups_of, powers_of
from gradwire.kernels.triton_core.integers import elements_of, uniform, words_of
from gradwire.kernels.triton_core.launch import cdiv, launch, tile, word_arguments

_TILE = 32


@triton.jit(do_not_specialize=["begin", "end", "low", "high", "stream"])
def _encode(
    x, at, room, number, segment, key, limit, inverse, begin, end, low, high, stream, out, TILE: tl.constexpr
):  # fmt: skip
    group, known, place, last, lane = elements_of(at, room, begin, end, TILE)
    own, w0, w1, w2, w3 = words_of(number, segment, key, group, known, lane, low, high, stream)
    bound = tl.load(limit + own)
    factor = tl.load(inverse + own)
    total = tl.zeros([TILE, 16], tl.int32)
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        value = tl.load(x + place + within, mask=within < last, other=0.0)
        bits = value.to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        # A comparison rather than a minimum, so that a NaN in x stays a NaN, which never fires.
        magnitude = tl.where(bound < magnitude, bound, magnitude)
        fires = uniform(w0, w1, w2, w3, plane).to(tl.float32) < magnitude * factor
        trit = tl.where(fires, tl.where(bits < 0, 0, 2), 1)
        total += trit * (3**plane)
    tl.store(out + (group - begin).to(tl.int64) * 16 + lane, total.to(tl.uint8), mask=known & (lane < 16))


def ternary_encode(
    x: torch.Tensor, table: SegmentTable, limit: torch.Tensor, inverse: torch.Tensor, round: int, stream: int,
    begin: int, end: int, out: torch.Tensor,
) -> None:  # fmt: skip
    launch(
        _encode, cdiv(end - begin, tile(_TILE)), x, *groups_of(table, x.device), limit, inverse, begin, end,
        *word_arguments(round, stream), out, TILE=tile(_TILE),
    )  # fmt: skip


def ternary_sum(rows: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    sum_rows(rows, rows.shape[1] // GROUP_BYTES, digit_layout(3), layout, out, clamp=False)


@triton.jit(do_not_specialize=["begin", "end"])
def _decode(
    words, powers, at, room, segment, scale, begin, end, x,
    BASE: tl.constexpr, DIGITS: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    group, known, place, last, lane = elements_of(at, room, begin, end, TILE)
    factor = tl.load(scale + tl.load(segment + group, mask=known, other=0))
    infinite = (factor.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        inside = within < last
        total = digit(words, group - begin, lane, inside, powers, plane, 5, BASE, DIGITS, BYTES, WHOLE, False)
        value = tl.where(infinite, factor, (total - BASE // 2).to(tl.float32) * factor)
        if ADD:
            value = tl.load(x + place + within, mask=inside, other=0.0) + value
        tl.store(x + place + within, value, mask=inside)


def decode(
    words: torch.Tensor, layout: DigitLayout, table: SegmentTable, scale: torch.Tensor, begin: int, end: int,
    x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    groups = groups_of(table, x.device)
    launch(
        _decode, cdiv(end - begin, tile(_TILE)), words, powers_of(layout, x.device), groups.at, groups.room,
        groups.segment, scale, begin, end, x,
        BASE=layout.base, DIGITS=layout.digits, BYTES=layout.word_bytes, WHOLE=aligned(words, layout), ADD=accumulate,
        TILE=tile(_TILE),
    )  # fmt: skip
