"""Where the elements of groups lie, for backends that work on whole tensors."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["Places"]


class Places:
    """Where the elements of groups ``begin .. end`` lie, all groups by default; G of them.

    Attributes:
        segment: Of each group, int64 ``[G]``.
        inside: Whether an element is inside its segment, bool ``[G, 80]``.
        index: In the vector, of each element, int64 ``[G, 80]``, clamped to the segment.
        group: Of each group within its parameter, int64 ``[G]``.
        key: Of each group's parameter, int64 ``[G, 2]``.
    """

    def __init__(self, table: SegmentTable, begin: int = 0, end: int | None = None) -> None:
        number = np.arange(begin, table.groups if end is None else end)
        segment = np.searchsorted(table.first_group, number, side="right") - 1
        own = number - table.first_group[segment]
        within = own[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)
        last = table.numel[segment, None] - 1
        self.segment = torch.from_numpy(segment)
        self.inside = torch.from_numpy(within <= last)
        self.index = torch.from_numpy(table.offset[segment, None] + np.minimum(within, last))
        self.group = torch.from_numpy(table.start[segment] // GROUP_SIZE + own)
        self.key = torch.from_numpy(table.key.astype(np.int64)[segment])
