"""Codec of methods that send a sign for each element, and one or two values for each run of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Codec, Constant, Draw, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.kernels import SIGN_BYTES, RunTable, SegmentTable, SignSums

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


def sign_table(segments: Sequence[Segment]) -> SegmentTable:
    """Return the table of segments for kernels that draw nothing."""
    return SegmentTable(
        offset=[s.offset for s in segments],
        numel=[s.numel for s in segments],
        start=[s.start for s in segments],
        key=[(0, 0)] * len(segments),
    )


@dataclass(frozen=True, eq=False)
class SignSummary:
    """Decoded values of the bits of all runs, float32 ``[sides, runs]``: one side is plus and minus a value.

    ``first`` is the number of runs before each segment of the codec, set by ``select``.
    """

    values: torch.Tensor
    first: torch.Tensor
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> SignSummary:
        return replace(self, first=self.first[index.on(self.first.device)])


class SignCodec(Codec):
    """Codec of sign bits. Each worker has its own values, so payloads can only be gathered.

    A payload is the float32 values of the runs that the segments reach into, side after side, padded to sixteen bytes,
    and then the bits of all groups of 80 elements, padded likewise.

    Args:
        length: Number of elements of a run, one for each segment or one for all.
        sides: 1: a bit is plus or minus the mean magnitude of its run. 2: the mean of the elements x >= 0, or of the
            others; a side without elements is zero.
    """

    grain = 8

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        *,
        length: int | Sequence[int],
        sides: int,
    ) -> None:
        self.kernels, self.table, self.world_size, self.sides = kernels, sign_table(segments), world_size, sides
        self.runs = RunTable(self.table, length)
        self.units = self.table.groups
        self.side_bytes = padded(4 * sides * self.runs.runs)
        self._owner, self._number = Constant(self.runs.owner), Constant(self.runs.number)
        self._first = Constant(self.runs.first[:-1])
        self._elements: SegmentTable | None = None
        self._numel: Constant | None = None
        self._first_elements: Constant | None = None

    @property
    def elements(self) -> SegmentTable:
        """Elements of each run."""
        if self._elements is None:
            self._elements = self.runs.elements()
        return self._elements

    def summarise(self, flat: torch.Tensor) -> SignSummary:
        sums = self.kernels.sign_sums(flat, self.elements)
        if self._numel is None:
            self._numel = Constant(self.elements.numel)
        values = _values(sums, self._numel.on(flat.device), self.sides)
        return SignSummary(values, self._first.on(flat.device))

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + padded(SIGN_BYTES * units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        values = self._own(summary).reshape(-1)
        out[: 4 * len(values)].view(torch.float32).copy_(values)
        self.kernels.sign_encode(flat, self.table, 0, self.units, self._bits(out))

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        count = self.sides * self.runs.runs
        values = rows[:, : 4 * count].contiguous().view(torch.float32).reshape(len(rows), self.sides, -1)
        self._decode(self._bits(rows), values, 1.0 / self.world_size, flat, accumulate=False)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._decode(self._bits(data[None]), self._own(summary)[None], weight, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # A value that is not finite fills its run.
        if self._first_elements is None:
            self._first_elements = Constant(self.elements.offset)
        return all_finite(flat[self._first_elements.on(flat.device)])

    def _own(self, summary: Summary) -> torch.Tensor:
        """Select the values of this codec's runs from the bucket's, ``[sides, runs]``."""
        if not isinstance(summary, SignSummary):
            raise TypeError(f"a codec of signs cannot use a {type(summary).__name__}")
        where = summary.values.device
        return summary.values[:, summary.first[self._owner.on(where)] + self._number.on(where)]

    def _bits(self, data: torch.Tensor) -> torch.Tensor:
        return data[..., self.side_bytes : self.side_bytes + SIGN_BYTES * self.units]

    def _decode(
        self, bits: torch.Tensor, values: torch.Tensor, weight: float, flat: torch.Tensor, accumulate: bool
    ) -> None:
        """Decode ``bits [N, bytes]`` with ``values [N, sides, runs]``, each times float32(weight)."""
        scaled = values * torch.tensor(weight, dtype=torch.float32, device="cpu")
        above = scaled[:, 0].contiguous()
        # A scale that is not finite has no sign.
        below = scaled[:, 1].contiguous() if self.sides == 2 else torch.where(torch.isfinite(above), -above, above)
        self.kernels.sign_decode(bits, self.runs, above, below, 0, self.units, flat, accumulate)


def _values(sums: SignSums, numel: torch.Tensor, sides: int) -> torch.Tensor:
    """Divide sums by numbers of elements, in float64, and round to float32 ``[sides, S]``; +inf if not finite."""
    if sides == 1:
        values = ((sums.above + sums.below) / numel.clamp(min=1))[None]
    else:
        above = sums.above / sums.count.clamp(min=1)
        below = -sums.below / (numel - sums.count).clamp(min=1)
        values = torch.stack([above, below])
    return torch.where(torch.isfinite(sums.above), values, torch.inf).to(torch.float32)
