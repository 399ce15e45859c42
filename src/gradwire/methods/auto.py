"""The method that tries others in the first steps of a training, and keeps the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.error_feedback import Delivery
from gradwire.methods.spec import method, register


@register
@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Tries methods in the first steps of a real training, and keeps the fastest.

    Every step of the trial is an ordinary step of training under one of the candidates. Candidates that the link
    alone would make slower than another's whole step are not tried. ``coded`` is TernGrad behind an entropy coder, the
    same bits out: it is taken where the bytes that it saves are worth its time on this machine and this link. ``drive``
    has the fewest bytes of all that are unbiased.

    Methods that keep residuals, such as :class:`ErrorFeedback` and :class:`PowerSGD`, are tried where they are named.
    Residuals pass from one candidate to the next: a method without any sends them with its own gradient, once, so that
    nothing of a trial's rounds is lost. What else a method remembers, such as PowerSGD's factors, begins anew with each
    turn.

    Attributes:
        candidates: Specs, the ones to prefer at equal speed first. None of the default keeps a residual.
        turns: In which the candidates alternate.
        steps: Of each candidate in a turn.

    Raises:
        HyperparameterError: fewer than two candidates, one named twice, one that brings a momentum of its own, gives a
            direction, leaves out a part of the gradient or remembers all parameters as one vector, or no turns or
            steps.
    """

    name: ClassVar[str] = "auto"
    properties: ClassVar[Properties] = Properties(
        summary="The fastest of a list, by trial in the first steps",
        paper="none",
        bit_stable=False,
        bits_per_element=32.0,
    )

    candidates: tuple[str, ...] = ("fp32", "bf16", "terngrad", "coded", "drive")
    turns: int = 4
    steps: int = 3

    def __post_init__(self) -> None:
        listed = isinstance(self.candidates, (tuple, list)) and all(isinstance(c, str) for c in self.candidates)
        require(listed, "Auto(candidates=...)", f"a tuple of specs is needed, not {self.candidates!r}")
        chosen = [method(c) for c in self.candidates]
        require(len(chosen) > 1, "Auto(candidates=...)", "at least two are needed to choose from")
        require(len(set(chosen)) == len(chosen), "Auto(candidates=...)", "a method is named twice")
        for one in chosen:
            apart = not_comparable(one)
            require(apart is None, "Auto(candidates=...)", f"{one!r} {apart}")
        self._check_sizes(chosen)
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for field in ("turns", "steps"):
            value = getattr(self, field)
            require(is_whole(value, 1), f"Auto({field}=...)", f"at least 1 is needed, not {value!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=(),
            needs_loss_scale=any(method(spec).traits.needs_loss_scale for spec in self.candidates),
            kernels=tuple(dict.fromkeys(name for spec in self.candidates for name in method(spec).traits.kernels)),
            remembers=tuple(dict.fromkeys(kind for spec in self.candidates for kind in method(spec).traits.remembers)),
            needs_learning_rates=any(method(spec).traits.needs_learning_rates for spec in self.candidates),
            needs_link_cost=any(method(spec).traits.needs_link_cost for spec in self.candidates),
            tries=self.candidates,
            unbiased=False,
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        return next(
            m.remembered_numel(kind, parameter) for m in map(method, self.candidates) if kind in m.traits.remembers
        )

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        return next((told for spec in self.candidates if (told := method(spec).caution(optimizer, parameters))), None)

    @staticmethod
    def _check_sizes(chosen: list[Method]) -> None:
        """Refuse candidates that remember under one name what has different sizes."""
        probe, sizes = Parameter("p", (512, 256), (256, 1)), dict[str, int]()
        for one in chosen:
            for kind in one.traits.remembers:
                numel = sizes.setdefault(kind, one.remembered_numel(kind, probe))
                require(
                    numel == one.remembered_numel(kind, probe),
                    "Auto(candidates=...)",
                    f"{one!r} and another candidate keep a {kind!r} of different sizes: name one of them",
                )


def delivering(plan: BucketPlan, segments: Sequence[Segment]) -> BucketPlan:
    """Return a plan of a candidate without residuals that also sends those that another one has left."""
    return Delivery(plan, segments)


def not_comparable(one: Method) -> str | None:
    """Explain why the time of a step alone cannot tell whether a method is better than others; None where it can."""
    if one.traits.tries:
        return "tries others itself: it cannot be tried"
    if one.traits.local_steps:
        return "exchanges parameters and no gradients, which the other candidates' rounds do not go with"
    if one.traits.owns_momentum:
        return "brings a momentum of its own, for which the optimizer has to have none"
    if one.traits.joined and one.properties.state != "none":
        return "remembers all parameters as one vector, which others cannot go on with"
    if one.traits.direction:
        return "gives a direction, which needs a learning rate of its own"
    if one.traits.sends_parts:
        return (
            "sends a part of the gradient a round, the faster the more it leaves out, and what is left out is lost "
            "without error feedback: use ErrorFeedback around it, by name rather than by trial"
        )
    return None
