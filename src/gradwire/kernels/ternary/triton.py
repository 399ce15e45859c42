# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of trits. A tile is several groups of 80 elements by the 16 lanes of a group."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from gradwire.kernels.packing.layout import DigitLayout, digit_layout
from gradwire.kernels.packing.triton import aligned, digit, store_word, sum_rows
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, SegmentTable
from gradwire.kernels.triton_core.device_tables import groups_of, powers_of
from gradwire.kernels.triton_core.integers import elements_of, uniform, words_of
from gradwire.kernels.triton_core.launch import cdiv, launch, stride_of, tile, word_arguments

_TILE = 32
_SUM_TILE = 64


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


@triton.jit
def _quotient(octet, DIGIT: tl.constexpr):
    """Return a byte divided by 3^DIGIT, rounded down: these products give it for all bytes."""
    if DIGIT == 0:
        found = octet
    elif DIGIT == 1:
        found = (octet * 21846) >> 16
    elif DIGIT == 2:
        found = (octet * 7282) >> 16
    elif DIGIT == 3:
        found = (octet * 2428) >> 16
    elif DIGIT == 4:
        found = (octet * 810) >> 16
    else:
        found = octet * 0
    return found


@triton.jit(do_not_specialize=["groups", "blocks"])
def _sum_trits(
    rows, stride, groups, out, blocks, ROWS: tl.constexpr, BASE: tl.constexpr, DIGITS: tl.constexpr,
    BYTES: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add rows of trits, and pack their sums. A unit is as many groups as make whole words.

    With t_k the quotient of a byte by 3^k, its digits are t_k - 3 t_(k+1), the highest not reduced modulo 3. So the
    digits' sum in another base is one of multiples of the quotients.
    """
    unit = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
    lane = tl.arange(0, 16)[None, :]
    step = stride.to(tl.int64)
    for part in tl.static_range(5 * UNIT // DIGITS):
        word = tl.zeros([TILE, 16], tl.uint32)
        for own in tl.static_range(part * DIGITS // 5, ((part + 1) * DIGITS + 4) // 5):
            group = unit * UNIT + own
            known = (group < groups) & (lane < 16)
            first = rows + group * 16 + lane
            if (5 * own >= part * DIGITS) and (5 * own + 5 <= (part + 1) * DIGITS):
                total = tl.zeros([TILE, 16], tl.uint32)
                for row in tl.static_range(ROWS):
                    octet = tl.load(first + row * step, mask=known, other=0).to(tl.uint32)
                    total += octet + _quotient(octet, 1) * (BASE - 3) + _quotient(octet, 2) * (BASE * (BASE - 3))
                    total += _quotient(octet, 3) * (BASE * BASE * (BASE - 3))
                    total += _quotient(octet, 4) * (BASE * BASE * BASE * (BASE - 3))
                total = tl.where(known, total, (BASE**5 - 1) // 2)
                word += total * (BASE ** (5 * own - part * DIGITS))
            else:
                for plane in tl.static_range(5):
                    if (5 * own + plane >= part * DIGITS) and (5 * own + plane < (part + 1) * DIGITS):
                        total = tl.zeros([TILE, 16], tl.uint32)
                        for row in tl.static_range(ROWS):
                            octet = tl.load(first + row * step, mask=known, other=0).to(tl.uint32)
                            total += _quotient(octet, plane) - 3 * _quotient(octet, plane + 1)
                        word += tl.where(known, total, BASE // 2) * (BASE ** (5 * own + plane - part * DIGITS))
        block = unit * (5 * UNIT // DIGITS) + part
        store_word(out, block * 16 + lane, word, (block < blocks) & (lane < 16), BYTES, WHOLE)


_MOST_ROWS = 32
"""Rows that a kernel adds without a loop."""


def ternary_sum(rows: torch.Tensor, layout: DigitLayout, out: torch.Tensor) -> None:
    number, groups = rows.shape[0], rows.shape[1] // GROUP_BYTES
    if number > _MOST_ROWS:
        sum_rows(rows, groups, digit_layout(3), layout, out, clamp=False)
        return
    unit = layout.digits // math.gcd(5, layout.digits)
    launch(
        _sum_trits, cdiv(cdiv(groups, unit), tile(_SUM_TILE)), rows, stride_of(rows), groups, out,
        layout.blocks(GROUP_SIZE * groups), ROWS=number, BASE=layout.base, DIGITS=layout.digits,
        BYTES=layout.word_bytes, WHOLE=aligned(out, layout), UNIT=unit, TILE=tile(_SUM_TILE),
    )  # fmt: skip


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
