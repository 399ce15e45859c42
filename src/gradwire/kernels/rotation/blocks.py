"""The table of blocks that are rotated one by one, and of the vector of their coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import LANES, SegmentTable

LEAST_BLOCK = LANES * LANES
"""Coordinates of the smallest block: shorter ones are filled up with zeros."""

MOST_BLOCK = 1 << 15
"""Coordinates of the largest block: 128 KiB, which fit a core's own cache."""


class RotationColumns(NamedTuple):
    """A :class:`RotationTable`, as one argument of compiled code; one row for each block."""

    offset: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint32]
    place: npt.NDArray[np.int64]


class RotationTable:
    """Segments cut into blocks, and a vector of coordinates that holds the blocks one after the other.

    The blocks of a segment have ``size`` elements. The rest of a segment is filled up with zeros to the next power of
    two, at least 256, and is one more block. So a parameter of n elements has at most 2 max(n, 128) coordinates, and
    one of more than ``size`` elements at most ``size / 2`` more coordinates than elements.

    Args:
        offset, numel, start, key: As for :class:`gradwire.kernels.SegmentTable`, but ``start`` must be a multiple of
            ``size`` instead of 80.
        size: A power of two, 256 to 32768.

    Attributes:
        place: First coordinate of each block, and the end of the last, int64 ``[blocks + 1]``.
        blocks: Number of blocks.
        coordinates: Number of coordinates of all blocks.
        by_segment: Number of coordinates of each segment.
        extent: Number of elements that a vector must have at least.
        columns: The table as one argument of compiled code.

    Raises:
        HyperparameterError: ``size`` is no such power of two, or segments overlap, descend or start elsewhere.
    """

    __slots__ = ("__weakref__", "blocks", "by_segment", "columns", "coordinates", "extent", "place", "size")

    def __init__(
        self,
        offset: Sequence[int] | npt.NDArray[Any],
        numel: Sequence[int] | npt.NDArray[Any],
        start: Sequence[int] | npt.NDArray[Any],
        key: Sequence[tuple[int, int]] | npt.NDArray[Any],
        size: int,
    ) -> None:
        if not LEAST_BLOCK <= size <= MOST_BLOCK or size & (size - 1):
            raise HyperparameterError(f"blocks of {size}: a power of two from {LEAST_BLOCK} to {MOST_BLOCK} is needed")
        begin = np.array(start, np.int64)
        table = SegmentTable(offset, numel, np.zeros_like(begin), key)
        if len(begin) != len(table) or np.any(begin % size) or np.any(begin < 0):
            raise HyperparameterError(f"a segment starts off its parameter's grid of blocks of {size}")
        self.size, self.extent = size, table.extent
        counts = -(-table.numel // size)
        first = np.cumsum(counts) - counts
        self.blocks = int(counts.sum())
        segment = np.repeat(np.arange(len(table)), counts)
        within = (np.arange(self.blocks) - first[segment]) * size
        left = np.minimum(table.numel[segment] - within, size)
        self.place = np.zeros(self.blocks + 1, np.int64)
        np.cumsum(_powers(left), out=self.place[1:])
        self.coordinates = int(self.place[-1])
        self.by_segment: list[int] = (self.place[first + counts] - self.place[first]).tolist()
        self.columns = RotationColumns(
            table.offset[segment] + within, left, begin[segment] + within, table.key[segment], self.place
        )
        for column in self.columns:
            column.flags.writeable = False

    def runs(self) -> SegmentTable:
        """Return a table in which each block is a segment, for statistics of blocks."""
        nothing = np.zeros(self.blocks, np.int64)
        return SegmentTable(self.columns.offset, self.columns.numel, nothing, self.columns.key)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """The number of coordinates of each block."""
        return np.diff(self.place)

    def __repr__(self) -> str:
        return f"RotationTable({self.blocks} blocks, {self.coordinates} coordinates)"


def _powers(numel: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the smallest power of two that is at least each number and at least :data:`LEAST_BLOCK`."""
    power = np.full(numel.shape, LEAST_BLOCK, np.int64)
    while np.any(power < numel):
        power = np.where(power < numel, 2 * power, power)
    return power
