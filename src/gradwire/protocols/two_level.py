"""Exchanges on two levels: exact inside a node, by another protocol between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from gradwire.codecs import DenseCodec, NoSummary
from gradwire.flags import Flag, known
from gradwire.ops import Exchange, Reduce, Scope
from gradwire.protocols.context import Context
from gradwire.protocols.payloads import Section, draw_of, encode
from gradwire.protocols.reduce_scatter import owned_means
from gradwire.protocols.shares import tell_shares
from gradwire.segments import Segment

__all__ = ["agree_on_finite", "gather_shards", "scatter_shards", "within"]

T = TypeVar("T")


def within(scope: Scope, generator: Exchange[T]) -> Exchange[T]:
    """Run an exchange of one group, which knows no scopes, as one of each group of a scope."""
    try:
        op = next(generator)
        while True:
            op = generator.send((yield replace(op, scope=scope)))
    except StopIteration as stop:
        result: T = stop.value
        return result


def scatter_shards(
    context: Context, tag: int, shards: Sequence[Sequence[Segment]], flat: torch.Tensor
) -> Exchange[None]:
    """Replace this rank's shard of ``flat`` by its mean over ranks, in float32 and in the order of ranks.

    Bytes sent by a rank: (N - 1) (header + 4 bytes an element of a shard), shards as long as the longest.
    """
    world = context.world_size
    yield from owned_means(context, tag, [_values(shard, world) for shard in shards], flat)


def gather_shards(
    context: Context, tag: int, shards: Sequence[Sequence[Segment]], flat: torch.Tensor
) -> Exchange[None]:
    """Give every rank every other's shard of ``flat``, as it is.

    Bytes sent by a rank: as :func:`scatter_shards`.
    """
    # One who tells values is the only worker of them.
    sections = [_values(shard, 1) for shard in shards]
    mine = sections[context.rank]
    codes = encode(context, mine, flat, [s.codec.units for s in mine], draw_of(context), "told ")
    yield from tell_shares(context, tag, sections, codes, flat)


def agree_on_finite(finite: Flag | None) -> Exchange[bool | None]:
    """Return whether all ranks' shards are finite; None where one is not and nobody looked at another."""
    level = {True: 0.0, None: 1.0, False: 2.0}
    worst = yield Reduce(torch.tensor([level[known(finite)]]), "max")
    return {found: answer for answer, found in level.items()}[float(worst[0])]


def _values(segments: Sequence[Segment], world_size: int) -> Sequence[Section]:
    return [Section(DenseCodec(segments, world_size), NoSummary())]
