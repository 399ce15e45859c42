# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Parts of compiled loops: caching on disk, the choice of bodies, pieces of segments, and work for threads."""

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

from gradwire.kernels.numba_core.storing import stored
from gradwire.kernels.table import GROUP_SIZE, SegmentTable


def kept(digest: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a loop and stores the code on disk.

    Numba names the stored file by the function, and drops it when the function's own file changes. The digest of all
    sources becomes part of the function's name, so that code of other sources is never loaded: loading fails if it
    refers to named tuples that no longer exist.
    """

    def wrap(function):
        function.__qualname__ += f".{digest}"
        return stored(function)

    return wrap


def either(plain: Any, simd: Any) -> Any:
    """Return a function that calls the scalar body ``plain`` or the body ``simd`` of explicit vectors.

    The type of the function's first argument chooses the body when the caller is compiled: ``None`` the scalar one,
    ``True`` explicit vectors. So both variants are cached on disk. A body takes the other arguments.
    """

    def body(variant, *arguments):
        raise RuntimeError("called from compiled code only")

    # Inlined, since passing arrays to a function costs as much as processing a short segment.
    @overload(body, jit_options={"forceinline": True})
    def choose(variant, *arguments):
        chosen = plain if isinstance(variant, types.NoneType) else simd

        def call(variant, *arguments):
            return chosen(*arguments)

        return call

    return body


@njit(nogil=True)
def copy_into(target, source):
    """Copy the first ``target.size`` values of ``source`` to ``target``.

    For ``target[:] = source`` Numba also compiles an error message about two shapes, and with it most of its support
    for strings, which takes three seconds in each module with such a line.
    """
    for i in range(target.size):
        target[i] = source[i]


class RandomStream(NamedTuple):
    """Round and stream of random words, see :mod:`gradwire.kernels.philox`."""

    round: np.uint64
    stream: np.uint32


class Noise(NamedTuple):
    """The source of a piece's random words: key and counter; ``block`` is the block of its first lane."""

    key0: np.uint32
    key1: np.uint32
    round: np.uint64
    stream: np.uint32
    block: int


class Piece(NamedTuple):
    """Neighbouring groups of one segment, up to group ``stop``.

    The piece has ``numel`` elements, the first of which is ``x[at]``, after ``within`` elements of the segment.
    """

    segment: int
    stop: int
    within: int
    at: int
    numel: int


def draw_of(round: int, stream: int) -> RandomStream:
    """Return round and stream in the types that compiled code expects."""
    return RandomStream(np.uint64(round), np.uint32(stream))


@njit(nogil=True)
def find_segment(table, group):
    """Return the segment of a group, or an earlier one with no groups between them."""
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
    """Return the piece from ``group`` up to at most ``end``; ``segment`` is its segment or an earlier one."""
    while table.first_group[segment + 1] <= group:
        segment += 1
    within = 80 * (group - table.first_group[segment])
    stop = min(end, table.first_group[segment + 1])
    count = min(80 * (stop - group), table.numel[segment] - within)
    return Piece(segment, stop, within, table.offset[segment] + within, count)


@njit(nogil=True)
def noise_at(table, piece, draw):
    """Return the source of the random words of a piece."""
    segment = piece.segment
    block = (table.start[segment] + piece.within) // 80 * 16
    return Noise(table.key[segment, 0], table.key[segment, 1], draw.round, draw.stream, block)


TILE_GROUPS = 40
"""Groups of a tile, whose digits stay in the L1 cache between two steps: 12.5 KiB of float32."""

STREAMED_GROUPS = 1 << 12
"""Groups from which on a call writes past the caches: 1.25 MiB of float32, which would evict other data."""

MIN_STREAMED = 1280
"""Elements of a segment from which on writing past the caches is faster."""

_MIN_PART = 1 << 16  # elements of a thread's part, below which another thread costs more than it saves


class ByteRows(NamedTuple):
    """A matrix of bytes: row r begins at ``octets[r * stride]``."""

    octets: Any
    stride: int
    number: int


class Compiled:
    """Base class of each family's compiled operations.

    Args:
        simd: True for explicit vectors, False for scalar bodies.
        threads: Number of threads that share a call; results have the same bits for any number.

    Attributes:
        simd: First argument of loops: True for explicit vectors, None for scalar bodies (see :func:`either`).
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
        """Run ``work(first, last)`` over whole segments on the threads, with similar numbers of elements for each."""

        def some(begin: int, end: int) -> None:
            first, last = (int(np.searchsorted(table.first_group, group)) for group in (begin, end))
            work(first, len(table) if end == table.groups else last)

        self.split(table.groups, 1, GROUP_SIZE, some)


def one_row(octets: torch.Tensor) -> ByteRows:
    """View a vector of bytes as a matrix of one row."""
    return ByteRows(octets.numpy(), 0, 1)


def rows_of(rows: torch.Tensor) -> ByteRows:
    """View a matrix of bytes as an argument of compiled code."""
    number, length = rows.shape
    if not length:
        return ByteRows(np.empty(0, np.uint8), 0, number)
    stride = rows.stride(0) if number > 1 else length
    return ByteRows(rows.as_strided(((number - 1) * stride + length,), (1,)).numpy(), stride, number)
