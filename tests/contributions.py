"""What ranks say that they contributed to an exchange: what residuals, shifts and diagnostics are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context, Memory, Outcome, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan

__all__ = ["contributed", "told"]

WEIGHTS = (1.0, -1.0, 0.5, 3.0)


def told(outcome: Outcome, numel: int) -> torch.Tensor:
    """Return what a rank says that it sent: the same however often it is asked, and in proportion to any weight."""
    assert outcome.sent is not None
    found = torch.zeros(numel)
    outcome.sent(found, 1.0)
    before = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    for weight in WEIGHTS:
        out = before.clone()
        outcome.sent(out, weight)
        # Four roundings to 2^-24 of terms that may be larger than their sum, as a reference and a difference to it.
        room = 2**-22 * (4.0 + abs(weight) * max(64.0, 4 * float(found.abs().max())))
        assert float((out - (before + weight * found)).abs().max()) <= room, weight
    return found


def contributed(
    plan: BucketPlan, rows: torch.Tensor, memories: Sequence[Memory], round: int = 0, loss_scale: float = 1.0
) -> torch.Tensor:
    """Exchange a bucket, a row a rank, in place; return what each rank says that it sent, in all chunks together."""
    world_size, sent = len(rows), torch.zeros_like(rows)
    contexts = [
        Context(rank, world_size, round, memory=memory, loss_scale=loss_scale, wants_sent=True)
        for rank, memory in enumerate(memories)
    ]
    meters = [Meter(rank) for rank in range(world_size)]
    prepared = simulate_ranks([plan.prepare(c, row) for c, row in zip(contexts, rows)], meters)
    for chunk in range(plan.chunks):
        mine = [replace(c, chunk=chunk, workspace=Workspace()) for c in contexts]
        runs = [plan.run(c, row, p) for c, row, p in zip(mine, rows, prepared)]
        for outcome, out in zip(simulate_ranks(runs, meters), sent):
            out += told(outcome, len(out))
    for memory in memories:
        memory.commit()
    return sent
