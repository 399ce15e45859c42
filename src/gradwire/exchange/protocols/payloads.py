"""Steps that protocols of sections share, from sections to payloads and back, and their stand-ins in a dry run.

Stand-ins have sizes but no data, so that a dry run executes the same protocols. The device of the flat vector
identifies a dry run, and only this file checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from gradwire.exchange.codecs import Codec, Draw, MergeableCodec, SummableCodec, Summary
from gradwire.exchange.deferred_checks import Flag, both
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.wire import Header, Packing, Rows, VariableRows


class SizedCodec(SummableCodec, MergeableCodec):
    """A codec with the sizes of another one, which reads and writes nothing."""

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
    """The layout of payloads without data: rows have their largest size.

    ``padding`` is the number of further bytes that rows of another rank may have, so that the count is the largest over
    ranks.
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
        """Return the largest number of bytes of each row if it depends on data, else None."""
        return torch.full((len(rows),), self.row_bytes, dtype=torch.int64, device="cpu") if self.variable else None

    def read(
        self, rows: torch.Tensor, header: Header, receiver: int, arrived: torch.Tensor | None = None, first: int = 0
    ) -> list[torch.Tensor]:
        """Return uninitialised sections of the right number and sizes."""
        return [rows.new_empty(len(rows), size) for size in self.sizes]


def laid_out(rows: Rows, values: torch.Tensor) -> Rows | SizedRows:
    """Return the layout for payloads of ``values``: of sizes only if ``values`` have no data."""
    return SizedRows(rows) if values.is_meta else rows


PayloadRows: TypeAlias = Rows | VariableRows | SizedRows
"""The layout of payloads side by side."""


@dataclass(frozen=True, eq=False)
class Section:
    """A codec with the summary for its encoder in this round."""

    codec: Codec
    summary: Summary


def sized(sections: Sequence[Section], flat: torch.Tensor) -> Sequence[Section]:
    """Replace codecs by their sizes in a dry run, which a vector without data identifies."""
    return [replace(s, codec=SizedCodec(s.codec)) for s in sections] if flat.is_meta else sections


def rows_of(context: Context, packings: Sequence[Packing], variable: bool = False, padding: int = 0) -> PayloadRows:
    """Return the layout of sections, with payloads of different lengths if that of a section depends on data."""
    variable = variable or any(p.variable for p in packings)
    rows = (
        VariableRows(packings, context.workspace.get)
        if variable
        else Rows([p.size for p in packings], padding, context.checks)
    )
    return SizedRows(rows, padding if variable else 0) if context.workspace.device == "meta" else rows


def whole_rows(context: Context, sections: Sequence[Section], variable: bool = False, padding: int = 0) -> PayloadRows:
    """Return the layout of whole sections."""
    return rows_of(context, [s.codec.packing(s.codec.units) for s in sections], variable, padding)


def equal_rows(context: Context, shares: Sequence[Sequence[Section]]) -> tuple[list[PayloadRows], int]:
    """Return the layouts of each share's sections: all of one length, or all of different lengths."""
    variable = any(s.codec.packing(s.codec.units).variable for sections in shares for s in sections)
    lengths = [whole_rows(context, sections, variable).row_bytes for sections in shares]
    width = max(lengths)
    return [whole_rows(context, sections, variable, width - n) for sections, n in zip(shares, lengths)], width


def draw_of(context: Context) -> Draw:
    return Draw(context.round, context.rank, context.loss_scale, context.link, context.gauge)


def header(context: Context, layout: PayloadRows, tag: int, exchange: int) -> Header:
    """Return the header of the payloads of one exchange of a job."""
    return layout.header(tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk, exchange=exchange)


def told_lengths(context: Context, lengths: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return two tensors for an operation: the lengths to send, 0 for this rank, and a buffer for those received."""
    if lengths is None:
        return None, None
    lengths = lengths.expand(context.world_size).clone()
    lengths[context.rank] = 0
    return lengths, torch.zeros_like(lengths)


def encode(
    context: Context, sections: Sequence[Section], flat: torch.Tensor, units: Sequence[int], draw: Draw, name: str = ""
) -> list[torch.Tensor]:
    bodies = []
    for i, (section, count) in enumerate(zip(sections, units)):
        body = context.workspace.get(f"{name}body {i}", section.codec.payload_bytes(count))
        section.codec.encode(flat, section.summary, draw, body)
        bodies.append(body)
    return bodies


def remember(context: Context, sections: Sequence[Section], flat: torch.Tensor) -> Sequence[Section]:
    draw = draw_of(context)
    return [replace(s, summary=s.codec.remember(s.summary, flat, draw, context.wants_sent)) for s in sections]


def outcome(context: Context, sections: Sequence[Section], bodies: list[torch.Tensor], flat: torch.Tensor) -> Outcome:
    def sent(out: torch.Tensor, weight: float) -> None:
        for section, body in zip(sections, bodies):
            section.codec.add_own(body, section.summary, weight, out)

    return Outcome(sections_finite(sections, flat), sent if context.wants_sent else None)


def sections_finite(sections: Sequence[Section], flat: torch.Tensor) -> Flag | None:
    """Return whether the mean, just decoded into ``flat``, is finite in all sections."""
    finite: Flag | None = True
    for section in sections:
        finite = both(finite, section.codec.is_finite(section.summary, flat))
    return finite


def mergeable(codec: Codec) -> MergeableCodec:
    """Return a codec if protocols may merge its codes.

    Raises:
        TypeError: they may not.
    """
    if not isinstance(codec, MergeableCodec):
        raise TypeError(f"codes of {type(codec).__name__} cannot be merged: only a gather can carry them")
    return codec
