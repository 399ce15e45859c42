"""Payloads that go to the neighbours in a graph, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradwire.exchange.ops import Exchange, SendRecv
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.payloads import PayloadRows, header
from gradwire.exchange.wire import EVERYONE

__all__ = ["Bodies", "Move", "tell_neighbours"]

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
