"""What a sparse method keeps or leaves out as a whole: elements, or runs of neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.exchange.codecs.dense import joined_runs
from gradwire.exchange.segments import Segment
from gradwire.kernels import SegmentTable

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["UnitTable"]


class UnitTable:
    """The units of whole parameters in a flat vector, numbered through in the order of the segments.

    Args:
        segments: The parameters.
        length: Elements of a unit of each segment; they divide the segment's.

    Attributes:
        units: Their number.
        elements: Elements of all.
        single: Whether each is one element.
        first: Number of units before each segment, int64 ``[segments + 1]``.
        runs: Where the segments lie, see :func:`joined_runs`.
    """

    def __init__(self, segments: Sequence[Segment], length: Sequence[int]) -> None:
        self.segments, self.length = list(segments), np.array(length, np.int64)
        self.offset = np.array([s.offset for s in segments], np.int64)
        self.numel = np.array([s.numel for s in segments], np.int64)
        self.elements, self.single = int(self.numel.sum()), bool((self.length == 1).all())
        self.first = np.concatenate([[0], np.cumsum(self.numel // self.length)])
        self.units = int(self.first[-1])
        ends = self.offset + self.numel
        self._joined = self.single and bool((self.offset[1:] == ends[:-1]).all())
        self.runs = joined_runs(segments)

    def blocks(self, size: int | None) -> SegmentTable:
        """Cut the units of each segment into blocks of ``size`` units, a row each, where :meth:`score` puts them.

        None stands for one block a segment.
        """
        begin, numel = [], []
        for i, (a, b) in enumerate(zip(self.first[:-1].tolist(), self.first[1:].tolist())):
            at = np.arange(a, b, size or max(1, b - a))
            begin.append(at - a + self.offset[i] if self.single else at)
            numel.append(np.minimum(b - at, size or b - a))
        starts, counts = np.concatenate([*begin, []]).astype(np.int64), np.concatenate([*numel, []]).astype(np.int64)
        return SegmentTable(starts, counts, np.zeros_like(starts), np.zeros((len(starts), 2), np.uint32))

    def score(self, kernels: Kernels, flat: torch.Tensor) -> torch.Tensor:
        """Return the magnitude of each unit, as an element of what :meth:`blocks` describes: its Euclidean norm.

        That of a unit with a value that is not finite is +inf. Single elements are their own score, sign included.
        """
        if self.single:
            return flat
        at = np.concatenate([o + np.arange(0, n, k) for o, n, k in zip(self.offset, self.numel, self.length)])
        each = np.repeat(self.length, np.diff(self.first))
        table = SegmentTable(at, each, np.zeros_like(at), np.zeros((len(at), 2), np.uint32))
        moments = kernels.moments(flat, table)
        return torch.where(torch.isfinite(moments.max_abs), moments.norm.to(torch.float32), torch.inf)

    def places(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the places in the flat vector of all elements of units, given ascending, int64."""
        if self._joined:
            return chosen + int(self.offset[0]) if len(self.offset) else chosen.long()
        segment = self._segments(chosen)
        length, first = torch.from_numpy(self.length)[segment], torch.from_numpy(self.first)[segment]
        begin = torch.from_numpy(self.offset)[segment] + (chosen - first) * length
        if self.single:
            return begin
        ends = length.cumsum(0)
        within = torch.arange(int(ends[-1]) if len(ends) else 0) - torch.repeat_interleave(ends - length, length)
        return torch.repeat_interleave(begin, length) + within

    def counts(self, chosen: torch.Tensor) -> tuple[int, ...]:
        """Return how many elements of each segment the units hold, which are given ascending."""
        cuts = np.searchsorted(chosen.numpy(), self.first)
        return tuple((np.diff(cuts) * self.length).tolist())

    def lengths(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return how many elements each unit has, int64."""
        if self.single:
            return torch.ones(len(chosen), dtype=torch.int64)
        return torch.from_numpy(self.length)[self._segments(chosen)]

    def _segments(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the segment of each unit."""
        return torch.from_numpy(np.searchsorted(self.first[1:], chosen.numpy(), side="right"))
