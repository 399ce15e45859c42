"""A small model as the performance model sees it."""

from __future__ import annotations

import torch

from gradwire.model.profile import Profile, ReadyBucket, Timeline

__all__ = ["SHAPES", "profile"]

SHAPES = {"weight": (300, 200), "bias": (300,), "head": (40, 300)}


def profile(compute_s: float = 0.01) -> Profile:
    names = tuple(SHAPES)
    numel = sum(torch.Size(s).numel() for s in SHAPES.values())
    timeline = Timeline(
        forward_s=compute_s / 4,
        buckets=(ReadyBucket(names=names, numel=numel, ready_s=compute_s / 2),),
        backward_s=compute_s / 2,
        after_s=compute_s / 4,
    )
    strides = {n: tuple(torch.empty(s).stride()) for n, s in SHAPES.items()}
    return Profile(source="test", parameters={n: (s, strides[n]) for n, s in SHAPES.items()}, timeline=timeline)
