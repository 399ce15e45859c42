"""Blocks of elements that share a scale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import LANES, SegmentTable

__all__ = ["WHOLE", "BlockColumns", "BlockTable"]

WHOLE = 1 << 40
"""The block size that makes one block of every parameter."""


class BlockColumns(NamedTuple):
    """A :class:`BlockTable`, as compiled code takes it: in one object."""

    first: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    size: int


class BlockTable:
    """Segments, and the blocks of ``block_size`` elements, anchored to the parameter, that share a scale.

    Args:
        table: The segments.
        block_size: A multiple of 16, so that 16 neighbours share a block.

    Attributes:
        first: Number of blocks that begin in, or reach into, the segments before each one, int64 ``[S + 1]``.
        blocks: Their number; a block cut by the end of a segment counts in each.
        columns: What compiled code takes.
    """

    __slots__ = ("__weakref__", "block_size", "blocks", "columns", "first", "phase", "table")

    def __init__(self, table: SegmentTable, block_size: int) -> None:
        if block_size < 1 or block_size % LANES:
            raise HyperparameterError(f"block_size {block_size}: a multiple of {LANES} is needed")
        self.table, self.block_size = table, block_size
        self.phase = table.start % block_size
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // block_size), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.blocks = int(self.first[-1])
        self.columns = BlockColumns(self.first, self.phase, block_size)

    def runs(self) -> SegmentTable:
        """Return the elements of each block, a segment each."""
        segment = np.repeat(np.arange(len(self.table)), np.diff(self.first))
        within = (np.arange(self.blocks) - self.first[segment]) * self.block_size - self.phase[segment]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.block_size, self.table.numel[segment])
        nothing = np.zeros(self.blocks, np.int64)
        return SegmentTable(self.table.offset[segment] + begin, end - begin, nothing, np.zeros((self.blocks, 2)))
