# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of selection: four histograms find the threshold of a segment, then positions are written in order.

A histogram counts up to eight of the 31 bits, over the magnitudes that agree with the threshold in the bits above. The
place of a block's positions follows from the number of elements taken in the blocks before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.selection import operations
from gradwire.kernels.table import BLOCK_SIZE, SegmentTable
from gradwire.kernels.triton_core.device_tables import Blocks, blocks_of
from gradwire.kernels.triton_core.launch import launch

_BINS = 256
_SHIFTS = (23, 15, 7, 0)


@triton.jit
def _magnitudes(x, at, room, block, SIZE: tl.constexpr):
    element = tl.arange(0, SIZE)
    inside = element < tl.load(room + block)
    value = tl.load(x + tl.load(at + block) + element, mask=inside, other=0.0)
    return element, inside, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _count(x, at, room, segment, prefix, bins, SHIFT: tl.constexpr, ABOVE: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0)
    own = tl.load(segment + block)
    _, inside, bits = _magnitudes(x, at, room, block, SIZE)
    agrees = inside & ((bits >> ABOVE) == (tl.load(prefix + own) >> ABOVE))
    found = tl.histogram((bits >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1), 256, mask=agrees)
    tl.atomic_add(bins + own * 256 + tl.arange(0, 256), found, sem="relaxed")


@triton.jit
def _narrow(bins, prefix, wanted, SHIFT: tl.constexpr):
    """Find the bin of the threshold: the highest that, with all bins above, holds as many elements as are wanted."""
    own = tl.program_id(0)
    place = tl.arange(0, 256)
    counts = tl.load(bins + own * 256 + place)
    reached = tl.cumsum(counts, axis=0, reverse=True)
    left = tl.load(wanted + own)
    chosen = tl.max(tl.where(reached >= left, place, 0), axis=0)
    above = tl.sum(tl.where(place > chosen, counts, 0), axis=0)
    tl.store(prefix + own, tl.load(prefix + own) | (chosen << SHIFT))
    tl.store(wanted + own, left - above)


@triton.jit
def _tally(x, at, room, segment, threshold, above, equal, SIZE: tl.constexpr):
    """Count the elements of each block that are above the threshold of its segment, and those that equal it."""
    block = tl.program_id(0)
    least = tl.load(threshold + tl.load(segment + block))
    _, inside, bits = _magnitudes(x, at, room, block, SIZE)
    tl.store(above + block, tl.sum((inside & (bits > least)).to(tl.int32), axis=0))
    tl.store(equal + block, tl.sum((inside & (bits == least)).to(tl.int32), axis=0))


@triton.jit
def _write(
    x, at, room, segment, first, threshold, ties, begins, limit, above, equal, out, SIZE: tl.constexpr
):  # fmt: skip
    """Write the positions above the threshold and of the first ``ties`` at it, as far as ``limit`` reaches."""
    block = tl.program_id(0)
    own = tl.load(segment + block)
    least = tl.load(threshold + own)
    room_for_ties = tl.load(ties + own)
    element, inside, bits = _magnitudes(x, at, room, block, SIZE)
    over = (inside & (bits > least)).to(tl.int32)
    same = (inside & (bits == least)).to(tl.int32)
    equal_before = tl.load(equal + block) + tl.cumsum(same, axis=0) - same
    taken = (over == 1) | ((same == 1) & (equal_before < room_for_ties))
    place = tl.load(above + block) + tl.cumsum(over, axis=0) - over + tl.minimum(equal_before, room_for_ties)
    position = (block - tl.load(first + own)) * SIZE + element
    tl.store(out + tl.load(begins + own) + place, position, mask=taken & (place < tl.load(limit + own)))


def select_largest(x: torch.Tensor, table: SegmentTable, counts: torch.Tensor, index: torch.Tensor) -> None:
    blocks, device = blocks_of(table, x.device), x.device
    number, segments = len(blocks.at), len(table)
    threshold = torch.zeros(segments, dtype=torch.int32, device=device)
    wanted = counts.to(device, torch.int32, copy=True)
    above = 31
    for shift in _SHIFTS:
        bins = torch.zeros((segments, _BINS), dtype=torch.int32, device=device)
        launch(
            _count, number, x, blocks.at, blocks.room, blocks.segment, threshold, bins, SHIFT=shift, ABOVE=above,
            SIZE=BLOCK_SIZE,
        )  # fmt: skip
        launch(_narrow, segments, bins, threshold, wanted, SHIFT=shift)
        above = shift
    # If no element of a segment is wanted, its limit of 0 keeps all positions from being written.
    _write_positions(x, blocks, threshold, wanted, counts, index)


def select_above(
    x: torch.Tensor, table: SegmentTable, threshold: torch.Tensor, limit: torch.Tensor, index: torch.Tensor,
    found: torch.Tensor,
) -> None:  # fmt: skip
    blocks = blocks_of(table, x.device)
    below = threshold.to(x.device).view(torch.int32) - 1
    taken = _write_positions(x, blocks, below, torch.zeros_like(below), limit, index)
    # In main memory, where callers look at it; on the device while the family is compared with the reference.
    found.index_add_(0, blocks.segment.to(found.device, torch.int64), taken.to(found.device, torch.int64))


# Only the CPU's methods estimate thresholds; their sums are those of the definition.
excess_sums = operations.excess_sums


def _write_positions(
    x: torch.Tensor, blocks: Blocks, threshold: torch.Tensor, ties: torch.Tensor, limit: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write the positions of all segments in order; return the elements above the threshold by block, int32 ``[B]``."""
    number, device = len(blocks.at), x.device
    tallies = torch.empty((2, number), dtype=torch.int32, device=device)
    begins, most = (limit.cumsum(0) - limit).to(device), limit.to(device)
    columns = (x, blocks.at, blocks.room, blocks.segment)
    launch(_tally, number, *columns, threshold, *tallies, SIZE=BLOCK_SIZE)
    # Sums over all blocks before, less those before the first block of the segment.
    before = tallies.cumsum(1, dtype=torch.int64) - tallies
    before -= before[:, blocks.first[:-1].to(torch.int64)[blocks.segment.to(torch.int64)]]
    launch(
        _write, number, *columns, blocks.first, threshold, ties, begins, most, *before.to(torch.int32), index,
        SIZE=BLOCK_SIZE,
    )  # fmt: skip
    return tallies[0]
