"""Payloads of one rank for all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.ops import Broadcast, Exchange
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.payloads import header, rows_of
from gradwire.exchange.wire import EVERYONE, Packing, Whole, padded

__all__ = ["broadcast", "broadcast_values", "leader"]


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
