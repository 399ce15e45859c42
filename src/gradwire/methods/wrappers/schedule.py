"""Schedules: exchanges that change with the round."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan

__all__ = ["CURVES", "ScheduledPlan", "first_rounds", "points_of"]

CURVES: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, part: start + part * (end - start),
    "exponential": lambda start, end, part: start * (end / start) ** part,
    "cosine": lambda start, end, part: end + (start - end) * (1 + math.cos(math.pi * part)) / 2,
    "reciprocal": lambda start, end, part: 1 / (1 / start + part * (1 / end - 1 / start)),
}
"""By name, the value of a schedule from ``start`` to ``end`` of which that part, 0 to 1, has passed."""


def first_rounds(rounds: float, stages: int) -> list[int]:
    """Return the first round of each of so many equal stages of a schedule, and of what follows them.

    A round is of stage i if it is at least i / stages of ``rounds``, and less than (i + 1) / stages.

    Example:
        >>> first_rounds(10, 4)
        [0, 3, 5, 8, 10]
    """
    return [math.ceil(Fraction(rounds) * i / stages) for i in range(stages + 1)]


def points_of(curve: str, start: float, end: float, rounds: float, stages: int) -> list[float]:
    """Return the value of each stage: that of the curve in its first round.

    All but the first are rounded to six digits. Powers and cosines of libraries differ in the last bit, and workers on
    unlike machines must not differ in how many elements they send.

    Example:
        >>> points_of("exponential", 0.25, 0.001, 4, 4)
        [0.25, 0.0628717, 0.0158114, 0.00397635]
    """
    later = first_rounds(rounds, stages)[1:-1]
    return [start, *(float(f"{CURVES[curve](start, end, first / rounds):.6g}") for first in later)]


class ScheduledPlan(BucketPlan):
    """Exchanges a bucket by the plan of the stage that a round belongs to.

    The stage is a function of the round alone, so that all ranks take the same and a training that is resumed goes on
    in it. A round below 0, which dry runs take for a usual one, belongs to the last stage.

    Args:
        stages: Plans of one bucket by methods that differ in a dial, such as a density, but neither in what they
            compress nor in how they cut it.
        first: The first round of each stage, ascending from 0.

    Raises:
        ValueError: the plans cut the bucket into different chunks, or travel by different collectives.
    """

    def __init__(self, stages: Sequence[BucketPlan], first: Sequence[int]) -> None:
        last = stages[-1]
        self._stages, self._first = stages, first
        self.chunks, self.collective, self.runs = last.chunks, last.collective, last.runs
        self.asynchronous, self.keeps_dtype = last.asynchronous, last.keeps_dtype
        if any(_layout(stage) != _layout(last) for stage in stages):
            raise ValueError("stages of a schedule exchange a bucket in different parts")

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        return (yield from self._stage(context).prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return (yield from self._stage(context).run(context, flat, prepared))

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self._stage(context).target_(context, gradient)

    def _stage(self, context: Context) -> BucketPlan:
        return self._stages[-1 if context.round < 0 else bisect_right(self._first, context.round) - 1]


def _layout(plan: BucketPlan) -> tuple[Any, ...]:
    runs = [list(chunk) for chunk in plan.runs]
    return plan.chunks, plan.collective, plan.asynchronous, plan.keeps_dtype, runs
