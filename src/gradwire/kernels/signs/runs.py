"""Runs of elements that share a pair of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import HyperparameterError
from gradwire.kernels.table import SegmentTable

__all__ = ["RunColumns", "RunTable"]


class RunColumns(NamedTuple):
    """A :class:`RunTable`, as compiled code takes it: in one object."""

    first: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


class RunTable:
    """Segments, and the runs of elements, anchored to the parameter, that share a pair of values.

    Args:
        table: The segments.
        length: Elements of a run, one number for each segment (int64 ``[S]``) or one for all: at least 1, any.

    Attributes:
        phase: Elements of its run that lie before each segment's first, int64 ``[S]``.
        first: Number of runs that begin in, or reach into, the segments before each one, int64 ``[S + 1]``.
        runs: Their number; a run cut by the end of a segment counts in each.
        columns: What compiled code takes.
    """

    __slots__ = ("__weakref__", "columns", "first", "length", "phase", "runs", "table")

    def __init__(self, table: SegmentTable, length: int | Sequence[int] | npt.NDArray[Any]) -> None:
        self.table = table
        self.length = np.array(np.broadcast_to(np.asarray(length, np.int64), len(table)))
        if np.any(self.length < 1):
            raise HyperparameterError(f"a run of {int(self.length.min())} elements: at least 1 is needed")
        self.phase = table.start % self.length
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // self.length), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.runs = int(self.first[-1])
        self.columns = RunColumns(self.first, self.phase, self.length)

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The segment of each run, int64 ``[runs]``."""
        return np.repeat(np.arange(len(self.table)), np.diff(self.first))

    @property
    def number(self) -> npt.NDArray[np.int64]:
        """Each run's number within its parameter, int64 ``[runs]``."""
        owner = self.owner
        return np.arange(self.runs) - self.first[owner] + self.table.start[owner] // self.length[owner]

    def elements(self) -> SegmentTable:
        """Return the elements of each run, a segment each."""
        owner = self.owner
        within = (np.arange(self.runs) - self.first[owner]) * self.length[owner] - self.phase[owner]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.length[owner], self.table.numel[owner])
        nothing = np.zeros(self.runs, np.int64)
        return SegmentTable(self.table.offset[owner] + begin, end - begin, nothing, np.zeros((self.runs, 2)))
