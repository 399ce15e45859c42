"""The codec of majority votes: a bit an element, up and down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gradwire.compressors.base import Draw, SummableCodec, Summary, check_workers
from gradwire.compressors.sides import sign_table
from gradwire.kernels import SIGN_BYTES, WHOLE, RunTable
from gradwire.segments import Segment
from gradwire.wire import padded

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["VoteCodec", "VoteSummary"]

_EIGHT = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class VoteSummary:
    """Whether each segment holds a value that is not finite, bool ``[segments]``."""

    flags: torch.Tensor
    shared: torch.Tensor | None = None

    def select(self, index: torch.Tensor, shared: torch.Tensor | None) -> VoteSummary:
        return replace(self, flags=self.flags[index])


class VoteCodec(SummableCodec):
    """Signs of many segments, and what the majority of ranks has.

    A payload, like a reduced one, is a flag bit a segment, padded to sixteen bytes, and then the bits of all groups of
    80 elements, padded likewise. A flag says that the whole parameter, of which the segment may be a piece, holds an
    infinity or a NaN: signs could not. The outcome is -1 or 1, or +inf in all of a parameter that any rank has flagged.
    """

    grain = 8

    def __init__(self, kernels: Kernels, segments: Sequence[Segment], world_size: int) -> None:
        check_workers("a majority vote", world_size)
        self.kernels, self.table, self.world_size = kernels, sign_table(segments), world_size
        self.runs = RunTable(self.table, WHOLE)
        self.units = self.table.groups
        self.side_bytes = padded(-(-len(self.table) // 8))
        self._owner = torch.from_numpy(self.runs.owner)

    def summarise(self, flat: torch.Tensor) -> VoteSummary:
        if flat.is_meta:
            return VoteSummary(torch.empty(len(self.table), dtype=torch.bool))
        return VoteSummary(~self.kernels.finite(flat, self.table))

    def payload_bytes(self, units: int) -> int:
        return self.side_bytes + padded(SIGN_BYTES * units)

    def mean_bytes(self, units: int) -> int:
        return self.payload_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        if flat.is_meta:
            return
        if not isinstance(summary, VoteSummary):
            raise TypeError(f"a codec of votes cannot use a {type(summary).__name__}")
        flags = torch.zeros(8 * self.side_bytes, dtype=torch.uint8)
        flags[: len(self.table)] = summary.flags
        out[: self.side_bytes] = (flags.reshape(-1, 8) << _EIGHT).sum(1, dtype=torch.uint8)
        self.kernels.sign_encode(flat, self.table, 0, self.units, self._bits(out, self.units))

    def reduce(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if rows.is_meta:
            return
        flags = out[: self.side_bytes].copy_(rows[0, : self.side_bytes])
        for row in rows[1:]:
            flags.bitwise_or_(row[: self.side_bytes])
        self.kernels.sign_vote(rows[:, self.side_bytes :], out[self.side_bytes :])

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        if not flat.is_meta:
            self._decode(data, 1.0, begin, end, flat, accumulate=False)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        if flat.is_meta:
            return
        total = torch.empty(rows.shape[1], dtype=torch.uint8)
        self.reduce(rows, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._decode(data, weight, 0, self.units, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> bool:
        first = torch.from_numpy(self.table.offset[self.table.numel > 0])
        return bool(torch.isfinite(flat[first]).all())

    def _bits(self, data: torch.Tensor, units: int) -> torch.Tensor:
        return data[..., self.side_bytes : self.side_bytes + SIGN_BYTES * units]

    def _decode(
        self, data: torch.Tensor, weight: float, begin: int, end: int, flat: torch.Tensor, accumulate: bool
    ) -> None:
        flags = (data[: self.side_bytes, None] >> _EIGHT & 1).reshape(-1)[self._owner]
        size = torch.tensor(weight, dtype=torch.float32)
        above, below = torch.where(flags == 1, torch.inf, torch.stack([size, -size])[:, None]).unsqueeze(1).unbind(0)
        bits = self._bits(data[None], end - begin)
        self.kernels.sign_decode(bits, self.runs, above.contiguous(), below.contiguous(), begin, end, flat, accumulate)
