"""Buckets as a link lays them out where DDP does not."""

from __future__ import annotations

import torch

__all__ = ["own_buckets"]


def own_buckets(parameters: dict[str, torch.Tensor], most: int) -> list[list[str]]:
    """Lay parameters out in buckets of one type and so many elements, the last one first, as backward brings them."""
    buckets: dict[tuple[torch.dtype, int], list[str]] = {}
    filled: dict[torch.dtype, list[int]] = {}
    for name, p in reversed(parameters.items()):
        at = filled.setdefault(p.dtype, [0, 0])
        if at[1] and at[1] + p.numel() > most:
            at[0], at[1] = at[0] + 1, 0
        at[1] += p.numel()
        buckets.setdefault((p.dtype, at[0]), []).append(name)
    return list(buckets.values())
