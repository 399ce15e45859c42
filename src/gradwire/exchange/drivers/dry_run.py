"""Sizes only: what a plan would send, without data, kernels or a group."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.exchange.drivers.traffic import Meter
from gradwire.exchange.ops import Broadcast, Exchange, Reduce
from gradwire.exchange.protocols import Context, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan

__all__ = ["dry_run"]


USUAL_ROUND = -1
"""A round in which nothing is exchanged that a schedule asks for in some rounds alone."""


def dry_run(plan: BucketPlan, numel: int, world_size: int, round: int = USUAL_ROUND, rank: int = 0) -> Meter:
    """Walk a plan made with the ``meta`` kernels and count its bytes for one rank and one round.

    Exact, but for rows whose length depends on what they hold: those count with the most that they may take.

    Args:
        round: By default one of those between a schedule's updates; a round of the schedule counts with all that is
            exchanged in it, and at its end, as if the step were one bucket.
        rank: Whose bytes. Ranks differ in what they send of a broadcast: of those whose root changes with the round,
            rank 0 is the root of a usual round, which no other rank exceeds.
    """
    meter = Meter(rank)
    flat = torch.empty(numel, dtype=torch.float32, device="meta")
    context = Context(rank, world_size, round, workspace=Workspace("meta"))
    _drive(plan.whole(context, flat), world_size, meter)
    if plan.finishes:
        _drive(plan.finish(context), world_size, meter)
    return meter


def _drive(generator: Exchange[Any], world_size: int, meter: Meter) -> None:
    try:
        op = next(generator)
        while True:
            if not isinstance(op, Reduce | Broadcast) and op.arrived is not None and op.lengths is not None:
                op.arrived.copy_(op.lengths)
            meter.count(op, world_size)
            op = generator.send(op.value if isinstance(op, Reduce | Broadcast) else op.recv)
    except StopIteration:
        return
