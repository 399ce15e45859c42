# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of levels. Digits of any base are written to a buffer of 16-bit integers, which is then packed.

The values of blocks are looked up for each row of 16 neighbouring elements, since a row is within one block.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gradwire.kernels.levels.grid import UNIT, BlockTable, Grid
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.triton import aligned, digit, pack_digits, sum_rows
from gradwire.kernels.table import GROUP_SIZE
from gradwire.kernels.triton_core.device_tables import groups_of, levels_of, powers_of, rows_of, shared_values_of
from gradwire.kernels.triton_core.integers import elements_of, uniform, words_of
from gradwire.kernels.triton_core.launch import cdiv, launch, tile, word_arguments

_TILE = 32
_UNIT = tl.constexpr(UNIT)


@triton.jit
def count_steps(scaled, edge, gap, steps, draw, SEARCH: tl.constexpr):
    """Count the steps that values pass, int32.

    Thresholds ascend, since none reaches the end of its step. So a binary search among fewer than ``2^SEARCH`` steps
    finds the last one whose edge is below the value, and its threshold decides.
    """
    below = tl.zeros(scaled.shape, tl.int32)
    for power in tl.static_range(SEARCH):
        further = below + (1 << (SEARCH - 1 - power))
        passed = (further <= steps) & (scaled > tl.load(edge + tl.minimum(further, steps) - 1))
        below = tl.where(passed, further, below)
    last = tl.maximum(below, 1) - 1
    threshold = draw * tl.load(gap + last) + tl.load(edge + last)
    return tl.where((below > 0) & (scaled > threshold), below, last)


@triton.jit(do_not_specialize=["groups", "low", "high", "stream", "length", "steps", "positive", "negative", "middle"])
def _quantise(
    x, at, room, number, segment, key, row, first, length, inverse, edge, gap, steps, top, ratio, positive, negative,
    integers, shift, middle, groups, low, high, stream, out,
    EVEN: tl.constexpr, SIGNED: tl.constexpr, SHARED: tl.constexpr, SEARCH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group, known, place, last, lane = elements_of(at, room, 0, groups, TILE)
    _, w0, w1, w2, w3 = words_of(number, segment, key, group, known, lane, low, high, stream)
    begin = tl.load(row + group, mask=known, other=0)
    shared = tl.load(first + group, mask=known, other=0)
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        inside = within < last
        value = tl.load(x + place + within, mask=inside, other=0.0)
        word = uniform(w0, w1, w2, w3, plane)
        draw = word.to(tl.float32)
        here = begin + plane
        if SHARED:
            scaled = value * tl.load(inverse)
        else:
            # Past the end of a segment the elements are zero, so that their scale does not matter.
            scaled = value * tl.load(inverse + shared + here // length, mask=16 * plane < last, other=0.0)
        if not SIGNED:
            scaled = (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        if EVEN:
            steps_passed = scaled * ratio
            steps_passed = tl.where(steps_passed < top, steps_passed, top)
            whole = steps_passed.to(tl.int32)
            count = whole + (draw < (steps_passed - whole.to(tl.float32)) * _UNIT).to(tl.int32)
        else:
            count = count_steps(scaled, edge, gap, steps, draw, SEARCH)
        if SHARED:
            integer = tl.load(integers + (here % length) * 16 + lane)
            count = (count + integer.to(tl.int32)) >> shift
            value_digit = tl.where(inside, count, middle - (word >> 23).to(tl.int32))
        elif SIGNED:
            value_digit = positive + count
        else:
            value_digit = tl.where(value.to(tl.int32, bitcast=True) < 0, negative - count, positive + count)
        tl.store(out + group.to(tl.int64) * 80 + within, value_digit.to(tl.uint16), mask=known & (lane < 16))


def _digits(
    x: torch.Tensor, blocks: BlockTable, inverse: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, out: torch.Tensor, integers: torch.Tensor, shift: int, shared: bool,
) -> None:  # fmt: skip
    groups, levels = blocks.table.groups, levels_of(grid, x.device)
    row, first, length = rows_of(blocks, x.device)
    values = torch.empty(GROUP_SIZE * groups, dtype=torch.uint16, device=x.device)
    top = float(grid.steps)
    launch(
        _quantise, cdiv(groups, tile(_TILE)), x, *groups_of(blocks.table, x.device), row, first, length, inverse,
        levels.edge, levels.gap, grid.steps, top, float(np.float32(top / UNIT)), grid.positive, grid.negative,
        integers, shift, layout.base // 2, groups, *word_arguments(round, stream), values,
        EVEN=grid.uniform, SIGNED=grid.signed, SHARED=shared, SEARCH=grid.steps.bit_length(), TILE=tile(_TILE),
    )  # fmt: skip
    pack_digits(values, layout, out)


def quantise(
    x: torch.Tensor, blocks: BlockTable, inverse: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, out: torch.Tensor,
) -> None:  # fmt: skip
    _digits(x, blocks, inverse, grid, layout, round, stream, out, inverse, 0, False)


def quantise_shared(
    x: torch.Tensor, blocks: BlockTable, grid: SharedRandomGrid, integers: torch.Tensor, layout: DigitLayout,
    round: int, stream: int, out: torch.Tensor,
) -> None:  # fmt: skip
    inverse, shift = grid.inverse.to(x.device), grid.columns.shift
    _digits(x, blocks, inverse, grid.points, layout, round, stream, out, integers, shift, True)


@triton.jit(do_not_specialize=["begin", "end", "length"])
def _dequantise(
    words, powers, at, room, row, first, length, scale, values, integers, begin, end, x,
    BASE: tl.constexpr, DIGITS: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr,
    ADD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group, known, place, last, lane = elements_of(at, room, begin, end, TILE)
    block = tl.load(row + group, mask=known, other=0)
    shared = tl.load(first + group, mask=known, other=0)
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        inside = within < last
        here = block + plane
        factor = tl.load(scale + shared + here // length, mask=16 * plane < last, other=0.0)
        infinite = (factor.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
        found = digit(words, group - begin, lane, inside, powers, plane, 5, BASE, DIGITS, BYTES, WHOLE, True)
        if SHARED:
            found += BASE * tl.load(integers + (here % length) * 16 + lane, mask=inside, other=0).to(tl.int32)
        value = tl.where(infinite, factor, tl.load(values + found) * factor)
        if ADD:
            value = tl.load(x + place + within, mask=inside, other=0.0) + value
        tl.store(x + place + within, value, mask=inside)


def _decode(
    words: torch.Tensor, blocks: BlockTable, scale: torch.Tensor, values: torch.Tensor, integers: torch.Tensor,
    layout: DigitLayout, begin: int, end: int, x: torch.Tensor, shared: bool, accumulate: bool,
) -> None:  # fmt: skip
    groups = groups_of(blocks.table, x.device)
    row, first, length = rows_of(blocks, x.device)
    launch(
        _dequantise, cdiv(end - begin, tile(_TILE)), words, powers_of(layout, x.device), groups.at, groups.room, row,
        first, length, scale, values, integers, begin, end, x,
        BASE=layout.base, DIGITS=layout.digits, BYTES=layout.word_bytes, WHOLE=aligned(words, layout), SHARED=shared,
        ADD=accumulate, TILE=tile(_TILE),
    )  # fmt: skip


def dequantise(
    words: torch.Tensor, blocks: BlockTable, scale: torch.Tensor, grid: Grid, layout: DigitLayout, begin: int,
    end: int, x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    values = levels_of(grid, x.device).values
    for number, (row, factors) in enumerate(zip(words, scale)):
        _decode(row, blocks, factors, values, row, layout, begin, end, x, False, accumulate or number > 0)


def add_shared(
    words: torch.Tensor, blocks: BlockTable, scale: torch.Tensor, grid: SharedRandomGrid, integers: torch.Tensor,
    layout: DigitLayout, x: torch.Tensor,
) -> None:  # fmt: skip
    values = shared_values_of(grid, x.device)
    _decode(words, blocks, scale, values, integers, layout, 0, blocks.table.groups, x, True, True)


def sum_digits(
    rows: torch.Tensor, groups: int, layout: DigitLayout, down: DigitLayout, out: torch.Tensor
) -> None:  # fmt: skip
    sum_rows(rows, groups, layout, down, out, clamp=True)
