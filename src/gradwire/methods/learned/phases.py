"""Phases of methods that learn from the first rounds of a training what they send in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.methods.feedback.error_feedback import Feedback


class PhasedMethod(Protocol):
    """Fields that determine the phase of a round."""

    @property
    def full_rounds(self) -> int: ...

    @property
    def training_rounds(self) -> int: ...


class PhasedPlan(BucketPlan):
    """Plan that exchanges a step by the plan of its round's phase: in float32, learning, or with what was learned.

    Args:
        method: Method with the lengths of the first two phases.
        setting: Setting of the bucket, which is the whole step.
        learning: Plan of the second phase, whose residual is fed back.
        learned: Plan of the third phase, with the same residual.
    """

    chunks = 1

    def __init__(self, method: PhasedMethod, setting: PlanSetting, learning: BucketPlan, learned: BucketPlan) -> None:
        self._full, self._compressed = method.full_rounds, method.full_rounds + method.training_rounds
        whole = replace(setting, collective="two_shot").float32_plan()
        self._phases = [whole, *(Feedback(plan, setting.segments) for plan in (learning, learned))]
        self.collective, self.runs = setting.collective, self._phases[-1].runs

    def phase(self, context: Context) -> int:
        """Return the number of a round's phase, from 0; a round below 0, in a dry run, has the last."""
        round = context.round
        return 2 if round < 0 else (round >= self._full) + (round >= self._compressed)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        return (yield from self._phases[self.phase(context)].prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return (yield from self._phases[self.phase(context)].run(context, flat, prepared))
