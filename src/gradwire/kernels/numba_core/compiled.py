# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""How loops are compiled: one source with two sets of bodies, explicit vectors and scalar ones; kept on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.core import types
from numba.extending import overload

from gradwire.kernels.table import GROUP_SIZE, SegmentTable


def kept(digest: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a loop, and keep the compiled code on disk.

    Numba names the file by the function and drops it when the function's own file changes. With the digest of all that
    the function is compiled from in its name, code of other sources is never even looked at: named tuples that these
    sources lack would make that fail.
    """

    def wrap(function):
        function.__qualname__ += f".{digest}"
        return njit(nogil=True, cache=True)(function)

    return wrap


def either(plain: Any, simd: Any) -> Any:
    """Return a function that calls the scalar body ``plain`` or the body ``simd`` of explicit vectors.

    Its first argument decides: ``None`` takes the scalar body, ``True`` that of explicit vectors. The *type* decides,
    when the caller is compiled, so that either variant is cached on disk. Both bodies take the other arguments.
    """

    def body(variant, *arguments):
        raise RuntimeError("called from compiled code only")

    # Inlined, since passing arrays to a call costs as much as a short segment's work.
    @overload(body, jit_options={"forceinline": True})
    def choose(variant, *arguments):
        chosen = plain if isinstance(variant, types.NoneType) else simd

        def call(variant, *arguments):
            return chosen(*arguments)

        return call

    return body


@njit(nogil=True)
def copy_into(target, source):
    """Copy as many values as ``target`` has from the beginning of ``source``, which has as many or more.

    For ``target[:] = source`` Numba compiles the text of an error about two shapes as well, and with it most of its
    strings: three seconds, in each module that has such a line.
    """
    for i in range(target.size):
        target[i] = source[i]


class RandomStream(NamedTuple):
    """Which random words are drawn: see :mod:`gradwire.kernels.philox`."""

    round: np.uint64
    stream: np.uint32


class Noise(NamedTuple):
    """What the random words of a piece are computed from; ``block`` is that of its first lane."""

    key0: np.uint32
    key1: np.uint32
    round: np.uint64
    stream: np.uint32
    block: int


class Piece(NamedTuple):
    """Neighbouring groups of one segment, from the one asked for up to ``stop``.

    ``within`` elements of the segment lie before them; the first of their ``numel`` elements is ``x[at]``.
    """

    segment: int
    stop: int
    within: int
    at: int
    numel: int


def draw_of(round: int, stream: int) -> RandomStream:
    """Return a draw in the types that compiled code expects."""
    return RandomStream(np.uint64(round), np.uint32(stream))


@njit(nogil=True)
def find_segment(table, group):
    """Return the segment that a group lies in, or one before it without groups between."""
    low, high = 0, max(1, table.offset.size)
    while high - low > 1:
        middle = (low + high) // 2
        if table.first_group[middle] <= group:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True)
def next_piece(table, segment, group, end):
    """Return the piece that begins at ``group``, which lies in ``segment`` or after it, up to group ``end``."""
    while table.first_group[segment + 1] <= group:
        segment += 1
    within = 80 * (group - table.first_group[segment])
    stop = min(end, table.first_group[segment + 1])
    count = min(80 * (stop - group), table.numel[segment] - within)
    return Piece(segment, stop, within, table.offset[segment] + within, count)


@njit(nogil=True)
def noise_at(table, piece, draw):
    """Return what the random words of a piece are computed from."""
    segment = piece.segment
    block = (table.start[segment] + piece.within) // 80 * 16
    return Noise(table.key[segment, 0], table.key[segment, 1], draw.round, draw.stream, block)


TILE_GROUPS = 40
"""Groups whose digits are in hand between two steps of work: 12.5 KiB of four bytes, well within the L1 cache."""

STREAMED_GROUPS = 1 << 12
"""Groups from which on a call writes past the caches: 1.25 MiB of floats, which would push out other data."""

MIN_STREAMED = 1280
"""Elements of a segment from which on that pays."""

_MIN_PART = 1 << 16  # elements below which a second thread costs more than it saves


class ByteRows(NamedTuple):
    """A matrix of bytes: row r begins at ``octets[r * stride]``."""

    octets: Any
    stride: int
    number: int


class Compiled:
    """Base of each family's operations.

    Attributes:
        simd: What the loops take as first argument: True for explicit vectors, None for scalar bodies, since it is the
            type that decides (see :func:`either`).

    Args:
        simd: Explicit vectors rather than scalar bodies.
        threads: How many threads share a call; the result has the same bits for any number.
    """

    def __init__(self, simd: bool = True, threads: int = 1) -> None:
        self.simd = True if simd else None
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "gradwire-kernels") if threads > 1 else None

    def split(self, size: int, unit: int, unit_elements: int, work: Callable[[int, int], object]) -> None:
        """Run ``work(begin, end)`` over ``0 .. size``, cut at multiples of ``unit``, on the threads."""
        parts = 1 if self._pool is None else max(1, min(self._threads, size * unit_elements // _MIN_PART))
        if parts == 1 or self._pool is None:
            work(0, size)
            return
        cuts = [size * part // parts // unit * unit for part in range(parts)] + [size]
        for future in [self._pool.submit(work, a, b) for a, b in itertools.pairwise(cuts)]:
            future.result()

    def split_segments(self, table: SegmentTable, work: Callable[[int, int], object]) -> None:
        """Run ``work(first, last)`` over the segments, cut by elements, on the threads; a segment is one thread's."""

        def some(begin: int, end: int) -> None:
            first, last = (int(np.searchsorted(table.first_group, group)) for group in (begin, end))
            work(first, len(table) if end == table.groups else last)

        self.split(table.groups, 1, GROUP_SIZE, some)


def one_row(octets: torch.Tensor) -> ByteRows:
    """View a vector of bytes as a matrix of one row."""
    return ByteRows(octets.numpy(), 0, 1)


def rows_of(rows: torch.Tensor) -> ByteRows:
    """View a matrix of bytes as compiled code takes it."""
    number, length = rows.shape
    if not length:
        return ByteRows(np.empty(0, np.uint8), 0, number)
    stride = rows.stride(0) if number > 1 else length
    return ByteRows(rows.as_strided(((number - 1) * stride + length,), (1,)).numpy(), stride, number)
