"""Where the elements of groups lie, for backends that work on whole tensors."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["GroupIndex"]


class GroupIndex:
    """Where the elements of groups ``begin .. end`` lie, all groups by default; G of them.

    Attributes:
        segment: Of each group, int64 ``[G]``.
        within: Index in the segment, of each element, int64 ``[G, 80]``, clamped to the segment.
        inside: Whether an element is inside its segment, bool ``[G, 80]``.
        index: Index in the vector, of each element, int64 ``[G, 80]``, clamped to the segment.
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
        """Return the elements, ``[G, 80]``, with zeros past the ends of segments."""
        return torch.where(self.inside, x[self.index], 0.0)

    def uniform(self, round: int, stream: int) -> torch.Tensor:
        """Return the elements' 24-bit uniform integers, int64 ``[G, 80]``."""
        return uniform_integers(self._group, self._key, round, stream).reshape(-1, GROUP_SIZE)

    def write(self, values: torch.Tensor, x: torch.Tensor, accumulate: bool) -> None:
        """Write the values ``[G, 80]`` of elements inside of segments to ``x``, or add them."""
        index, found = self.index[self.inside], values[self.inside]
        x[index] = x[index] + found if accumulate else found
