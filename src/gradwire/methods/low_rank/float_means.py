"""Means of a few floats that represent a bucket, followed by its float32 segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import PROTOCOLS, Context, Section
from gradwire.exchange.segments import Parameter, Segment

FIRST_EXCHANGE = 2
"""Number of the exchange before a bucket's main one."""


def first_of_two(context: Context) -> Context:
    """Return the context of an exchange before the main one."""
    return replace(context, workspace=context.workspace.part("first"), exchange=FIRST_EXCHANGE)


def mean_of_floats(
    context: Context,
    collective: str,
    tag: int,
    values: torch.Tensor,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Exchange[None]:
    """Replace a float32 vector by its mean over ranks, added in the order of ranks.

    Args:
        first: Number of values at the start that are sent as ``dtype``; all others are float32.
    """
    first = first if dtype != torch.float32 else 0
    sections = [
        Section(DenseCodec([_run(begin, end)], context.world_size, kind), NoSummary())
        for begin, end, kind in ((0, first, dtype), (first, len(values), torch.float32))
        if begin < end
    ]
    yield from PROTOCOLS[collective](replace(context, wants_sent=False), tag, sections, values)


def _run(begin: int, end: int) -> Segment:
    return Segment(Parameter("(floats)", (end - begin,), (1,)), begin, 0, end - begin)


class Beside:
    """Segments of a bucket that are sent in float32, joined.

    Attributes:
        numel: Number of elements of all segments.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._sizes = [s.numel for s in segments]
        self.numel = sum(self._sizes)

    def take(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the segments into ``out`` (``[numel]``)."""
        if self._segments:
            torch.cat(self._views(flat), out=out)

    def put(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy values back to the segments."""
        if self._segments:
            torch._foreach_copy_(self._views(flat), list(values.split(self._sizes)))

    def add(self, values: torch.Tensor, weight: float, flat: torch.Tensor) -> None:
        """Add ``weight`` times the values to the segments."""
        for part, value in zip(self._views(flat), values.split(self._sizes)):
            part.add_(value, alpha=weight)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[s.offset : s.offset + s.numel] for s in self._segments]
