# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Shared Triton kernels: exact sums of blocks in integers, Philox's random words, and tiles of groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels import philox as definition
from gradwire.kernels.table import BLOCK_SIZE, SegmentTable
from gradwire.kernels.triton_core.device_tables import blocks_of
from gradwire.kernels.triton_core.launch import INTERPRETED, launch

INFINITY = 0x7F800000
_INFINITY = tl.constexpr(INFINITY)

AHEAD = 2 if INTERPRETED else 32
"""Blocks whose numbers are loaded before they are added; fewer in the interpreter, where each takes a millisecond."""

SIZES, MOMENTS, SIGNS = 0, 1, 2
"""Sums of a block: none, of integers and their squares, or of integers by sign and the number of elements >= 0."""

_MOMENTS, _SIGNS = tl.constexpr(MOMENTS), tl.constexpr(SIGNS)


@triton.jit
def _block(x, at, room, largest, first, second, count, KIND: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0)
    element = tl.arange(0, SIZE)
    inside = element < tl.load(room + block)
    value = tl.load(x + tl.load(at + block) + element, mask=inside, other=0.0)
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    tl.store(largest + block, bits)
    if KIND != 0:
        exponent = tl.maximum((bits >> 23) - 127, -104)
        # 2^(23 - exponent). Products with it are exact, or below one.
        unit = ((150 - exponent) << 23).to(tl.float32, bitcast=True)
        integer = tl.where(bits < _INFINITY, value * unit, 0.0).to(tl.int32).to(tl.int64)
        total = tl.sum(integer, axis=0)
        # 2^(exponent - 23), of which sums are multiples: they are rounded once, to float64.
        back = ((exponent + 1000).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        if KIND == _MOMENTS:
            tl.store(first + block, total.to(tl.float64) * back)
            back = ((2 * exponent + 977).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            tl.store(second + block, tl.sum(integer * integer, axis=0).to(tl.float64) * back)
        if KIND == _SIGNS:
            size = tl.sum(tl.where(integer < 0, -integer, integer), axis=0)
            # Halves of even numbers, none of them negative.
            tl.store(first + block, ((size + total) >> 1).to(tl.float64) * back)
            tl.store(second + block, ((size - total) >> 1).to(tl.float64) * back)
            tl.store(count + block, tl.sum((inside & (value >= 0.0)).to(tl.int64), axis=0))


@triton.jit
def sums_of_blocks(begins, largest, first, second, segment, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """Add two sums over the blocks of a segment, first to last.

    A sum waits for the one before. So the numbers of ``AHEAD`` blocks are loaded before the first of them is added;
    zeros past the last block change no sum.

    Returns:
        The sums, float64 ``[1]`` each, and the bits of the largest magnitude, int32, 0 for an empty segment.
    """
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    most = tl.zeros([TILE], tl.int32)
    for start in range(begin, end, TILE):
        block = start + tl.arange(0, TILE)
        most = tl.maximum(most, tl.load(largest + block, mask=block < end, other=0))
    above = tl.zeros([1], tl.float64)
    below = tl.zeros([1], tl.float64)
    for start in range(begin, end, AHEAD):
        for ahead in tl.static_range(AHEAD):
            block = start + ahead + tl.arange(0, 1)
            above += tl.load(first + block, mask=block < end, other=0.0)
            below += tl.load(second + block, mask=block < end, other=0.0)
    return above, below, tl.max(most, axis=0)


def block_sums(x: torch.Tensor, table: SegmentTable, kind: int) -> tuple[torch.Tensor, ...]:
    """Return the bits of the largest magnitude (int32) of each block of 4096 elements, and its sums.

    ``kind`` selects the sums, two of float64 and a count, int64; the others are not defined. They are sums of
    ``trunc(x * 2^(23-e)) * 2^(e-23)``, with e the exponent of the block's largest magnitude, or of zeros if that is not
    finite.
    """
    blocks = blocks_of(table, x.device)
    number = len(blocks.at)
    largest = torch.empty(number, dtype=torch.int32, device=x.device)
    sums = torch.empty((2, number), dtype=torch.float64, device=x.device)
    count = torch.empty(number if kind == SIGNS else 0, dtype=torch.int64, device=x.device)
    launch(_block, number, x, blocks.at, blocks.room, largest, *sums, count, KIND=kind, SIZE=BLOCK_SIZE)
    return largest, *sums, count


ROUNDS = tl.constexpr(definition.ROUNDS)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (tl.constexpr(word) for word in definition.MULTIPLIERS)
FIRST_STEP, SECOND_STEP = (tl.constexpr(word) for word in definition.KEY_STEPS)


@triton.jit
def philox(block, low, high, stream, key0, key1):
    """Return the four words, uint32, of counters ``(block, low, high, stream)``, read as unsigned integers."""
    c0 = block.to(tl.uint32)
    c1 = low.to(tl.uint32)
    c2 = high.to(tl.uint32)
    c3 = stream.to(tl.uint32)
    k0 = key0.to(tl.uint32)
    k1 = key1.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first_low = c0 * FIRST_MULTIPLIER
        first_high = tl.umulhi(c0, FIRST_MULTIPLIER)
        second_low = c2 * SECOND_MULTIPLIER
        second_high = tl.umulhi(c2, SECOND_MULTIPLIER)
        c0 = second_high ^ c1 ^ k0
        c1 = second_low
        c2 = first_high ^ c3 ^ k1
        c3 = first_low
        k0 = k0 + FIRST_STEP
        k1 = k1 + SECOND_STEP
    return c0, c1, c2, c3


@triton.jit
def uniform(w0, w1, w2, w3, PLANE: tl.constexpr):
    """Return the 24-bit uniform integers of a plane, uint32, from the words of a group's blocks."""
    if PLANE == 0:
        word = w0
    elif PLANE == 1:
        word = w1
    elif PLANE == 2:
        word = w2
    elif PLANE == 3:
        word = w3
    else:
        word = ((w0 & 255) << 24) | ((w1 & 255) << 16) | ((w2 & 255) << 8)
    return word >> 8


@triton.jit
def elements_of(at, room, begin, end, TILE: tl.constexpr):
    """Return the groups of a program's tile among groups ``begin .. end``.

    Returns:
        Numbers of the groups, a mask of those below ``end``, places of their first elements and numbers of their
        elements, ``[TILE, 1]`` each; and the lanes, ``[1, 16]``.
    """
    group = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    known = group < end
    place = tl.load(at + group, mask=known, other=0)
    last = tl.load(room + group, mask=known, other=0)
    return group, known, place, last, tl.arange(0, 16)[None, :]


@triton.jit
def words_of(number, segment, key, group, known, lane, low, high, stream):
    """Return the segments of a tile's groups, ``[TILE, 1]``, and the four random words of each lane of each group."""
    own = tl.load(segment + group, mask=known, other=0)
    block = tl.load(number + group, mask=known, other=0) * 16 + lane
    w0, w1, w2, w3 = philox(block, low, high, stream, tl.load(key + 2 * own), tl.load(key + 2 * own + 1))
    return own, w0, w1, w2, w3
