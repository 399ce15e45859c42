"""Protocols in which each rank owns a share or a shard of a chunk, and computes its mean from all ranks' payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.exchange.codecs import CheckedCodec, Draw, unread
from gradwire.exchange.deferred_checks import Flag, all_hold, both
from gradwire.exchange.ops import AllGather, AllToAll, Exchange, Reduce
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import (
    Section,
    draw_of,
    encode,
    equal_rows,
    header,
    outcome,
    remember,
    sized,
    told_lengths,
)
from gradwire.exchange.wire import EVERYONE
from gradwire.seeds import OWNER

Bodies = list[torch.Tensor]
"""The codes of the sections of a share."""


@dataclass(frozen=True, eq=False)
class Share:
    """The sections of one rank's share, for the workers' vectors (``up``) and for the owner's mean (``down``)."""

    up: Sequence[Section]
    down: Sequence[Section]


def two_shot_re_encoded(context: Context, tag: int, shares: Sequence[Share], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by an estimate of the mean over ranks, for which the owner of a share encodes its mean again.

    It is :func:`gradwire.exchange.protocols.two_shot` for codes that do not add up: the owner decodes them, averages in
    float32, and encodes the mean with random numbers of the owner's stream. Both directions have the size of codes, and
    the mean has the error of one more encoding, the same on every rank.

    Bytes sent by a rank: (N - 1) times header and codes of a share, twice; all shares have the size of the longest.
    """
    ups, downs = [sized(s.up, flat) for s in shares], [sized(s.down, flat) for s in shares]
    owners = replace(draw_of(context), stream=OWNER, gauge=unread)
    ups, bodies, parts = yield from send_shares(context, tag, ups, flat)
    for section, part in zip(ups[context.rank], parts):
        section.codec.decode_rows(part, section.summary, flat)
    ours = [replace(s, summary=s.codec.summarise_mean(flat, s.summary)) for s in downs[context.rank]]
    means = encode(context, ours, flat, [s.codec.units for s in ours], owners, "mean's ")
    yield from tell_shares(context, tag, downs, means, flat, owners)
    return outcome(context, [s for part in ups for s in part], [b for part in bodies for b in part], flat)


def send_shares(
    context: Context, tag: int, shares: Sequence[Sequence[Section]], flat: torch.Tensor
) -> Exchange[tuple[list[Sequence[Section]], list[Bodies], Sequence[torch.Tensor]]]:
    """Encode every share of ``flat`` and send each to its owner.

    Returns:
        The sections with the summaries for this rank's decoders; this rank's codes of each share; and for each section
        of its own share every rank's codes, ``[world_size, bytes]``.
    """
    world, rank, space, draw = context.world_size, context.rank, context.workspace, draw_of(context)
    layouts, width = equal_rows(context, shares)
    heads = [header(context, layout, tag, context.exchange) for layout in layouts]
    send, lengths, bodies = space.get("up", world, width), [], list[Bodies]()
    made: dict[int, torch.Tensor] = {}
    for to, (sections, layout, head) in enumerate(zip(shares, layouts, heads)):
        # A codec that several shares have in common encodes only once.
        new = [s for s in sections if id(s.codec) not in made]
        codes = encode(context, new, flat, [s.codec.units for s in new], draw, f"share {to} ")
        made.update((id(s.codec), body) for s, body in zip(new, codes))
        bodies.append([made[id(s.codec)] for s in sections])
        rows = [body.view(1, -1) for body in bodies[-1]]
        lengths.append(layout.write(send[to : to + 1, : layout.row_bytes], head, rows, rank, [to]))
    shares = [remember(context, sections, flat) for sections in shares]
    uneven = [n for n in lengths if n is not None]
    told, arrived = told_lengths(context, torch.cat(uneven) if uneven else None)
    received = yield AllToAll(send, space.get("up, received", world, width), told, arrived)
    parts = layouts[rank].read(received[:, : layouts[rank].row_bytes], heads[rank], rank, arrived)
    return shares, bodies, parts


def tell_shares(
    context: Context,
    tag: int,
    shares: Sequence[Sequence[Section]],
    codes: Bodies,
    flat: torch.Tensor,
    draw: Draw | None = None,
) -> Exchange[None]:
    """Send the codes of this rank's own share to all ranks, and decode those of every share into ``flat``.

    Args:
        draw: Draw of the owners, for codecs that decode with it; None if ranks decode as they do their own codes.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    layouts, width = equal_rows(context, shares)
    heads = [header(context, layout, tag, context.exchange + 1) for layout in layouts]
    mine, layout = space.get("down", 1, width), layouts[rank]
    rows = [body.view(1, -1) for body in codes]
    length = layout.write(mine[:, : layout.row_bytes], heads[rank], rows, rank, [EVERYONE])
    told, arrived = told_lengths(context, length)
    gathered = yield AllGather(mine[0], space.get("down, received", world, width), told, arrived)
    for owner, (sections, layout, head) in enumerate(zip(shares, layouts, heads)):
        row = gathered[owner : owner + 1, : layout.row_bytes]
        came = None if arrived is None else arrived[owner : owner + 1]
        for section, part in zip(sections, layout.read(row, head, EVERYONE, came, first=owner)):
            summary = section.summary
            if draw is not None:
                summary = section.codec.remember(summary, flat, draw, False)
            section.codec.decode_rows(part, summary, flat)


REDUCE_SCATTER = "reduce_scatter"
"""Name of the protocol after which each rank holds the mean of its own shard only."""


@dataclass(frozen=True, eq=False)
class ShardSections:
    """The sections of one rank's shard, which every rank encodes.

    Attributes:
        sections: Sections with the shard.
        covered: Their runs of the flat vector. If neighbouring shards share a block, both cover it.
        owned: The runs that belong to the rank; each element of the chunk belongs to one rank.
    """

    sections: Sequence[Section]
    covered: Sequence[tuple[int, int]]
    owned: Sequence[tuple[int, int]]


def reduce_scatter(
    context: Context, tag: int, shards: Sequence[ShardSections], flat: torch.Tensor
) -> Exchange[Outcome]:
    """Replace this rank's own runs of ``flat`` by the mean over ranks; all else in it is unspecified afterwards.

    1. Every rank encodes its vector and sends each rank the codes of that rank's shard (all-to-all).
    2. Every rank decodes all ranks' codes of its own shard and adds them up in float32, in the order of ranks.
    3. Ranks agree on whether the mean is finite, since state belongs to all shards.

    The mean of an element has the same bits as by :func:`gradwire.exchange.protocols.all_gather`: if a shard begins or
    ends within elements that are encoded together, both neighbours receive all of them.

    Bytes sent by a rank: (N - 1) (header + codes of a shard), with all shards of the size of the longest, and (N - 1)
    12 for the last step.
    """
    parts, bodies, finite = yield from owned_means(context, tag, [shard.sections for shard in shards], flat)
    lost = yield Reduce(_lost(finite, flat), "max")

    def sent(out: torch.Tensor, weight: float) -> None:
        room: torch.Tensor | None = None
        for sections, codes, shard in zip(parts, bodies, shards):
            target = out
            if shard.covered != shard.owned:
                # The neighbour's part of a block that both cover is added for the neighbour's shard.
                target = room = torch.zeros_like(out) if room is None else room
                for begin, end in shard.covered:
                    room[begin:end] = 0.0
            for section, body in zip(sections, codes):
                section.codec.add_own(body, section.summary, weight, target)
            if target is not out:
                for begin, end in shard.owned:
                    out[begin:end].add_(target[begin:end])

    return Outcome(all_hold(lost == 0), sent if context.wants_sent else None)


def _lost(finite: Flag | None, flat: torch.Tensor) -> torch.Tensor:
    """Return 0 for a finite shard, else 1, on the device of the gradient, also on a rank without a shard here."""
    if isinstance(finite, torch.Tensor):
        return finite.logical_not().to(torch.float32).view(1)
    return torch.full((1,), float(not finite), device="cpu" if flat.is_meta else flat.device, dtype=torch.float32)


def owned_means(
    context: Context, tag: int, shards: Sequence[Sequence[Section]], flat: torch.Tensor
) -> Exchange[tuple[list[Sequence[Section]], list[list[torch.Tensor]], Flag | None]]:
    """Replace the part of ``flat`` in this rank's sections by the mean over ranks.

    Returns:
        All ranks' sections with the summaries for decoders, this rank's codes for each rank, and whether the mean of
        its own shard is finite.
    """
    parts, bodies, received = yield from send_shares(context, tag, [sized(s, flat) for s in shards], flat)
    finite: Flag | None = True
    for section, rows in zip(parts[context.rank], received):
        codec = section.codec
        if codec.decode_rows(rows, section.summary, flat) is False and isinstance(codec, CheckedCodec):
            codec.spoil(flat)
            context.warn_here(type(codec).__name__, f"round {context.round}: {codec.unread()}")
        finite = both(finite, codec.is_finite(section.summary, flat))
    return parts, bodies, finite
