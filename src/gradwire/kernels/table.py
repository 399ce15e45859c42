"""The segments of a flat vector, their groups of 80 elements, and the elements of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.philox import uniform_integers

LANES = 16
"""Neighbouring values of a group that form a plane: one AVX-512 register of float32."""

PLANES = 5
"""Planes of a group, and trits in a byte: 3^5 = 243 <= 256."""

GROUP_SIZE = LANES * PLANES
"""Elements of a group."""

GROUP_BYTES = LANES
"""Bytes of an encoded group: byte j holds the trits of elements j, 16 + j, 32 + j, 48 + j and 64 + j."""

SIGN_BYTES = GROUP_SIZE // 8
"""Bytes of the signs of a group, one bit for each element."""

BLOCK_SIZE = 4096
"""Elements of a block of exact moments: 16 KiB of float32, so that a second pass reads it from the L1 cache."""

_MAX_GROUPS = 2**28  # a group takes 16 Philox blocks: with more groups the 32-bit block counter would wrap


class Columns(NamedTuple):
    """The columns of a :class:`SegmentTable`, as one argument of compiled code."""

    offset: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint32]
    first_group: npt.NDArray[np.int64]


class SegmentTable:
    """The segments of a flat float32 vector ``x``, one row each, in read-only NumPy arrays.

    Segments ascend and do not overlap, but need not be adjacent: no kernel reads or writes the elements of ``x`` that
    belong to no segment. A segment is cut into *groups* of 80 elements from its start; the last one may be partial.
    Groups are numbered across all segments, in order.

    Args:
        offset: index in ``x`` of each segment's first element, int64 ``[S]``.
        numel: number of elements of each segment, int64 ``[S]``, at least 0.
        start: index within its parameter of each segment's first element, int64 ``[S]``; a multiple of 80, so that the
            groups of a parameter are the same however it is cut.
        key: the two words of each segment's Philox key, uint32 ``[S, 2]``.

    Attributes:
        first_group: number of groups before each segment, int64 ``[S + 1]``.
        columns: ``offset``, ``numel``, ``start``, ``key`` and ``first_group``.

    Example:
        >>> table = SegmentTable(offset=[0, 100], numel=[100, 80], start=[0, 160], key=[(1, 2), (3, 4)])
        >>> table.first_group.tolist(), table.groups, table.extent
        ([0, 2, 3], 3, 180)
    """

    __slots__ = (
        "__weakref__", "columns", "extent", "first_group", "groups", "key", "numel", "offset", "segments", "start",
    )  # fmt: skip

    offset: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint32]
    first_group: npt.NDArray[np.int64]
    segments: int
    groups: int
    extent: int

    def __init__(
        self,
        offset: Sequence[int] | npt.NDArray[Any],
        numel: Sequence[int] | npt.NDArray[Any],
        start: Sequence[int] | npt.NDArray[Any],
        key: Sequence[tuple[int, int]] | npt.NDArray[Any],
    ) -> None:
        self.offset, self.numel, self.start = (np.array(column, np.int64) for column in (offset, numel, start))
        self.segments = len(self.offset)
        self.key = np.array(key, np.uint32).reshape(-1, 2)
        self._check()
        self.first_group = np.zeros(self.segments + 1, np.int64)
        np.cumsum(-(-self.numel // GROUP_SIZE), out=self.first_group[1:])
        self.groups = int(self.first_group[-1])
        # The number of elements that x must have at least.
        self.extent = int((self.offset + self.numel)[-1]) if self.segments else 0
        self.columns = Columns(self.offset, self.numel, self.start, self.key, self.first_group)
        for column in self.columns:
            column.flags.writeable = False

    def _check(self) -> None:
        columns = {"offset": self.offset, "numel": self.numel, "start": self.start}
        for name, column in columns.items():
            if column.ndim != 1 or len(column) != self.segments:
                raise HyperparameterError(
                    f"segment table: {name} has shape {column.shape}, offset has {self.offset.shape}: "
                    "pass one number per segment"
                )
            if self.segments and int(column.min()) < 0:
                raise HyperparameterError(f"segment table: {name} holds {int(column.min())}: it must not be negative")
        if len(self.key) != self.segments:
            raise HyperparameterError(
                f"segment table: {len(self.key)} keys for {self.segments} segments: pass two 32-bit words per segment"
            )
        if np.any(self.offset[1:] < (self.offset + self.numel)[:-1]):
            raise HyperparameterError("segment table: segments overlap or descend: sort them by offset")
        if np.any(self.start % GROUP_SIZE):
            raise HyperparameterError(
                f"segment table: a segment starts off its parameter's grid: start must be a multiple of {GROUP_SIZE}"
            )
        if self.segments and int((self.start + self.numel).max()) > _MAX_GROUPS * GROUP_SIZE:
            raise HyperparameterError(
                f"segment table: a parameter has more than {_MAX_GROUPS * GROUP_SIZE} elements, the reach of its "
                "32-bit block counter: split the parameter"
            )

    def __len__(self) -> int:
        return self.segments

    def __repr__(self) -> str:
        return f"SegmentTable({self.segments} segments, {int(self.numel.sum())} elements, {self.groups} groups)"


class GroupIndex:
    """The indices of the elements of G groups, ``begin .. end`` of a table; all groups by default.

    Attributes:
        segment: Segment of each group, int64 ``[G]``.
        within: Index of each element in its segment, int64 ``[G, 80]``, clamped to the segment.
        inside: True for elements inside of their segment, bool ``[G, 80]``.
        index: Index of each element in the vector, int64 ``[G, 80]``, clamped to the segment.
    """

    def __init__(self, table: SegmentTable, begin: int = 0, end: int | None = None) -> None:
        number = np.arange(begin, table.groups if end is None else end)
        segment = np.searchsorted(table.first_group, number, side="right") - 1
        own = number - table.first_group[segment]
        within = own[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)
        last = table.numel[segment, None] - 1
        clamped = np.minimum(within, last)
        self.segment = torch.from_numpy(segment)
        self.within = torch.from_numpy(clamped)
        self.inside = torch.from_numpy(within <= last)
        self.index = torch.from_numpy(table.offset[segment, None] + clamped)
        self._group = torch.from_numpy(table.start[segment] // GROUP_SIZE + own)
        self._key = torch.from_numpy(table.key.astype(np.int64)[segment])

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elements ``[G, 80]`` of ``x``, with zeros past the ends of segments."""
        return torch.where(self.inside, x[self.index], 0.0)

    def uniform(self, round: int, stream: int) -> torch.Tensor:
        """Return the elements' 24-bit uniform integers, int64 ``[G, 80]``."""
        return uniform_integers(self._group, self._key, round, stream).reshape(-1, GROUP_SIZE)

    def write(self, values: torch.Tensor, x: torch.Tensor, accumulate: bool) -> None:
        """Write the values ``[G, 80]`` to the elements of ``x`` inside of segments, or add them if ``accumulate``."""
        index, found = self.index[self.inside], values[self.inside]
        x[index] = x[index] + found if accumulate else found
