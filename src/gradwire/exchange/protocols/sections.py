"""Protocols for payloads of sections, by a sharded server or a gather, and the codecs bound to a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from gradwire.exchange.codecs import CheckedCodec, Codec, Constant, DenseCodec, NoSummary, SummableCodec, Summary
from gradwire.exchange.ops import AllGather, AllToAll, Exchange, Reduce
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import (
    Section,
    draw_of,
    encode,
    header,
    outcome,
    remember,
    rows_of,
    sized,
    told_lengths,
    whole_rows,
)
from gradwire.exchange.wire import EVERYONE


def two_shot(context: Context, tag: int, sections: Sequence[Section], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks through a parameter server that is sharded over the ranks.

    1. Every rank encodes its vector and sends shard r of the codes to rank r (all-to-all).
    2. Every rank reduces the codes of its own shard.
    3. Every rank sends its reduced shard to all (all-gather), and decodes all shards.

    Shards are equal runs of units; the last ones may be padding in part or whole.

    Bytes sent by a rank: (N - 1) (header + codes of a shard) + (N - 1) (header + reduced codes of a shard).
    """
    world, sections = context.world_size, sized(sections, flat)
    codecs = [_summable(s.codec) for s in sections]
    shares = [_share(codec, world) for codec in codecs]
    pairs = list(zip(codecs, shares))
    up = rows_of(context, [c.packing(n) for c, n in pairs])
    down = rows_of(context, [c.mean_packing(n) for c, n in pairs])
    space = context.workspace

    bodies = encode(context, sections, flat, [world * n for n in shares], draw_of(context))
    sections = remember(context, sections, flat)
    send = space.get("up", world, up.row_bytes)
    head = header(context, up, tag, context.exchange)
    shared_out = [_shared_out(s.codec, body, world) for s, body in zip(sections, bodies)]
    told, arrived = told_lengths(context, up.write(send, head, shared_out, context.rank, range(world)))
    rows = yield AllToAll(send, space.get("up, received", world, up.row_bytes), told, arrived)

    mine = space.get("down", 1, down.row_bytes)
    reduced = [space.get(f"reduced {i}", size) for i, size in enumerate(down.sizes)]
    parts = up.read(rows, head, context.rank, arrived)
    sections = [replace(s, summary=c.heard(part, s.summary)) for s, c, part in zip(sections, codecs, parts)]
    for (codec, share), part, out in zip(pairs, parts, reduced):
        codec.reduce(part, context.rank * share, out)
    head = header(context, down, tag, context.exchange + 1)
    told, arrived = told_lengths(
        context, down.write(mine, head, [out.view(1, -1) for out in reduced], context.rank, [EVERYONE])
    )
    room = space.get("down, received", world, down.row_bytes)
    gathered = yield AllGather(mine[0], room, told, arrived)

    parts = down.read(gathered, head, EVERYONE, arrived)
    for codec, section, part, share in zip(codecs, sections, parts, shares):
        for owner, data in enumerate(part):
            begin, end = min(owner * share, codec.units), min((owner + 1) * share, codec.units)
            codec.decode_mean(data, section.summary, begin, end, flat)
    return outcome(context, sections, bodies, flat)


def all_gather(context: Context, tag: int, sections: Sequence[Section], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks, for which every rank receives every rank's whole payload.

    If a codec is checked, a last, small reduction tells all ranks if any of them could not read a section. The
    section's mean is then +inf on all ranks, and the first such section of a link causes a warning.

    Bytes sent by a rank: (N - 1) (header + codes): one round, but traffic that grows with N.
    """
    sections = sized(sections, flat)
    codecs = [s.codec for s in sections]
    layout = whole_rows(context, sections)
    space = context.workspace
    bodies = encode(context, sections, flat, [s.codec.units for s in sections], draw_of(context))
    sections = remember(context, sections, flat)
    send = space.get("up", 1, layout.row_bytes)
    head = header(context, layout, tag, context.exchange)
    told, arrived = told_lengths(
        context, layout.write(send, head, [body.view(1, -1) for body in bodies], context.rank, [EVERYONE])
    )
    room = space.get("up, received", context.world_size, layout.row_bytes)
    rows = yield AllGather(send[0], room, told, arrived)
    parts = zip(sections, layout.read(rows, head, EVERYONE, arrived))
    could_read = [section.codec.decode_rows(part, section.summary, flat) for section, part in parts]
    if any(codec.checked for codec in codecs):
        unread = [float(answer is False) for answer in could_read]
        failed = yield Reduce(torch.tensor(unread, dtype=torch.float32, device="cpu"), "max")
        for codec, bad in zip(codecs, failed.tolist()):
            if isinstance(codec, CheckedCodec) and bad:
                codec.spoil(flat)
                context.warn(type(codec).__name__, f"round {context.round}: {codec.unread()}")
    return outcome(context, sections, bodies, flat)


def _summable(codec: Codec) -> SummableCodec:
    if not isinstance(codec, SummableCodec):
        raise TypeError(f"codes of {type(codec).__name__} do not add up: only a gather can carry them")
    return codec


def _share(codec: Codec, world_size: int) -> int:
    """Return the units of a shard: equal for all ranks, a multiple of the codec's grain."""
    each = world_size * codec.grain
    return -(-codec.units // each) * codec.grain


def _shared_out(codec: Codec, body: torch.Tensor, world_size: int) -> torch.Tensor:
    """Divide a payload into payloads of a share for each rank, ``[world_size, bytes]``."""
    side = codec.side_bytes
    shares = body[side:].view(world_size, -1)
    return torch.cat([body[:side].expand(world_size, side), shares], 1) if side else shares


Prepared: TypeAlias = Sequence[tuple[Summary, torch.Tensor | None]]
"""For each operator, the summary of whole parameters, and the maximum over ranks of its shared values."""


@dataclass(frozen=True, eq=False)
class Bound:
    """The codec of an operator, bound to its pieces of a chunk or of a rank's share of it.

    ``operator`` is the number of the operator, and ``index`` has, for each piece, the number of its segment among the
    operator's in the bucket.
    """

    codec: Any
    operator: int
    index: Constant


@dataclass(frozen=True, eq=False)
class BoundPart:
    """The codecs of a chunk, or of a rank's share of it."""

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
    """The codecs for one rank's shard in a reduce-scatter, and for elements that are encoded together with it.

    Attributes:
        part: The codecs.
        covered: Ascending runs of the flat vector that they encode.
        owned: The runs of them that belong to the rank; each element belongs to one rank.
    """

    part: BoundPart
    covered: Sequence[tuple[int, int]]
    owned: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class BoundChunk:
    """The codecs of a whole chunk; or of each rank's share, to the owner and for the mean; or of each shard."""

    whole: BoundPart | None
    shares: Sequence[tuple[BoundPart, BoundPart]] = ()
    shards: Sequence[BoundShard] = ()
