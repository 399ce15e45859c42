# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of signs: a lane is a byte of eight elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.signs.operations import RunTable, SignSums
from gradwire.kernels.table import SIGN_BYTES, SegmentTable
from gradwire.kernels.triton_core.device_tables import blocks_of, groups_of, runs_of
from gradwire.kernels.triton_core.integers import AHEAD, INFINITY, SIGNS, SIZES, block_sums, sums_of_blocks
from gradwire.kernels.triton_core.launch import cdiv, launch, stride_of, tile

_TILE = 256
_INFINITY = tl.constexpr(INFINITY)


@triton.jit(do_not_specialize=["begin", "length"])
def _signs(x, at, room, begin, length, out, MINUS: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = place < length
    group = begin + place // 10
    octet = place % 10
    first = tl.load(at + group, mask=known, other=0) + 8 * octet
    last = tl.load(room + group, mask=known, other=0) - 8 * octet
    total = tl.zeros([TILE], tl.int32)
    for bit in tl.static_range(8):
        inside = bit < last
        value = tl.load(x + first + bit, mask=inside, other=0.0)
        if MINUS:
            chosen = value.to(tl.int32, bitcast=True) < 0
        else:
            chosen = inside & (value >= 0.0)
        total += chosen.to(tl.int32) << bit
    tl.store(out + place, total.to(tl.uint8), mask=known)


def pack_signs(x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor, minus: bool) -> None:
    """Write one bit for each element: its sign bit if ``minus``, else 1 if the element is at least zero."""
    groups, length = groups_of(table, x.device), SIGN_BYTES * (end - begin)
    programs = cdiv(length, tile(_TILE))
    launch(_signs, programs, x, groups.at, groups.room, begin, length, out, MINUS=minus, TILE=tile(_TILE))


@triton.jit
def _finite(begins, largest, out, TILE: tl.constexpr):
    segment = tl.program_id(0)
    most = tl.zeros([TILE], tl.int32)
    end = tl.load(begins + segment + 1)
    for start in range(tl.load(begins + segment), end, TILE):
        block = start + tl.arange(0, TILE)
        most = tl.maximum(most, tl.load(largest + block, mask=block < end, other=0))
    tl.store(out + segment, (tl.max(most, axis=0) < _INFINITY).to(tl.uint8))


def finite(x: torch.Tensor, table: SegmentTable, out: torch.Tensor) -> None:
    largest, begins = block_sums(x, table, SIZES)[0], blocks_of(table, x.device).first
    launch(_finite, len(table), begins, largest, out.view(torch.uint8), TILE=_TILE)


@triton.jit
def _add_signs(
    begins, largest, first, second, third, above, below, count, TILE: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(0)
    positive, negative, bits = sums_of_blocks(begins, largest, first, second, segment, TILE, AHEAD)
    counts = tl.zeros([TILE], tl.int64)
    end = tl.load(begins + segment + 1)
    for start in range(tl.load(begins + segment), end, TILE):
        block = start + tl.arange(0, TILE)
        counts += tl.load(third + block, mask=block < end, other=0)
    here = segment + tl.arange(0, 1)
    usable = bits < _INFINITY
    tl.store(above + here, tl.where(usable, positive, float("inf")))
    tl.store(below + here, tl.where(usable, negative, float("inf")))
    tl.store(count + here, tl.where(usable, tl.sum(counts, axis=0), 0))


def sign_sums(x: torch.Tensor, table: SegmentTable, out: SignSums) -> None:
    launch(
        _add_signs, len(table), blocks_of(table, x.device).first, *block_sums(x, table, SIGNS), out.above,
        out.below, out.count, TILE=128, AHEAD=AHEAD, num_warps=1,
    )  # fmt: skip


def sign_encode(x: torch.Tensor, table: SegmentTable, begin: int, end: int, out: torch.Tensor) -> None:
    pack_signs(x, table, begin, end, out, minus=False)


@triton.jit(do_not_specialize=["number", "length"])
def _vote(rows, number, stride, length, out, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    bit = tl.arange(0, 8)[None, :]
    step = stride.to(tl.int64)
    known = place < length
    votes = tl.zeros([TILE, 8], tl.int32)
    for row in range(number):
        octet = tl.load(rows + row * step + place, mask=known, other=0).to(tl.int32)
        votes += (octet >> bit) & 1
    chosen = (2 * votes >= number).to(tl.int32) << bit
    last = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + last, tl.sum(chosen, axis=1).to(tl.uint8), mask=last < length)


def sign_vote(rows: torch.Tensor, out: torch.Tensor) -> None:
    number, length = rows.shape
    launch(_vote, cdiv(length, tile(_TILE)), rows, number, stride_of(rows), length, out, TILE=tile(_TILE))


@triton.jit(do_not_specialize=["number", "runs", "begin", "end"])
def _decode(
    rows, number, stride, at, room, run, left, length, above, below, runs, begin, end, x, ADD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    bit = tl.arange(0, 8)[None, :]
    step = stride.to(tl.int64)
    group = begin + place // 10
    known = group < end
    within = 8 * (place % 10) + bit
    inside = within < tl.load(room + group, mask=known, other=0)
    here = x + tl.load(at + group, mask=known, other=0) + within
    # If the first run ends within the group, whole runs follow.
    behind = within - tl.load(left + group, mask=known, other=0)
    each = tl.load(length + group, mask=known, other=1)
    own = tl.load(run + group, mask=known, other=0) + tl.where(behind < 0, 0, 1 + tl.maximum(behind, 0) // each)
    total = tl.zeros([TILE, 8], tl.float32)
    if ADD:
        total = tl.load(here, mask=inside, other=0.0)
    for row in range(number):
        chosen = (tl.load(rows + row * step + place, mask=known, other=0).to(tl.int32) >> bit) & 1
        one = tl.load(above + row * runs.to(tl.int64) + own, mask=inside, other=0.0)
        other = tl.load(below + row * runs.to(tl.int64) + own, mask=inside, other=0.0)
        value = tl.where(chosen == 1, one, other)
        if ADD:
            total = total + value
        else:
            # The first value is not added to zero, which would lose the sign of a negative zero.
            total = tl.where(row == 0, value, total + value)
    tl.store(here, total, mask=inside)


def sign_decode(
    rows: torch.Tensor, runs: RunTable, above: torch.Tensor, below: torch.Tensor, begin: int, end: int,
    x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    groups, size = groups_of(runs.table, x.device), tile(_TILE // 2)
    launch(
        _decode, cdiv(SIGN_BYTES * (end - begin), size), rows, rows.shape[0], stride_of(rows), groups.at, groups.room,
        *runs_of(runs, x.device), above, below, runs.runs, begin, end, x, ADD=accumulate, TILE=size,
    )  # fmt: skip
