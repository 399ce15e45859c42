"""The codec of plain floats, for excluded and small parameters and for warm-up rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.codecs.base import Constant, Draw, MergeableCodec, SummableCodec, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import ALIGNMENT
from gradwire.kernels import Coder


class NoSummary:
    """An empty summary."""

    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> NoSummary:
        return self


def joined_runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the positions of segments in a flat vector, as (offset, numel), with neighbours joined."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and sum(runs[-1]) == segment.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + segment.numel)
        else:
            runs.append((segment.offset, segment.numel))
    return runs


class DenseCodec(SummableCodec, MergeableCodec):
    """The mean as sum over ranks of x_r * float32(1 / world_size), added in the order of ranks.

    The order is fixed here and not by the backend, so that the bits depend on neither the owner of an element nor its
    position. Multiplying and adding are separate operations, so that no backend may fuse them.

    With another ``dtype``, products are rounded to it, added in float32, and their sum is rounded once more.

    A unit is sixteen bytes: four values of float32.

    Args:
        segments: The runs of the flat vector to encode; neighbours are joined.
        world_size: Number of ranks.
        dtype: Dtype of the values in payloads.
    """

    grain = 1

    def __init__(self, segments: Sequence[Segment], world_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self._lane = dtype, ALIGNMENT // dtype.itemsize
        self.runs = joined_runs(segments)
        self.numel = sum(count for _, count in self.runs)
        self.units = -(-self.numel // self._lane)
        self.weight = 1.0 / world_size

    def use_coder(self, coder: Coder) -> None:
        """Do nothing: floats are not entropy-coded."""

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return ALIGNMENT * units

    def mean_bytes(self, units: int) -> int:
        return ALIGNMENT * units

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        if not self.numel:
            return
        values, narrow = out.view(self.dtype)[: self.numel], self.dtype != torch.float32
        products = torch.cat([flat[a : a + n] for a, n in self.runs], out=None if narrow else values)
        if self.weight != 1:
            products.mul_(torch.tensor(self.weight, dtype=torch.float32, device="cpu"))
        if narrow:
            values.copy_(products)

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        self._add(list(rows), out)

    def merge(self, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> None:
        self._add(rows, out)

    def _add(self, codes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add values in float32, in the order given, and round their sum."""
        values, narrow = out.view(self.dtype), self.dtype != torch.float32
        total = torch.empty(values.shape, device=values.device, dtype=torch.float32) if narrow else values
        total.copy_(codes[0].view(self.dtype))
        for other in codes[1:]:
            total.add_(other.view(self.dtype))
        if narrow:
            values.copy_(total)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        values = data.view(self.dtype)
        first, last = begin * self._lane, min(end * self._lane, self.numel)
        at = 0
        for start, count in self.runs:
            low, high = max(first - at, 0), min(last - at, count)
            if low < high:
                flat[start + low : start + high].copy_(values[at + low - first : at + high - first])
            at += count

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(rows.shape[1], dtype=torch.uint8, device=rows.device)
        self.reduce(rows, 0, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        values = data.view(self.dtype)
        for (start, count), part in zip(self.runs, values[: self.numel].split([n for _, n in self.runs])):
            flat[start : start + count].add_(part, alpha=weight / self.weight)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(*(flat[a : a + n] for a, n in self.runs))
