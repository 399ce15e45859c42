# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops that select elements of segments, with plain bodies. ``ternary/loops.py`` states the rules.

The threshold is the smallest magnitude that is selected. One pass over the segment collects *candidates*, all elements
that reach a lower bound of the threshold; the threshold is then found among them.

A segment that fits the L1 cache is cut into two or four times as many groups as elements are wanted. Among the groups'
largest elements, the one of the wanted rank is a lower bound, since as many groups have an element that reaches it.

A longer segment is sampled at places a fixed distance apart. The sample's elements six standard deviations before and
after the expected rank bound the threshold from both sides. If the scratch memory cannot hold all candidates, only the
few between the two bounds are collected, and a second pass over the segment finds the elements that reach the
threshold. If a sample misses large elements, or many elements are equal, there may be fewer candidates than wanted, or
more than expected. Then three passes count all elements in bins. They take several times as long, but work for any
values in any order, with as little memory.

A thread has 12 MiB of scratch memory, which it keeps for later calls, a sample of at most 2^18 elements, and bins. For
segments of more than 2^24 elements, the candidates between the bounds may need more memory: a twentieth of the segment,
or more if the sample varies more than one of single elements.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import Compiled, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.selection import simd
from gradwire.kernels.selection.operations import EXCESS_LANES
from gradwire.kernels.selection.sampling import (
    BINS,
    bracket,
    count_at_least,
    largest_of_rank,
    radix_rank,
    sample_of,
    top_histogram,
)
from gradwire.kernels.table import BLOCK_SIZE, LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "2bcf97fa3290e15e"


_i32, _u64 = np.int32, np.uint64


SHORT = 1 << 14
"""Length up to which a segment's groups bound the threshold, rather than a sample."""
_TILE = 4096
"""Elements whose positions are found before they are written: 32 KiB with their bits."""
_STEP = 1 << 14
"""Elements after which the number of candidates is checked."""
_ROOM = 1 << 20
"""Candidates that fit the scratch memory."""
_SLACK = 64
"""Elements after the last candidate, which bodies may overwrite."""
_LARGEST = 0x7FFFFFFF


@njit(nogil=True)
def plain_find_at_least(x, at, count, first, threshold, index, bits, place):
    values = x[at : at + count].view(_i32)
    found, magnitudes, end, least = index[place:], bits[place:], _u64(0), _i32(threshold)
    for i in range(values.size):
        magnitude = _i32(values[i] & _i32(0x7FFFFFFF))
        found[end] = first + i
        magnitudes[end] = magnitude
        end += _u64(magnitude >= least)
    return place + np.int64(end)


@njit(nogil=True)
def plain_keep_at_least(bits, index, at, count, threshold, out):
    values, positions, end, least = bits[at : at + count], index[at : at + count], _u64(0), _i32(threshold)
    for i in range(values.size):
        out[end] = positions[i]
        end += _u64(values[i] >= least)
    return np.int64(end)


@njit(nogil=True)
def plain_keep_at_most(bits, count, limit, out):
    values, end, most = bits[:count], _u64(0), _i32(limit)
    for i in range(values.size):
        out[end] = values[i]
        end += _u64(values[i] <= most)
    return np.int64(end)


@njit(nogil=True)
def plain_find_between(x, at, count, low, high, bits, place):
    values = x[at : at + count].view(_i32)
    magnitudes, end, above, least, most = bits[place:], _u64(0), _u64(0), _i32(low), _i32(high)
    for i in range(values.size):
        magnitude = _i32(values[i] & _i32(0x7FFFFFFF))
        magnitudes[end] = magnitude
        over = _u64(magnitude > most)
        end += _u64(magnitude >= least) - over
        above += over
    return place + np.int64(end), np.int64(above)


find_between = either(plain_find_between, simd.find_between)
find_at_least = either(plain_find_at_least, simd.find_at_least)
keep_at_least = either(plain_keep_at_least, simd.keep_at_least)
keep_at_most = either(plain_keep_at_most, simd.keep_at_most)


class Bins(NamedTuple):
    """Counts of integers by their upper bits, and by their lower bits."""

    top: Any
    rest: Any


class Found(NamedTuple):
    """Positions and magnitudes of candidates, with room for a vector after the last."""

    index: Any
    bits: Any


class Scratch(NamedTuple):
    """Scratch memory for candidates, for magnitudes of some of them, and for a tile of positions."""

    found: Found
    inner: Any
    tile: Any


class _OwnScratch(threading.local):
    """The scratch memory of each thread."""

    def __init__(self) -> None:
        index, bits, inner = (np.empty(_ROOM + _STEP + _SLACK, np.int32) for _ in range(3))
        self.scratch = Scratch(Found(index, bits), inner, np.empty(_TILE + _SLACK, np.int32))


class SelectionLoops(Compiled):
    """The operations of the family ``selection``, compiled."""

    def __init__(self, simd: bool = True, threads: int = 1) -> None:
        super().__init__(simd, threads)
        self._own = _OwnScratch()

    def select_largest(self, x, table, counts, index):
        values, begin, found = x.numpy(), _begins(counts), index.numpy()

        def work(first: int, last: int) -> None:
            select_largest_range(self.simd, values, table.columns, begin, first, last, found, self._own.scratch)

        self.split_segments(table, work)

    def select_above(self, x, table, threshold, limit, index, found):
        values, begin, positions, numbers = x.numpy(), _begins(limit), index.numpy(), found.numpy()
        least = threshold.numpy().view(np.int32)

        def work(first: int, last: int) -> None:
            select_above_range(
                self.simd, values, table.columns, least, begin, first, last, positions, numbers, self._own.scratch
            )

        self.split_segments(table, work)

    def excess_sums(self, x, table, threshold, base, out):
        values, least, start = x.numpy(), threshold.numpy(), base.numpy()
        sums = out.count.numpy(), out.total.numpy(), out.squares.numpy()

        def work(first: int, last: int) -> None:
            excess_range(values, table.columns, least, start, first, last, *sums)

        # The blocks of a segment are added in order, so one thread takes a whole segment.
        self.split_segments(table, work)


def _begins(counts):
    """Return the index of each segment's first position, and the end of the last segment's positions."""
    begin = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts.numpy(), out=begin[1:])
    return begin


@njit(nogil=True)
def _copy(source, count, target, place):
    to, values = target[place : place + count], source[:count]
    for i in range(to.size):
        to[i] = values[i]


@njit(nogil=True)
def _keep_some(found, at, count, threshold, ties, out):
    """Write the positions of candidates above the threshold, and of the first ``ties`` at it; return their number."""
    bits, index, end, passed = found.bits[at : at + count], found.index[at : at + count], 0, 0
    for i in range(bits.size):
        if bits[i] > threshold or (bits[i] == threshold and passed < ties):
            out[end] = index[i]
            end += 1
            passed += bits[i] == threshold
    return end


@njit(nogil=True)
def _keep(simd, found, count, threshold, ties, tile, index, place):
    """Write the positions of candidates above the threshold, and of the first ``ties`` at it.

    Returns:
        The index after the last position written, and the number of ties that are still to be taken.
    """
    for at in range(0, count, _TILE):
        size = min(_TILE, count - at)
        bits = found.bits[at : at + size]
        above = count_at_least(simd, bits, threshold + 1) if threshold < _LARGEST else 0
        equal = count_at_least(simd, bits, threshold) - above
        if equal <= ties and above + equal == size:
            number = size  # all of them
            _copy(found.index[at : at + size], size, index, place)
        elif equal <= ties:
            number = keep_at_least(simd, found.bits, found.index, at, size, threshold, tile)
        elif ties == 0:
            number = keep_at_least(simd, found.bits, found.index, at, size, threshold + 1, tile) if above else 0
        else:
            number = _keep_some(found, at, size, threshold, ties, tile)
        ties -= min(ties, equal)
        if number < size:
            _copy(tile, number, index, place)
        place += number
    return place, ties


@njit(nogil=True)
def _bound_by_groups(simd, x, at, size, count, groups, largest, bins):
    """Return the element of rank ``count`` among the largest elements of ``groups`` groups."""
    largest[:] = 0
    for row in range(size // groups):
        part = x[at + row * groups : at + row * groups + groups].view(np.int32)
        for i in range(largest.size):
            largest[i] = max(largest[i], np.int32(part[i] & np.int32(_LARGEST)))
    return largest_of_rank(simd, largest, count, bins.top, bins.rest)[0]


@njit(nogil=True)
def _select_short(simd, x, at, size, count, bins, scratch, index, place):
    """Select from a segment whose elements all fit the scratch memory."""
    bound, found = 0, scratch.found
    for times in (4, 2):
        groups = (times * count + LANES - 1) // LANES * LANES
        if 2 * groups <= size:
            bound = _bound_by_groups(simd, x, at, size, count, groups, scratch.inner[:groups], bins)
            break
    number = find_at_least(simd, x, at, size, 0, bound, found.index, found.bits, 0)
    threshold, ties, _ = largest_of_rank(simd, found.bits[:number], count, bins.top, bins.rest)
    _keep(simd, found, number, threshold, ties, scratch.tile, index, place)


@njit(nogil=True)
def _write(simd, x, at, size, threshold, ties, scratch, index, place, stop):
    """Write the positions of elements above the threshold, and of the first ``ties`` at it: ``stop - place`` in all."""
    found, begin = scratch.found, 0
    while place < stop:
        number = find_at_least(
            simd, x, at + begin, min(_TILE, size - begin), begin, threshold, found.index, found.bits, 0
        )
        place, ties = _keep(simd, found, number, threshold, ties, scratch.tile, index, place)
        begin += _TILE


@njit(nogil=True)
def _select_collected(simd, x, at, size, count, bounds, bins, scratch, index, place):
    """Select from a long segment whose candidates fit the scratch memory; return whether the bounds were right."""
    low, high, room, _ = bounds
    found, inner, number = scratch.found, scratch.inner, 0
    for begin in range(0, size, _STEP):
        if number > room:
            return False
        number = find_at_least(
            simd, x, at + begin, min(_STEP, size - begin), begin, low, found.index, found.bits, number
        )
    if number < count:
        return False
    inside = keep_at_most(simd, found.bits, number, high, inner)
    above = number - inside
    if above >= count:
        return False
    threshold, ties, _ = largest_of_rank(simd, inner[:inside], count - above, bins.top, bins.rest)
    _keep(simd, found, number, threshold, ties, scratch.tile, index, place)
    return True


@njit(nogil=True)
def _select_twice(simd, x, at, size, count, bounds, bins, scratch, index, place):
    """Select from a long segment in two passes over it; return whether the bounds were right."""
    low, high, _, room = bounds
    inner = scratch.inner if room <= _ROOM else np.empty(room + _STEP + _SLACK, np.int32)
    inside, above = 0, 0
    for begin in range(0, size, _STEP):
        if inside > room or above >= count:
            return False
        inside, more = find_between(simd, x, at + begin, min(_STEP, size - begin), low, high, inner, inside)
        above += more
    if above >= count or above + inside < count:
        return False
    threshold, ties, _ = largest_of_rank(simd, inner[:inside], count - above, bins.top, bins.rest)
    _write(simd, x, at, size, threshold, ties, scratch, index, place, place + count)
    return True


@njit(nogil=True)
def _select_long(simd, x, at, size, count, bins, scratch, index, place):
    """Select from a long segment, by bounds from a sample or else by counts of all elements."""
    bounds = bracket(sample_of(x, at, size), size, count, bins)
    if bounds[2] <= _ROOM:
        done = _select_collected(simd, x, at, size, count, bounds, bins, scratch, index, place)
    else:
        done = _select_twice(simd, x, at, size, count, bounds, bins, scratch, index, place)
    if not done:
        bits = x[at : at + size].view(np.int32)
        top_histogram(bits, bins.top)
        threshold, ties, _ = radix_rank(bits, count, bins.top, bins.rest)
        _write(simd, x, at, size, threshold, ties, scratch, index, place, place + count)


@kept(DIGEST)
def select_largest_range(simd, x, table, begin, first, last, index, scratch):
    """Select from segments ``first .. last``; the positions of segment s go to ``index[begin[s] : begin[s + 1]]``."""
    prefer_wide()
    bins = Bins(np.empty(BINS, np.int32), np.empty(BINS, np.int32))
    for segment in range(first, last):
        at, size, place = table.offset[segment], table.numel[segment], begin[segment]
        count = begin[segment + 1] - place
        if count == 0:
            continue
        if count == size:
            every = index[place : place + count]
            for i in range(every.size):
                every[i] = i
        elif size <= SHORT:
            _select_short(simd, x, at, size, count, bins, scratch, index, place)
        else:
            _select_long(simd, x, at, size, count, bins, scratch, index, place)


@kept(DIGEST)
def select_above_range(simd, x, table, threshold, begin, first, last, index, numbers, scratch):
    """Write the positions of elements that reach the thresholds of segments ``first .. last``, and count them."""
    prefer_wide()
    found = scratch.found
    for segment in range(first, last):
        at, size, total = table.offset[segment], table.numel[segment], 0
        place, stop, least = begin[segment], begin[segment + 1], threshold[segment]
        for here in range(0, size, _TILE):
            number = find_at_least(simd, x, at + here, min(_TILE, size - here), here, least, found.index, found.bits, 0)
            total += number
            written = min(number, stop - place)
            _copy(found.index, written, index, place)
            place += written
        numbers[segment] = total


@kept(DIGEST)
def excess_range(x, table, threshold, base, first, last, count, total, squares):
    """Count and add up magnitudes above thresholds of segments ``first .. last``."""
    prefer_wide()
    sums, powers = np.empty(EXCESS_LANES, np.float64), np.empty(EXCESS_LANES, np.float64)
    numbers = np.empty(EXCESS_LANES, np.int32)
    for segment in range(first, last):
        at, size = table.offset[segment], table.numel[segment]
        least, start = threshold.view(_i32)[segment], base[segment]
        count[segment], total[segment], squares[segment] = 0, 0.0, 0.0
        for here in range(0, size, BLOCK_SIZE):
            sums[:], powers[:], numbers[:] = 0.0, 0.0, 0
            values = x[at + here : at + min(size, here + BLOCK_SIZE)]
            bits, whole = values.view(_i32), values.size // EXCESS_LANES * EXCESS_LANES
            for i in range(0, whole, EXCESS_LANES):
                for lane in range(EXCESS_LANES):
                    above = bits[i + lane] & _i32(0x7FFFFFFF) > least
                    excess = np.float64(abs(values[i + lane])) - start if above else 0.0
                    numbers[lane] += above
                    sums[lane] += excess
                    powers[lane] += excess * excess
            for i in range(whole, values.size):
                if bits[i] & _i32(0x7FFFFFFF) > least:
                    excess = np.float64(abs(values[i])) - start
                    numbers[i - whole] += 1
                    sums[i - whole] += excess
                    powers[i - whole] += excess * excess
            half = EXCESS_LANES // 2
            while half:
                for lane in range(half):
                    numbers[lane] += numbers[lane + half]
                    sums[lane] += sums[lane + half]
                    powers[lane] += powers[lane + half]
                half //= 2
            count[segment] += numbers[0]
            total[segment] += sums[0]
            squares[segment] += powers[0]
