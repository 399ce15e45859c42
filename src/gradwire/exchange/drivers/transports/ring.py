"""The arithmetic of Gloo's ring all-reduce, for reductions whose messages a transport sends itself.

Gloo cuts a vector into segments, gives each rank equally many in order of ranks, and passes a rank's share from rank to
rank around the ring, downwards and to that rank last. Float sums depend on that order, and shares on the cut, so that
both are repeated here, and results have the same bits (``gloo/allreduce.cc``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MOST_SEGMENT_BYTES = 1 << 20

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def ring_shares(numel: int, item_bytes: int, world_size: int) -> int:
    """Return the number of elements of each rank's share of a vector; the last shares may be short or empty.

    Example:
        >>> ring_shares(1000, 4, 4)
        250
    """
    total = numel * item_bytes
    segments = max(-(-total // _MOST_SEGMENT_BYTES), 2 * world_size)
    segments = -(-segments // world_size) * world_size
    segment_bytes = -(-total // segments)
    return segments // world_size * -(-segment_bytes // item_bytes)


def ring_combined(rows: torch.Tensor, rank: int, op: str) -> torch.Tensor:
    """Combine all ranks' values of one rank's share, ``[world_size, numel]``, in the order of the ring.

    Args:
        rows: Values by rank.
        rank: The rank whose share it is, which comes last.
        op: "sum", "max" or "min".
    """
    n, combine = len(rows), _COMBINE[op]
    found = rows[(rank - 1) % n].clone()
    for places in range(2, n + 1):
        combine(found, rows[(rank - places) % n], out=found)
    return found
