"""What a method does to gradients, as a few numbers by which the ledger knows whether a change changed results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["TOLERANCE", "alike", "outcome"]

ROUNDS, WORKERS = 3, 4
SHAPES = {"weight": (400, 320), "bias": (96,), "kernel": (24, 8, 3, 3)}
"""The weight is long enough for SIDCo to fit a distribution."""
TOLERANCE = 1e-4
"""Relative. Matrix products of low-rank methods differ in their last bits between processors."""


def outcome(spec: str) -> dict[str, Any]:
    """Exchange fixed gradients of four workers for three rounds, and describe what came out.

    The gradients are normal, with a part that all workers share, so that no method has only noise to send. For each
    round: the bytes that the first worker sends, and the Euclidean norm of the mean, or of the first worker's outcome
    where workers' outcomes differ, and its products with two fixed vectors. Where a method leaves its coder open, a
    link takes the fastest on its machine, and these outcomes the last.

    Example:
        >>> outcome("fp32")["bytes"]
        [778944, 778944, 778944]
    """
    import torch

    import gradwire as gw

    generator = torch.Generator().manual_seed(20261125)
    named = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    method = gw.method(spec)
    coders = method.traits.open_coders
    link = gw.SimulatedLink(named, method.with_coder(coders[-1]) if coders else method, WORKERS, min_numel=0)
    numel = sum(p.numel() for _, p in named)
    tests = torch.randn(2, numel, generator=generator, dtype=torch.float64) / math.sqrt(numel)
    values, sent = [], []
    for _ in range(ROUNDS):
        before = link.traffic().sent_bytes
        rows = torch.randn(WORKERS, numel, generator=generator) + torch.randn(numel, generator=generator)
        if link.method.traits.outcomes_differ:
            link.exchange_(rows)
            mean = rows[0].double()
        else:
            mean = link.reduce_(rows).double()
        sent.append(link.traffic().sent_bytes - before)
        values.append([float(x) for x in (mean.norm(), *(tests @ mean))])
    return {"bytes": sent, "values": [[float(f"{x:.9g}") for x in row] for row in values]}


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two outcomes are of the same method: equal bytes, and values within :data:`TOLERANCE`."""
    if one["bytes"] != other["bytes"]:
        return False
    for mine, theirs in zip(one["values"], other["values"], strict=True):
        near = TOLERANCE * max(abs(theirs[0]), 1.0)
        if any(abs(a - b) > near for a, b in zip(mine, theirs, strict=True)):
            return False
    return True
