"""How ranks tell each other the lengths of rows that follow."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.errors import PayloadError

__all__ = ["announce", "announced"]


def announce(lengths: torch.Tensor) -> torch.Tensor:
    """Return what tells each rank a length, uint8 ``[ranks, 8]``: 32 bits, and their complement behind them."""
    words = lengths.numpy().astype(np.uint32)
    return torch.from_numpy(np.stack([words, ~words], 1)).view(torch.uint8)


def announced(received: torch.Tensor, rank: int, most: int, first: int = 0) -> torch.Tensor:
    """Read the lengths that ranks from ``first`` on announced, 0 for this rank itself, int64 ``[ranks]``.

    Raises:
        PayloadError: one changed on the way, or is of more bytes than fit.
    """
    words, complements = received.numpy().view(np.uint32).T
    for sender, (length, complement) in enumerate(zip(words.tolist(), complements.tolist()), first):
        if sender != rank and (length ^ complement != 0xFFFFFFFF or length > most):
            raise PayloadError(
                f"{{sender}} announced a row of {length} bytes, with {complement ^ 0xFFFFFFFF} to confirm it, where at "
                f"most {most} fit",
                sender,
            )
    told = torch.from_numpy(words.astype(np.int64))
    if rank >= 0:
        told[rank] = 0
    return told
