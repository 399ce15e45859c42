"""A payload of its own, of any length, for every other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.ops import AllToAll, Exchange
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.wire import HEADER_BYTES, Header, check_rows, seal_rows

__all__ = ["alltoallv"]


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
