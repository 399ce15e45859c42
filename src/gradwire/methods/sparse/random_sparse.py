"""The codec of random elements that each worker draws for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.constants import Constant
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import padded
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.sparse.random_places import RandomElements
from gradwire.methods.sparse.sparse_values import KeptValues

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["RandomSparseCodec", "RandomSparseSummary"]


@dataclass(frozen=True)
class RandomSparseSummary:
    """Whose choice a payload has."""

    draw: Draw | None = None
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> RandomSparseSummary:
        return self


class RandomSparseCodec(Codec):
    """The values of the elements that :class:`RandomElements` draws for the sender's rank; a receiver draws them too.

    A parameter with an infinity or a NaN anywhere, drawn or not, has +inf as its first value, and where a first value
    is not finite the whole mean of its parameter is +inf.

    Args:
        elements: What is drawn.
        values: How values travel.
        factor: By which the mean of each segment's elements is multiplied.
    """

    grain = units = 1

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        *,
        elements: RandomElements,
        values: KeptValues,
        factor: Sequence[float],
    ) -> None:
        self.kernels, self.world_size, self.elements, self.values = kernels, world_size, elements, values
        self.segments, self.table = list(segments), sign_table(segments)
        counts = torch.tensor(elements.slots, dtype=torch.int64)
        self._factor = torch.repeat_interleave(torch.tensor(factor, dtype=torch.float32), counts)
        self._offset = torch.repeat_interleave(torch.tensor([s.offset for s in segments], dtype=torch.int64), counts)
        self._first = counts.cumsum(0) - counts

    def payload_bytes(self, units: int) -> int:
        return padded(self.values.bytes(self.elements.slots))

    def summarise(self, flat: torch.Tensor) -> RandomSparseSummary:
        return RandomSparseSummary()

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> RandomSparseSummary:
        return RandomSparseSummary(draw)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        values = flat[self._places(draw)]
        values[self._first[~self.kernels.finite(flat, self.table)]] = torch.inf
        used, counts = self.values.bytes(self.elements.slots), tuple(self.elements.slots)
        self.values.write(values, counts, draw, out[:used])
        out[used : self.payload_bytes(1)] = 0

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        draw, weight = _draw(summary), 1.0 / self.world_size
        for s in self.segments:
            flat[s.offset : s.offset + s.numel].zero_()
        for rank, row in enumerate(rows):
            values = self._add(row, Draw(draw.round, rank), weight, flat)
            spoilt = ~torch.isfinite(values[self._first])
            for i in torch.nonzero(spoilt).flatten().tolist():
                s = self.segments[i]
                flat[s.offset : s.offset + s.numel] = torch.inf

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._add(data, _draw(summary), weight, flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(flat[torch.tensor([s.offset for s in self.segments])])

    def _places(self, draw: Draw) -> torch.Tensor:
        return torch.from_numpy(self.elements.draw(draw.round, draw.stream)).add_(self._offset)

    def _read(self, row: torch.Tensor) -> torch.Tensor:
        return self.values.read(row[: self.values.bytes(self.elements.slots)], tuple(self.elements.slots))

    def _add(self, row: torch.Tensor, draw: Draw, weight: float, flat: torch.Tensor) -> torch.Tensor:
        """Add a payload's values, times the weight, to the elements of its sender; return them."""
        values = self._read(row) * (self._factor * weight)
        flat.index_add_(0, self._places(draw), values)
        return values


def _draw(summary: Summary) -> Draw:
    if not isinstance(summary, RandomSparseSummary) or summary.draw is None:
        raise TypeError(f"a codec of random elements cannot decode with a {type(summary).__name__} that tells no draw")
    return summary.draw
