"""What the loops of all families share: which bodies serve them, and how threads divide a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["MIN_STREAMED", "STREAMED_GROUPS", "TILE_GROUPS", "ByteRows", "Compiled", "one_row", "rows_of"]

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
            type that decides (see :mod:`gradwire.kernels.numba_core.overloads`).

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
