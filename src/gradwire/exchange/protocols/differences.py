"""Gathers of one vector from each rank, by compressed changes since the last gather."""

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
    """Encodes a vector for other ranks, see :class:`gradwire.methods.gossip.vector_coder.VectorCoder`."""

    def most_bytes(self, numel: int) -> int:
        """Return the largest number of bytes of a vector."""

    def encode(self, values: torch.Tensor, round: int) -> torch.Tensor:
        """Return the bytes of a vector."""

    def decode(self, data: torch.Tensor, numel: int, round: int) -> torch.Tensor:
        """Return the values of encoded bytes."""


class Known:
    """Copies of all ranks' vectors, with the same bits on all ranks.

    Attributes:
        rows: Float32 ``[world_size, numel]``; None before the first gather and after a reset.
        sent: This rank's vector at the time when it was last sent.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None


def gathered_differences(
    context: Context, known: Known, coders: Sequence[VectorCodec], own: torch.Tensor
) -> Exchange[torch.Tensor]:
    """Return the copies of every rank's vector after a gather, ``[world_size, numel]``; read only.

    Let w be rank r's vector and k its copy. In the first gather k = w. After that, if the vector of any rank has
    changed::

        k <- k + C(w - k)

    k is part of the difference, so that the error of an exchange is sent with the next. While a value is not finite,
    vectors are sent uncompressed.

    Args:
        known: The copies of these vectors, which are updated.
        coders: One for each rank's vector, the same on all ranks.
        own: This rank's vector, of any floating-point dtype.

    Bytes sent by a rank: (N - 1) (4 + 8 for the change flag, then header + 8 + codes, rounded up to 16).
    """
    rank = context.rank
    changed = known.sent is None or not torch.equal(known.sent, own)
    level = CHANGED if changed else UNCHANGED
    if changed and not bool(torch.isfinite(own).all()):
        level = NOT_FINITE
    worst = float((yield Reduce(torch.tensor([level], dtype=torch.float32, device="cpu"), "max"))[0])
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
    message = torch.zeros(LENGTH_BYTES + coders[rank].most_bytes(numel), dtype=torch.uint8, device="cpu")
    message[:LENGTH_BYTES] = torch.tensor([codes.numel()], device="cpu").view(torch.uint8)
    message[LENGTH_BYTES : LENGTH_BYTES + codes.numel()] = codes
    rows = yield from gathered_values(context, TAG, message)
    for row, theirs, coder in zip(rows, known.rows, coders):
        length = int(row[:LENGTH_BYTES].clone().view(torch.int64))
        theirs.add_(coder.decode(row[LENGTH_BYTES : LENGTH_BYTES + length].contiguous(), numel, context.round))
    return known.rows
