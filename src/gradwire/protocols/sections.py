"""Payloads of several sections through a sharded server or a gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.compressors import Codec, Draw, Summary
from gradwire.ops import AllGather, AllToAll, Exchange
from gradwire.protocols.context import Context, Outcome
from gradwire.wire import Rows

__all__ = ["PROTOCOLS", "Section", "all_gather", "two_shot"]


@dataclass(frozen=True, eq=False)
class Section:
    """A codec with the summary that its encoder needs this round."""

    codec: Codec
    summary: Summary


def two_shot(context: Context, tag: int, sections: Sequence[Section], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks through a parameter server that is sharded over the ranks.

    1. Every rank encodes its vector and sends shard r of the codes to rank r (all-to-all).
    2. Every rank reduces the codes of its own shard.
    3. Every rank sends its reduced shard to all (all-gather), and decodes all shards.

    Shards are equal runs of units; the last ones may be partly, or wholly, padding.

    Bytes sent by a rank: (N - 1) (header + codes of a shard) + (N - 1) (header + reduced codes of a shard).
    """
    world = context.world_size
    shares = [_share(s.codec, world) for s in sections]
    up = Rows([s.codec.payload_bytes(n) for s, n in zip(sections, shares)])
    down = Rows([s.codec.mean_bytes(n) for s, n in zip(sections, shares)])
    space = context.workspace

    bodies = _encode(context, sections, flat, [world * n for n in shares])
    send = space.get("up", world, up.row_bytes)
    head = up.header(tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk)
    up.write(send, head, [_shared_out(s.codec, body, world) for s, body in zip(sections, bodies)])
    rows = yield AllToAll(send, space.get("up, received", world, up.row_bytes))

    mine = space.get("down", 1, down.row_bytes)
    reduced = [space.get(f"reduced {i}", size) for i, size in enumerate(down.sizes)]
    for section, part, out in zip(sections, up.read(rows, head), reduced):
        section.codec.reduce(part, out)
    head = down.header(tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk)
    down.write(mine, head, [out.view(1, -1) for out in reduced])
    gathered = yield AllGather(mine[0], space.get("down, received", world, down.row_bytes))

    for section, part, share in zip(sections, down.read(gathered, head), shares):
        for owner, data in enumerate(part):
            begin, end = min(owner * share, section.codec.units), min((owner + 1) * share, section.codec.units)
            section.codec.decode_mean(data, section.summary, begin, end, flat)
    return _outcome(context, sections, bodies, flat)


def all_gather(context: Context, tag: int, sections: Sequence[Section], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks, every rank receiving every rank's whole payload.

    Bytes sent by a rank: (N - 1) (header + codes): one round, but traffic that grows with N.
    """
    layout = Rows([s.codec.payload_bytes(s.codec.units) for s in sections])
    space = context.workspace
    bodies = _encode(context, sections, flat, [s.codec.units for s in sections])
    send = space.get("up", 1, layout.row_bytes)
    head = layout.header(tag=tag, round=context.round, bucket=context.bucket, chunk=context.chunk)
    layout.write(send, head, [body.view(1, -1) for body in bodies])
    rows = yield AllGather(send[0], space.get("up, received", context.world_size, layout.row_bytes))
    for section, part in zip(sections, layout.read(rows, head)):
        section.codec.decode_rows(part, section.summary, flat)
    return _outcome(context, sections, bodies, flat)


PROTOCOLS = {"two_shot": two_shot, "all_gather": all_gather}


def _share(codec: Codec, world_size: int) -> int:
    """Units of a shard: equal for all ranks, a multiple of the codec's grain."""
    each = world_size * codec.grain
    return -(-codec.units // each) * codec.grain


def _shared_out(codec: Codec, body: torch.Tensor, world_size: int) -> torch.Tensor:
    """Cut a payload into one of a share for each rank, ``[world_size, bytes]``."""
    side = codec.side_bytes
    shares = body[side:].view(world_size, -1)
    return torch.cat([body[:side].expand(world_size, side), shares], 1) if side else shares


def _encode(
    context: Context, sections: Sequence[Section], flat: torch.Tensor, units: Sequence[int]
) -> list[torch.Tensor]:
    draw = Draw(context.round, context.rank)
    bodies = []
    for i, (section, count) in enumerate(zip(sections, units)):
        body = context.workspace.get(f"body {i}", section.codec.payload_bytes(count))
        section.codec.encode(flat, section.summary, draw, body)
        bodies.append(body)
    return bodies


def _outcome(context: Context, sections: Sequence[Section], bodies: list[torch.Tensor], flat: torch.Tensor) -> Outcome:
    if flat.is_meta:
        return Outcome()

    def sent(out: torch.Tensor, weight: float) -> None:
        for section, body in zip(sections, bodies):
            section.codec.add_own(body, section.summary, weight, out)

    finite = all(s.codec.is_finite(s.summary, flat) for s in sections)
    return Outcome(finite, sent if context.wants_sent else None)
