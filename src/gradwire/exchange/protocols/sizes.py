"""Stand-ins for what touches data, so that a dry run on sizes walks through the same protocols.

This is the one place where a codec or a payload learns of a dry run, which is told by the flat vector's device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.codecs import Codec, Draw, MergeableCodec, SummableCodec, Summary
from gradwire.exchange.wire import Header, Packing, Rows, VariableRows

__all__ = ["SizedCodec", "SizedRows", "laid_out"]


class SizedCodec(SummableCodec, MergeableCodec):
    """A codec that has the sizes of another and neither reads nor writes anything."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.units, self.grain, self.side_bytes, self.coder = codec.units, codec.grain, codec.side_bytes, codec.coder
        self.checked = codec.checked

    def packing(self, units: int) -> Packing:
        return self._codec.packing(units)

    def payload_bytes(self, units: int) -> int:
        return self._codec.payload_bytes(units)

    def mean_packing(self, units: int) -> Packing:
        return self._summable.mean_packing(units)

    def mean_bytes(self, units: int) -> int:
        return self._summable.mean_bytes(units)

    def summarise(self, flat: torch.Tensor) -> Summary:
        return self._codec.summarise(flat)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        pass

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        pass

    def merge(self, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> None:
        pass

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        pass

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        pass

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        pass

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> bool:
        return True

    @property
    def _summable(self) -> SummableCodec:
        if not isinstance(self._codec, SummableCodec):
            raise TypeError(f"codes of {type(self._codec).__name__} do not add up: only a gather can carry them")
        return self._codec


class SizedRows:
    """The layout of payloads, without payloads: rows have the most bytes that they may have.

    ``padding`` is what rows of another rank's may have beside, so that what one rank sends is the most that any sends.
    """

    def __init__(self, rows: Rows | VariableRows, padding: int = 0) -> None:
        self._rows = rows
        self.sizes, self.row_bytes, self.variable = rows.sizes, rows.row_bytes + padding, rows.variable

    def header(self, *, tag: int, round: int, bucket: int, chunk: int, exchange: int = 0) -> Header:
        """Return the header of these payloads."""
        return self._rows.header(tag=tag, round=round, bucket=bucket, chunk=chunk, exchange=exchange)

    def write(
        self, rows: torch.Tensor, header: Header, bodies: Sequence[torch.Tensor], sender: int, receivers: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the bytes of each row where they depend on data: the most that there may be."""
        return torch.full((len(rows),), self.row_bytes) if self.variable else None

    def read(
        self, rows: torch.Tensor, header: Header, receiver: int, arrived: torch.Tensor | None = None, first: int = 0
    ) -> list[torch.Tensor]:
        """Return as many sections of as many bytes as there would be."""
        return [rows.new_empty(len(rows), size) for size in self.sizes]


def laid_out(rows: Rows, values: torch.Tensor) -> Rows | SizedRows:
    """Return the layout for payloads of ``values``: of sizes alone where these have no data."""
    return SizedRows(rows) if values.is_meta else rows
