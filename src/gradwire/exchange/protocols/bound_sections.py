"""Codecs bound to the parts of a bucket: of a chunk, of a rank's share of it, or of a rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gradwire.exchange.codecs import Constant, DenseCodec, NoSummary, Summary
from gradwire.exchange.protocols.payloads import Section

__all__ = ["Bound", "BoundChunk", "BoundPart", "BoundShard", "Prepared"]

Prepared: TypeAlias = Sequence[tuple[Summary, torch.Tensor | None]]
"""Of each operator, the summary of whole parameters, and the maximum over ranks of what they share."""


@dataclass(frozen=True, eq=False)
class Bound:
    """The codec of what an operator compresses of a chunk, or of a rank's share of it.

    ``operator`` is the operator's number, and ``index`` tells which of its segments in the bucket each piece is of.
    """

    codec: Any
    operator: int
    index: Constant


@dataclass(frozen=True, eq=False)
class BoundPart:
    """Codecs of a chunk, or of a rank's share of it."""

    compressed: Sequence[Bound]
    dense: DenseCodec | None

    def sections(self, prepared: Prepared) -> list[Section]:
        """Return the codecs with the summaries of this round."""
        found = []
        for bound in self.compressed:
            summary, shared = prepared[bound.operator]
            found.append(Section(bound.codec, summary.select(bound.index, shared)))
        if self.dense is not None:
            found.append(Section(self.dense, NoSummary()))
        return found


@dataclass(frozen=True, eq=False)
class BoundShard:
    """What is encoded for one rank of a reduce-scatter: its shard, and around it what is encoded together with it.

    Attributes:
        part: The codecs.
        covered: Where what they carry lies in the flat vector, ascending runs.
        owned: The part of it that is the rank's own; over all ranks, each element once.
    """

    part: BoundPart
    covered: Sequence[tuple[int, int]]
    owned: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class BoundChunk:
    """A chunk whole; or for each rank its share of it, for the way up and for the mean's way down; or its shard."""

    whole: BoundPart | None
    shares: Sequence[tuple[BoundPart, BoundPart]] = ()
    shards: Sequence[BoundShard] = ()
