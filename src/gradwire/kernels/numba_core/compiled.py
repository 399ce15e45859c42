"""What the compiled kernels of all families share: which bodies serve them, and how threads divide a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["Compiled", "joined", "segment_of"]

_MIN_PART = 1 << 16  # elements below which a second thread costs more than it saves


class Compiled:
    """Base of the kernels of each family.

    Args:
        vectors: explicit vectors rather than plain loops.
        threads: how many threads share a call; the result has the same bits for any number.
    """

    def __init__(self, vectors: bool = True, threads: int = 1) -> None:
        self._vectors = vectors
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "gradwire-kernels") if threads > 1 else None

    def _variant(self, family: str) -> bool | None:
        """Say which bodies serve a family, as the drivers want it: see :mod:`gradwire.kernels.numba_core.overloads`."""
        return True if self._vectors else None

    def _split(self, size: int, unit: int, unit_elements: int, work: Callable[[int, int], None]) -> None:
        """Run ``work(begin, end)`` over ``0 .. size``, cut at multiples of ``unit``, on the threads."""
        parts = 1 if self._pool is None else max(1, min(self._threads, size * unit_elements // _MIN_PART))
        if parts == 1 or self._pool is None:
            work(0, size)
            return
        cuts = [size * part // parts // unit * unit for part in range(parts)] + [size]
        for future in [self._pool.submit(work, a, b) for a, b in itertools.pairwise(cuts)]:
            future.result()

    def _split_segments(self, table: SegmentTable, work: Callable[[int, int], None]) -> None:
        """Run ``work(first, last)`` over the segments, cut by elements, on the threads; a segment is one thread's."""

        def some(begin: int, end: int) -> None:
            first, last = (int(np.searchsorted(table.first_group, group)) for group in (begin, end))
            work(first, len(table) if end == table.groups else last)

        self._split(table.groups, 1, GROUP_SIZE, some)


def joined(rows: torch.Tensor) -> tuple[npt.NDArray[np.uint8], int]:
    """Give all rows of bytes as one vector, gaps included, and the distance from one to the next."""
    number, length = rows.shape
    if not length:
        return np.empty(0, np.uint8), 0
    stride = rows.stride(0) if number > 1 else length
    return rows.as_strided(((number - 1) * stride + length,), (1,)).numpy(), stride


def segment_of(table: SegmentTable, group: int) -> int:
    """Find the segment of a group, or any valid start for the search of a group past the last."""
    return max(0, int(np.searchsorted(table.first_group, group, side="right")) - 1) if group < table.groups else 0
