# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled search for the element of a given rank among 31-bit integers, and bounds of it from a sample."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import either
from gradwire.kernels.selection import simd

BINS = 2048
"""Bins of the first two passes, 11 bits each; the third has the lowest 9."""

_BISECTED = 2048  # up to so many, 31 comparisons in vectors are faster than three counts in bins
_i32, _i64, _u64 = np.int32, np.int64, np.uint64
_MAGNITUDE = _i32(0x7FFFFFFF)


@njit(nogil=True)
def plain_count_at_least(bits, threshold):
    total, least = _i32(0), _i32(threshold)
    for i in range(bits.size):
        # A sum of 32 bits takes half as many vectors as Numba's default of 64 bits.
        total = _i32(total + _i32(bits[i] >= least))
    return np.int64(total)


count_at_least = either(plain_count_at_least, simd.count_at_least)


@njit(nogil=True)
def top_histogram(bits, bins):
    """Count integers by the upper 11 bits of the 31 below their sign."""
    bins[:] = 0
    for i in range(bits.size):
        bins[_u64(_i32(bits[i] & _MAGNITUDE) >> _i32(20))] += 1


@njit(nogil=True)
def top_bin(bins, last, rank):
    """Return the bin that holds the element of a rank, counted from ``last`` down, and its rank in the bin."""
    here = last
    while bins[here] < rank:
        rank -= bins[here]
        here -= 1
    return here, rank


@njit(nogil=True)
def _histogram(bits, prefix, shift, width, bins):
    """Count the integers whose upper part is ``prefix`` by the ``width`` bits below it, from bit ``shift`` on."""
    bins[: 1 << width] = 0
    above, low, mask, wanted = _i32(shift + width), _i32(shift), _i32((1 << width) - 1), _i32(prefix)
    for i in range(bits.size):
        value = _i32(bits[i] & _MAGNITUDE)
        if _i32(value >> above) == wanted:
            bins[_u64(_i32(value >> low) & mask)] += 1


@njit(nogil=True)
def radix_rank(bits, rank, top, bins):
    """Return the result of :func:`largest_of_rank`, given the integers' :func:`top_histogram`."""
    prefix, rank = top_bin(top, BINS - 1, rank)
    for shift, width in ((9, 11), (0, 9)):
        _histogram(bits, prefix, shift, width, bins)
        here, rank = top_bin(bins, (1 << width) - 1, rank)
        prefix = prefix << width | here
    return prefix, rank, _i64(bins[prefix & 511])


@njit(nogil=True)
def largest_of_rank(simd, bits, rank, top, bins):
    """Return the element of a rank, the largest having rank 1, its rank among equal ones, and their number.

    ``bits`` is int32, without negative elements, and 1 <= ``rank`` <= ``bits.size``.
    """
    if bits.size > _BISECTED:
        top_histogram(bits, top)
        return radix_rank(bits, rank, top, bins)
    found = _i64(0)
    for bit in range(30, -1, -1):
        higher = found | _i64(1) << bit
        if count_at_least(simd, bits, higher) >= rank:
            found = higher
    above = count_at_least(simd, bits, found + 1) if found < 0x7FFFFFFF else _i64(0)
    return found, rank - above, count_at_least(simd, bits, found) - above


_CHUNK = 32
"""Neighbours in a sample: two cache lines."""

_MOST_CHUNKS = 1 << 13
_SHARE = 256  # elements of a segment for each chunk, up to _MOST_CHUNKS
_DEVIATIONS = 6.0
_LARGEST = 0x7FFFFFFF


@njit(nogil=True)
def sample_of(x, at, size):
    """Return the magnitudes of evenly spaced chunks of neighbours, from the first elements to the last."""
    chunks = min(_MOST_CHUNKS, size // _SHARE)
    sample, values = np.empty(_CHUNK * chunks, _i32), x[at : at + size].view(_i32)
    for chunk in range(chunks):
        place = chunk * (size - _CHUNK) // (chunks - 1)
        source, target = values[place : place + _CHUNK], sample[_CHUNK * chunk : _CHUNK * chunk + _CHUNK]
        for i in range(target.size):
            target[i] = _i32(source[i] & _i32(_LARGEST))
    return sample


@njit(nogil=True)
def _spread(sample, edge):
    """Return the variance over chunks of the number of elements that reach ``edge``, over its mean; at least 1.

    It exceeds 1 if large elements are neighbours, such as the rows of an embedding, of which all elements or none have
    a gradient. A sample of chunks is then less certain than one of single elements.
    """
    total, squares, least, chunks = 0.0, 0.0, _i32(edge), sample.size // _CHUNK
    for chunk in range(chunks):
        part, number = sample[_CHUNK * chunk : _CHUNK * chunk + _CHUNK], _i32(0)
        for i in range(part.size):
            number = _i32(number + _i32(part[i] >= least))
        total += number
        squares += np.float64(number) * np.float64(number)
    return max(1.0, (squares - total * total / chunks) / total)


@njit(nogil=True)
def bracket(sample, size, count, bins):
    """Bound the element of rank ``count`` of ``size``, given a sample of them.

    Returns:
        A lower bound, an upper bound, the largest plausible number of elements that reach the lower bound, and the
        largest plausible number of these that are not above the upper bound.
    """
    expected = count * (sample.size / size)
    top_histogram(sample, bins.top)
    likely = top_bin(bins.top, BINS - 1, max(1, int(expected)))[0]
    deviation = _DEVIATIONS * np.sqrt(expected * _spread(sample, likely << 20)) + 8
    last, first = int(expected + deviation) + 1, int(expected - deviation)
    low = radix_rank(sample, last, bins.top, bins.rest)[0] if last <= sample.size else 0
    high = radix_rank(sample, first, bins.top, bins.rest)[0] if first >= 1 else _LARGEST
    each = size / sample.size
    room = min(size, int((expected + 2 * deviation) * each) + 1)
    return low, high, room, min(size, int(4 * deviation * each) + 1)
