"""Exchanges of payloads between single ranks: broadcasts, collections on a root, all-to-alls and neighbours."""

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
    """Return the leading rank of a round: each rank in order; rank 0 in the default round of a dry run.

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
        packings: Packing of each section.
        bodies: The sections on the root; None elsewhere, and in a dry run.

    Bytes sent by a rank: header + sections, and eight more if their length varies, times
    :func:`gradwire.exchange.drivers.traffic.broadcast_sends`.
    """
    layout = rows_of(context, packings)
    head = header(context, layout, tag, context.exchange)
    row = context.workspace.get(f"broadcast {context.exchange}", 1, layout.row_bytes)
    # The largest length, until the root's arrives.
    length = torch.tensor([layout.row_bytes], device="cpu") if layout.variable else None
    if bodies is not None:
        told = layout.write(row, head, [body.view(1, -1) for body in bodies], root, [EVERYONE])
        length = length if told is None else told
    reply = yield Broadcast(row[0], root, length)
    return [part[0] for part in layout.read(reply.view(1, -1), head, EVERYONE, length, first=root)]


def broadcast_values(context: Context, tag: int, values: torch.Tensor, root: int) -> Exchange[torch.Tensor]:
    """Return rank ``root``'s values, of the dtype and shape of ``values``, on every rank.

    Bytes sent by a rank: header + values, rounded up to 16 bytes, as many times as in :func:`broadcast`.
    """
    size = values.numel() * values.element_size()
    body = None
    if context.rank == root and not values.is_meta:
        body = torch.zeros(padded(size), dtype=torch.uint8, device="cpu")
        body[:size] = values.detach().contiguous().view(torch.uint8).reshape(-1)
    (part,) = yield from broadcast(context, tag, [Whole(padded(size))], None if body is None else [body], root)
    return part[:size].clone().view(values.dtype).reshape(values.shape)


def collected(
    context: Context, tag: int, packings: Sequence[Packing], bodies: Sequence[torch.Tensor] | None, root: int
) -> Exchange[list[list[torch.Tensor]] | None]:
    """Return the sections of every rank on rank ``root``, by rank; None on all others.

    It is an all-to-all in which all rows except the root's are empty.

    Args:
        packings: Packing of each section.
        bodies: The sections of this rank; None in a dry run.

    Bytes sent by a rank: header + sections, except on the root, and 8 (N - 1) for lengths.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    layout = rows_of(context, packings, variable=True)
    head = header(context, layout, tag, context.exchange)
    send, room = (space.get(name, world, layout.row_bytes) for name in ("collect", "collected"))
    lengths, arrived = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
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
        bodies = [torch.zeros(padded(size), dtype=torch.uint8, device="cpu")]
        bodies[0][:size] = values.detach().contiguous().view(torch.uint8).reshape(-1)
    found = yield from collected(context, tag, [Whole(padded(size))], bodies, root)
    if found is None:
        return None
    rows = torch.stack([parts[0][:size] for parts in found])
    return rows.view(values.dtype).reshape(context.world_size, *values.shape)


def alltoallv(
    context: Context, tag: int, bodies: Sequence[torch.Tensor | None], most_bytes: int
) -> Exchange[list[torch.Tensor | None]]:
    """Send a different payload to each other rank, and return the bodies received.

    The name is that of MPI. Payloads have the usual header and checksum; the driver sends their lengths, too.

    Bytes sent by a rank: 8 (N - 1) for the lengths, and 32 and the body for each receiver.

    Args:
        context: Context whose ``bucket``, ``chunk`` and ``exchange`` identify this exchange in the round.
        tag: Tag of the method that wrote the bodies.
        bodies: Bodies by receiver, uint8 ``[bytes]``; None to send nothing, as for this rank itself.
        most_bytes: Largest size of a body on any rank; the same on all of them.

    Returns:
        Copies of the bodies by sender; None if a rank sent nothing.

    Raises:
        PayloadError: a payload is not the expected one from its sender, or changed in transit.
    """
    world, rank, space = context.world_size, context.rank, context.workspace
    send = space.get("rows", world, HEADER_BYTES + most_bytes)
    lengths, arrived = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
    for to, body in enumerate(bodies):
        if body is None or to == rank:
            continue
        length = HEADER_BYTES + len(body)
        send[to, HEADER_BYTES:length] = body
        seal_rows(send[to : to + 1, :length], _header(context, tag, len(body)), rank, [to])
        lengths[to] = length
    received = yield AllToAll(send, space.get("received rows", *send.shape), lengths, arrived)
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
    """The peers of a rank in a round of messages: the one to send to, and the one to receive from; None for no peer."""

    to: int | None
    source: int | None


def tell_neighbours(
    context: Context,
    tag: int,
    moves: Sequence[Move],
    layout: PayloadRows,
    bodies: Sequence[torch.Tensor] | Bodies,
    take: Callable[[int, list[torch.Tensor]], None],
) -> Exchange[None]:
    """Send a payload to each neighbour, and pass each of theirs to ``take`` when it arrives.

    Args:
        moves: Moves of this rank, as many as on every other rank; each neighbour is in one to send to and in one to
            receive from.
        bodies: The same sections for all neighbours, or a function that returns those for one of them.
        take: ``take(neighbour, sections)``, called in the order of rounds, which depends on the graph alone. The next
            payload overwrites the buffer of the sections.

    Bytes sent by a rank: header and codes times its neighbours, each with its length before it if that varies.
    """
    space, rank = context.workspace, context.rank
    send, room = space.get("up", 1, layout.row_bytes), space.get("received", 1, layout.row_bytes)
    head = header(context, layout, tag, context.exchange)
    lengths: torch.Tensor | None = None
    alike = not callable(bodies)
    if not callable(bodies):
        lengths = layout.write(send, head, [body.view(1, -1) for body in bodies], rank, [EVERYONE])
    for move in moves:
        arrived = torch.zeros(1, dtype=torch.int64, device="cpu") if layout.variable else None
        if callable(bodies) and move.to is not None:
            lengths = layout.write(send, head, [body.view(1, -1) for body in bodies(move.to)], rank, [move.to])
        if layout.variable and lengths is None:
            lengths = torch.zeros(1, dtype=torch.int64, device="cpu")
        reply = yield SendRecv(send[0], room[0], move.to, move.source, lengths, arrived)
        if move.source is not None:
            receiver = EVERYONE if alike else rank
            parts = layout.read(reply.view(1, -1), head, receiver, arrived, first=move.source)
            take(move.source, [part[0] for part in parts])
