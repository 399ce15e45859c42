"""Vectors that each belong to one rank, gathered by what changed of them since all ranks last knew them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradwire.exchange.ops import Exchange, Reduce
from gradwire.exchange.protocols.all_reduce import gathered_values
from gradwire.exchange.protocols.context import Context

TAG = 103
"""Wire tag of the payloads."""

UNCHANGED, CHANGED, NOT_FINITE = 0.0, 1.0, 2.0

LENGTH_BYTES = 8


class VectorCodec(Protocol):
    """What encodes a vector for those who decode it, see :class:`gradwire.methods.gossip.vector_coder.VectorCoder`."""

    def most_bytes(self, numel: int) -> int:
        """Return the most bytes that a vector takes."""

    def encode(self, values: torch.Tensor, round: int) -> torch.Tensor:
        """Return the bytes of a vector."""

    def decode(self, data: torch.Tensor, numel: int, round: int) -> torch.Tensor:
        """Return the values that these bytes stand for."""


class Known:
    """What all ranks know of each other's vectors, the same bits on all of them.

    Attributes:
        rows: Float32 ``[world_size, numel]``; None before the first gather, and where it has to begin anew.
        sent: This rank's vector as it was when it was last sent.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None


def gathered_differences(
    context: Context, known: Known, coders: Sequence[VectorCodec], own: torch.Tensor
) -> Exchange[torch.Tensor]:
    """Return every rank's vector, ``[world_size, numel]``, as all ranks then know it; not to be written.

    With w rank r's vector and k what is known of it: the first time k = w. After that, if the vector of any rank has
    changed::

        k <- k + C(w - k)

    k is part of the difference, so that what an exchange errs by is sent with the next. While a value is not finite,
    vectors travel as they are.

    Args:
        known: Of these vectors; changed.
        coders: One for each rank's vector, the same on all ranks.
        own: This rank's vector, of any floating-point type.

    Bytes sent by a rank: (N - 1) (4 + 8 for what has changed, then header + 8 + codes, rounded up to 16).
    """
    rank = context.rank
    changed = known.sent is None or not torch.equal(known.sent, own)
    level = CHANGED if changed else UNCHANGED
    if changed and not bool(torch.isfinite(own).all()):
        level = NOT_FINITE
    worst = float((yield Reduce(torch.tensor([level]), "max"))[0])
    if worst == UNCHANGED and known.rows is not None:
        return known.rows
    known.sent = own.clone()
    if worst == NOT_FINITE or known.rows is None:
        exact = (yield from gathered_values(context, TAG, own)).float()
        known.rows = None if worst == NOT_FINITE else exact
        if worst == NOT_FINITE:
            known.sent = None
        return exact
    numel = own.numel()
    codes = coders[rank].encode(own.float() - known.rows[rank], context.round)
    message = torch.zeros(LENGTH_BYTES + coders[rank].most_bytes(numel), dtype=torch.uint8)
    message[:LENGTH_BYTES] = torch.tensor([codes.numel()]).view(torch.uint8)
    message[LENGTH_BYTES : LENGTH_BYTES + codes.numel()] = codes
    rows = yield from gathered_values(context, TAG, message)
    for row, theirs, coder in zip(rows, known.rows, coders):
        length = int(row[:LENGTH_BYTES].clone().view(torch.int64))
        theirs.add_(coder.decode(row[LENGTH_BYTES : LENGTH_BYTES + length].contiguous(), numel, context.round))
    return known.rows
