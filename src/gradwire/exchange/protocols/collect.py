"""Payloads of all ranks for one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.ops import AllToAll, Exchange
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.payloads import header, rows_of
from gradwire.exchange.wire import Packing, Whole, padded

__all__ = ["collected", "collected_values"]


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
