"""Protocols that merge payloads, by owners of shares or along a tree, so that bytes hardly grow with the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.exchange.codecs import LeftOut, unread
from gradwire.exchange.ops import Exchange, SendRecv
from gradwire.exchange.protocols.context import Context, Outcome
from gradwire.exchange.protocols.payloads import (
    Section,
    draw_of,
    encode,
    header,
    mergeable,
    outcome,
    remember,
    sections_finite,
    sized,
    whole_rows,
)
from gradwire.exchange.protocols.shares import Share, send_shares, tell_shares
from gradwire.exchange.wire import EVERYONE
from gradwire.seeds import OWNER, merge_stream


def two_shot_merged(context: Context, tag: int, shares: Sequence[Share], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks of the payloads that owners of shares keep when they merge them.

    1. Every rank encodes each share separately and sends it to its owner (all-to-all).
    2. Every rank merges the payloads of its own share, in the order of ranks, to one of the same kind and size, with
       random numbers of the owner's stream.
    3. Every rank sends it to all (all-gather), and decodes all shares.

    The part that a merge leaves out counts as not sent by the owner, so that the outcome is the mean of all vectors
    sent.

    Bytes sent by a rank: (N - 1) times header and codes of a share, twice, each with its length before it if that
    varies. That is less than two payloads for any number of ranks, in two dependent messages;
    :func:`gradwire.exchange.protocols.tree` sends log2(N) payloads in log2(N) dependent messages.
    """
    space = context.workspace
    ups, bodies, parts = yield from send_shares(context, tag, [sized(share.up, flat) for share in shares], flat)
    merged, left_out = list[torch.Tensor](), list[LeftOut]()
    draw = replace(draw_of(context), stream=OWNER, gauge=unread)
    for i, (section, rows) in enumerate(zip(ups[context.rank], parts)):
        codec = mergeable(section.codec)
        merged.append(space.get(f"merged {i}", codec.payload_bytes(codec.units)))
        rest = codec.merge(rows.unbind(), draw, merged[-1])
        if rest is not None:
            left_out.append(rest)
    yield from tell_shares(context, tag, ups, merged, flat)
    found = outcome(context, [s for part in ups for s in part], [b for part in bodies for b in part], flat)
    encoded = found.sent
    if encoded is None:
        return found

    def sent(out: torch.Tensor, weight: float) -> None:
        encoded(out, weight)
        for rest in left_out:
            rest(out, -weight)

    return replace(found, sent=sent)


@dataclass(frozen=True)
class Meeting:
    """The actions of one rank in one round of messages.

    Attributes:
        to, source: Ranks; None for no peer.
        merges: True if the payload received is merged with this rank's, False if it replaces it.
        keeps: True if this rank, of all that do the same merge, keeps the part that it leaves out.
        number: Number of the merge, the same for all ranks that do it and of no other merge: 1 for the last one; the
            two whose results merge n takes are 2n and 2n + 1.
    """

    to: int | None = None
    source: int | None = None
    merges: bool = False
    keeps: bool = False
    number: int = 1


def meetings(rank: int, world_size: int) -> Iterator[Meeting]:
    """Yield the actions of a rank in each round of recursive doubling, for any number of ranks.

    With P the largest power of two that is not above ``world_size``, rank P + i first sends its payload to rank i.
    Then, for h = 1, 2, 4, ... P / 2, ranks i and i xor h below P exchange their payloads and both merge them. Last,
    rank i sends the result to rank P + i.

    Example:
        >>> [(m.to, m.source, m.merges) for m in meetings(0, 3)]
        [(None, 2, True), (1, 1, True), (2, None, False)]
    """
    power = 1 << (world_size.bit_length() - 1)
    twin = rank + power if rank < power else rank - power
    has_twin = twin < world_size
    if power < world_size:
        if rank >= power:
            yield Meeting(to=twin)
        else:
            merge = Meeting(source=twin, merges=True, keeps=True, number=power + rank)
            yield merge if has_twin else Meeting()
    half = 1
    while half < power:
        other = rank ^ half
        number = (power + rank) // (2 * half)
        merge = Meeting(other, other, merges=True, keeps=rank % (2 * half) == 0, number=number)
        yield merge if rank < power else Meeting()
        half *= 2
    if power < world_size:
        if rank >= power:
            yield Meeting(source=twin)
        else:
            yield Meeting(to=twin) if has_twin else Meeting()


def tree(context: Context, tag: int, sections: Sequence[Section], flat: torch.Tensor) -> Exchange[Outcome]:
    """Replace ``flat`` by the mean over ranks of the payload that remains after pairwise merges.

    A merge makes one payload of two, of the same kind and size, and may leave a part out. All ranks end with the same
    payload. One of the ranks that do a merge keeps the part that it leaves out, which counts as not sent by that rank:
    so the outcome is the mean of all vectors sent.

    Bytes sent by a rank: log2(N) (header + codes) for N a power of two, else at most two more; each with its length
    before it if that varies.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    sections = sized(sections, flat)
    codecs = [mergeable(s.codec) for s in sections]
    layout = whole_rows(context, sections)
    own = encode(context, sections, flat, [c.units for c in codecs], draw_of(context))
    sections = remember(context, sections, flat)
    have, left_out = own, list[LeftOut]()
    rounds, draw = list(meetings(rank, world)), replace(draw_of(context), gauge=unread)
    for number, meeting in enumerate(rounds):
        head = header(context, layout, tag, context.exchange + number)
        send = space.get("up", 1, layout.row_bytes)
        room = space.get("received", 1, layout.row_bytes)
        lengths, arrived = (
            torch.zeros(1, dtype=torch.int64, device="cpu") if layout.variable else None for _ in range(2)
        )
        if meeting.to is not None:
            lengths = layout.write(send, head, [body.view(1, -1) for body in have], rank, [EVERYONE])
        reply = yield SendRecv(send[0], room[0], meeting.to, meeting.source, lengths, arrived)
        if meeting.source is None:
            continue
        parts = layout.read(reply.view(1, -1), head, EVERYONE, arrived, first=meeting.source)
        came = [part[0] for part in parts]
        if not meeting.merges:
            have = came
            continue
        low, high = (have, came) if rank < meeting.source else (came, have)
        have = [space.get(f"merged {number % 2} {i}", len(body)) for i, body in enumerate(own)]
        # With the same random numbers, the errors of merges would add up instead of averaging out.
        draws = replace(draw, stream=merge_stream(meeting.number))
        for codec, a, b, out in zip(codecs, low, high, have):
            rest = codec.merge([a, b], draws, out)
            if rest is not None and meeting.keeps:
                left_out.append(rest)
    for section, body in zip(sections, have):
        section.codec.decode_rows(body.view(1, -1), section.summary, flat)

    def sent(out: torch.Tensor, weight: float) -> None:
        for section, body in zip(sections, own):
            section.codec.add_own(body, section.summary, weight, out)
        for rest in left_out:
            rest(out, -weight)

    return Outcome(sections_finite(sections, flat), sent if context.wants_sent else None)
