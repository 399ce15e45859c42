"""Payloads of one rank for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.ops import AllToAll, Broadcast, Exchange, SendRecv
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.payloads import PayloadRows, header, rows_of
from gradwire.exchange.wire import EVERYONE, HEADER_BYTES, Header, Packing, Whole, check_rows, padded, seal_rows


def leader(round: int, world_size: int) -> int:
    """Return the rank whose turn it is in a round: each in order; rank 0 in the usual round of a dry run.

    Example:
        >>> [leader(round, 3) for round in (-1, 0, 1, 2, 3)]
        [0, 0, 1, 2, 0]
    """
    return round % world_size if round >= 0 else 0


def broadcast(
    context: Context, tag: int, packings: Sequence[Packing], bodies: Sequence[torch.Tensor] | None, root: int
) -> Exchange[list[torch.Tensor]]:
    """Return the sections of rank ``root`` on every rank.

    Args:
        packings: How each section travels.
        bodies: The sections on the root; None elsewhere, and in a dry run.

    Bytes sent by a rank: header + sections, as often as
    :func:`gradwire.exchange.drivers.traffic.broadcast_sends` says, and eight more each time where their length varies.
    """
    layout = rows_of(context, packings)
    head = header(context, layout, tag, context.exchange)
    row = context.workspace.get(f"broadcast {context.exchange}", 1, layout.row_bytes)
    # Until the root has told, as many bytes as there may be.
    length = torch.tensor([layout.row_bytes]) if layout.variable else None
    if bodies is not None:
        told = layout.write(row, head, [body.view(1, -1) for body in bodies], root, [EVERYONE])
        length = length if told is None else told
    reply = yield Broadcast(row[0], root, length)
    return [part[0] for part in layout.read(reply.view(1, -1), head, EVERYONE, length, first=root)]


def broadcast_values(context: Context, tag: int, values: torch.Tensor, root: int) -> Exchange[torch.Tensor]:
    """Return rank ``root``'s values, of the dtype and shape of ``values``, on every rank.

    Bytes sent by a rank: header + values, rounded up to 16 bytes, as often as for :func:`broadcast`.
    """
    size = values.numel() * values.element_size()
    body = None
    if context.rank == root and not values.is_meta:
        body = torch.zeros(padded(size), dtype=torch.uint8)
        body[:size] = values.detach().contiguous().view(torch.uint8).reshape(-1)
    (part,) = yield from broadcast(context, tag, [Whole(padded(size))], None if body is None else [body], root)
    return part[:size].clone().view(values.dtype).reshape(values.shape)


def collected(
    context: Context, tag: int, packings: Sequence[Packing], bodies: Sequence[torch.Tensor] | None, root: int
) -> Exchange[list[list[torch.Tensor]] | None]:
    """Return the sections of every rank on rank ``root``, by rank; None on all others.

    An all-to-all in which all rows but the root's are empty.

    Args:
        packings: How each section travels.
        bodies: The sections of this rank; None in a dry run.

    Bytes sent by a rank: header + sections, but for the root's, and 8 (N - 1) for telling lengths.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    layout = rows_of(context, packings, variable=True)
    head = header(context, layout, tag, context.exchange)
    send, room = (space.get(name, world, layout.row_bytes) for name in ("collect", "collected"))
    lengths, arrived = torch.zeros(world, dtype=torch.int64), torch.zeros(world, dtype=torch.int64)
    told = layout.write(send[root : root + 1], head, [b.view(1, -1) for b in bodies or ()], rank, [root])
    if rank != root and told is not None:
        lengths[root] = told[0]
    rows = yield AllToAll(send, room, lengths, arrived)
    if rank != root:
        return None
    parts = layout.read(rows, head, rank, arrived)
    return [[part[sender].clone() for part in parts] for sender in range(world)]


def collected_values(context: Context, tag: int, values: torch.Tensor, root: int) -> Exchange[torch.Tensor | None]:
    """Return every rank's values on rank ``root``, ``[world_size, *values.shape]``; None on all others.

    Bytes sent by a rank: as for :func:`collected`.
    """
    size = values.numel() * values.element_size()
    bodies = None
    if not values.is_meta:
        bodies = [torch.zeros(padded(size), dtype=torch.uint8)]
        bodies[0][:size] = values.detach().contiguous().view(torch.uint8).reshape(-1)
    found = yield from collected(context, tag, [Whole(padded(size))], bodies, root)
    if found is None:
        return None
    rows = torch.stack([parts[0][:size] for parts in found])
    return rows.view(values.dtype).reshape(context.world_size, *values.shape)


def alltoallv(
    context: Context, tag: int, bodies: Sequence[torch.Tensor | None], most_bytes: int
) -> Exchange[list[torch.Tensor | None]]:
    """Send every other rank a payload of its own, and return the bodies of those that came.

    The name is MPI's. Payloads have the header and the checksum of all others; the driver tells their lengths first.

    Bytes sent by a rank: 8 (N - 1) for the lengths, and 32 and the body for each rank that is sent one.

    Args:
        context: Its ``bucket``, ``chunk`` and ``exchange`` tell this exchange from the others of the round.
        tag: Of the method that wrote the bodies.
        bodies: By rank, uint8 ``[bytes]``; None where nothing is sent, as to this rank itself.
        most_bytes: That a body may have on any rank; the same on all of them.

    Returns:
        By rank, the body that came from it, a copy; None where none came.

    Raises:
        PayloadError: a payload is not the one that is due from its sender, or changed on the way.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    send = space.get("rows", world, HEADER_BYTES + most_bytes)
    lengths, arrived = torch.zeros(world, dtype=torch.int64), torch.zeros(world, dtype=torch.int64)
    for to, body in enumerate(bodies):
        if body is None or to == rank:
            continue
        length = HEADER_BYTES + len(body)
        send[to, HEADER_BYTES:length] = body
        seal_rows(send[to : to + 1, :length], _header(context, tag, len(body)), rank, [to])
        lengths[to] = length
    received = yield AllToAll(send, space.get("received rows", *send.shape), lengths, arrived, last=True)
    found: list[torch.Tensor | None] = []
    for source, length in enumerate(arrived.tolist()):
        if not length:
            found.append(None)
            continue
        if length < HEADER_BYTES:
            raise PayloadError(f"payload from {{sender}}: {length} bytes are less than a header", source)
        row = received[source : source + 1, :length]
        check_rows(row, _header(context, tag, length - HEADER_BYTES), rank, source)
        found.append(row[0, HEADER_BYTES:].clone())
    return found


def _header(context: Context, tag: int, body_bytes: int) -> Header:
    return Header(tag, context.round, context.bucket, context.chunk, body_bytes, context.exchange)


Bodies = Callable[[int], Sequence[torch.Tensor]]
"""``bodies(neighbour)`` returns the sections of the payload for a neighbour, each uint8 ``[size]``."""


@dataclass(frozen=True)
class Move:
    """What a rank does in a round of messages: whom it sends to, and whom it receives from; None for nobody."""

    to: int | None
    source: int | None


def tell_neighbours(
    context: Context,
    tag: int,
    moves: Sequence[Move],
    layout: PayloadRows,
    bodies: Sequence[torch.Tensor] | Bodies,
    take: Callable[[int, list[torch.Tensor]], None],
    *,
    last: bool = True,
) -> Exchange[None]:
    """Send a payload to each neighbour, and hand each of theirs on as it comes, with the rank that sent it.

    Args:
        moves: Of this rank, in as many rounds as every other rank has; a neighbour is sent to once, and heard once.
        bodies: The same sections for all neighbours, or what makes those for one of them.
        take: ``take(neighbour, sections)``, in the order of rounds, which is a function of the graph alone. Sections
            lie in a buffer that the next payload overwrites.
        last: Whether no other payloads of the job follow.

    Bytes sent by a rank: header and codes times its neighbours, each with its length before it where that varies.
    """
    space, rank = context.workspace, context.rank
    send, room = space.get("up", 1, layout.row_bytes), space.get("received", 1, layout.row_bytes)
    head = header(context, layout, tag, context.exchange)
    lengths: torch.Tensor | None = None
    alike = not callable(bodies)
    if not callable(bodies):
        lengths = layout.write(send, head, [body.view(1, -1) for body in bodies], rank, [EVERYONE])
    for number, move in enumerate(moves):
        arrived = torch.zeros(1, dtype=torch.int64) if layout.variable else None
        if callable(bodies) and move.to is not None:
            lengths = layout.write(send, head, [body.view(1, -1) for body in bodies(move.to)], rank, [move.to])
        if layout.variable and lengths is None:
            lengths = torch.zeros(1, dtype=torch.int64)
        end = last and number == len(moves) - 1
        reply = yield SendRecv(send[0], room[0], move.to, move.source, lengths, arrived, end)
        if move.source is not None:
            receiver = EVERYONE if alike else rank
            parts = layout.read(reply.view(1, -1), head, receiver, arrived, first=move.source)
            take(move.source, [part[0] for part in parts])
