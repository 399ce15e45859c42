"""What all protocols of sections share: the layout of payloads, and the steps before and after a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from gradwire.exchange.codecs import Codec, Draw, MergeableCodec, Summary
from gradwire.exchange.deferred_checks import Flag, both
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.sizes import SizedCodec, SizedRows
from gradwire.exchange.wire import Header, Packing, Rows, VariableRows

__all__ = [
    "PayloadRows",
    "Section",
    "draw_of",
    "encode",
    "equal_rows",
    "header",
    "mergeable",
    "outcome",
    "remember",
    "rows_of",
    "sections_finite",
    "sized",
    "told_lengths",
    "whole_rows",
]

PayloadRows: TypeAlias = Rows | VariableRows | SizedRows
"""The layout of payloads side by side."""


@dataclass(frozen=True, eq=False)
class Section:
    """A codec with the summary that its encoder needs this round."""

    codec: Codec
    summary: Summary


def sized(sections: Sequence[Section], flat: torch.Tensor) -> Sequence[Section]:
    """In a dry run, told by a vector without data, leave nothing of the codecs but their sizes."""
    return [replace(s, codec=SizedCodec(s.codec)) for s in sections] if flat.is_meta else sections


def rows_of(context: Context, packings: Sequence[Packing], variable: bool = False, padding: int = 0) -> PayloadRows:
    """Lay out sections: in payloads of a length of their own where that of a section depends on what it holds."""
    variable = variable or any(p.variable for p in packings)
    rows = (
        VariableRows(packings, context.workspace.get)
        if variable
        else Rows([p.size for p in packings], padding, context.checks)
    )
    return SizedRows(rows, padding if variable else 0) if context.workspace.device == "meta" else rows


def whole_rows(context: Context, sections: Sequence[Section], variable: bool = False, padding: int = 0) -> PayloadRows:
    """Lay out whole sections."""
    return rows_of(context, [s.codec.packing(s.codec.units) for s in sections], variable, padding)


def equal_rows(context: Context, shares: Sequence[Sequence[Section]]) -> tuple[list[PayloadRows], int]:
    """Lay out the sections of each share in payloads of one length, or all of them in payloads of their own length."""
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
    """Return what an operation needs to tell lengths: those to send, none to this rank itself, and room for theirs."""
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
    """Return a codec whose codes protocols may merge.

    Raises:
        TypeError: they may not.
    """
    if not isinstance(codec, MergeableCodec):
        raise TypeError(f"codes of {type(codec).__name__} cannot be merged: only a gather can carry them")
    return codec
