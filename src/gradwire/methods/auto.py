"""Auto: tries methods in the first steps of a training, and keeps the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.accuracy import without_momentum
from gradwire.methods.feedback.error_feedback import Delivery
from gradwire.methods.feedback.optimizers import momentum_of
from gradwire.methods.spec import method, register

CANDIDATES = ("fp32", "bf16", "terngrad", "coded", "drive")
"""Candidates if the user lists none."""

WITH_RESIDUALS = ("powersgd", "acp_sgd", "ErrorFeedback(TopK(density=0.01))", "ef_signsgd")
"""Candidates of ``residuals=True``, in order of preference at equal speed: those that lose the least in the tables of
``docs/accuracy.md`` first, and last those that were measured without momentum."""

MEASURED = "not tried: its accuracy was measured without momentum"
UNKNOWN = f"{MEASURED}, and the link does not know the optimizer's: attach with optimizer="
"""Reasons why added candidates are not tried, in a link's record."""


@register
@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Tries methods in the first steps of a real training, and keeps the fastest.

    Every step of the trial is an ordinary training step with one of the candidates. A candidate is not tried if its
    bytes alone take the link more than 1.5 times as long as a whole step of the candidate with the fewest bytes.
    ``coded`` is TernGrad with an entropy coder, which has the same outcome: it is chosen if the bytes that it saves are
    worth its time on this machine and this link, and left out of the defaults where the link refuses it, as with more
    than 127 ranks. ``drive`` has the fewest bytes of all unbiased methods.

    Methods that keep residuals, such as :class:`ErrorFeedback` and :class:`PowerSGD`, are tried if they are listed, or
    with ``residuals=True``. They send the least and cost accuracy, a few points in some tables: the link's record, its
    ``repr`` and ``gradwire report`` state with the choice how trainings by it ended in ``docs/accuracy.md``, and which
    momentum and learning rate they had. Residuals pass from one candidate to the next: a method without residuals sends
    them once with its own gradient, so that nothing is lost. Other state, such as PowerSGD's factors, restarts with
    each turn.

    Attributes:
        candidates: Specs in order of preference at equal speed. None of the defaults has a residual.
        turns: Number of turns, in each of which all candidates are tried. Those that take up to 1.3 times the least
            time are then tried in as many more, which have up to eight times as many steps as long as that takes no
            more than five seconds: what is measured there decides.
        steps: Number of steps of each candidate in a turn.
        residuals: Try PowerSGD, ACP-SGD, a hundredth of the elements with error feedback, and signs with error
            feedback, too. A candidate listed by the user replaces the one of its class. Those that were measured
            without momentum are tried only if the link knows the optimizer (``optimizer=``) and it has no momentum;
            those that the link's options refuse, such as factors under a reduce-scatter of FSDP2, are left out. The
            record has the reasons.

    Raises:
        HyperparameterError: a field is out of range, or there are fewer than two candidates; a candidate is listed
            twice, is ``auto`` itself, exchanges parameters, has its own momentum, returns a direction, sends one part
            of the gradient a round, acts on the optimizer's steps, exchanges on two levels, or has state of all
            parameters as one vector, or a residual under another name than the others'; or two candidates have state
            of one name in different sizes.
    """

    name: ClassVar[str] = "auto"
    properties: ClassVar[Properties] = Properties(
        summary="The fastest of a list, by trial in the first steps",
        paper="none",
        bit_stable=False,
        bits_per_element=32.0,
    )

    candidates: tuple[str, ...] = CANDIDATES
    turns: int = 4
    steps: int = 3
    residuals: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.candidates, (tuple, list)) and all(isinstance(c, str) for c in self.candidates)
        require(listed, "Auto(candidates=...)", f"a tuple of specs is needed, not {self.candidates!r}")
        chosen = [method(c) for c in self.candidates]
        require(len(chosen) > 1, "Auto(candidates=...)", "at least two are needed to choose from")
        require(len(set(chosen)) == len(chosen), "Auto(candidates=...)", "a method is named twice")
        for one in chosen:
            apart = not_comparable(one) or _not_served(one)
            require(apart is None, "Auto(candidates=...)", f"{one!r} {apart}")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for field in ("turns", "steps"):
            value = getattr(self, field)
            require(is_whole(value, 1), f"Auto({field}=...)", f"at least 1 is needed, not {value!r}")
        require(isinstance(self.residuals, bool), "Auto(residuals=...)", f"a bool is needed, not {self.residuals!r}")
        self._check_sizes([*chosen, *map(method, self.added)])

    @property
    def added(self) -> tuple[str, ...]:
        """The candidates that ``residuals=True`` adds to the listed ones."""
        listed = {type(method(spec)) for spec in self.candidates}
        return tuple(s for s in WITH_RESIDUALS if type(method(s)) not in listed) if self.residuals else ()

    @property
    def dispensable(self) -> tuple[str, ...]:
        """The candidates that are left out, rather than an error raised, where the link refuses them."""
        # Of the defaults that is "coded": "terngrad" has the same outcome.
        return (*self.added, *(["coded"] if self.candidates == CANDIDATES else []))

    def unsuited(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
        apart = [spec for spec in self.added if without_momentum(spec)]
        if optimizer is None:
            return dict.fromkeys(apart, UNKNOWN)
        found = momentum_of(optimizer, parameters)
        if found is None:
            return {}
        setting, value = found
        return dict.fromkeys(apart, f"{MEASURED}, and {type(optimizer).__name__} has {setting}={value!r}")

    def declare(self) -> Traits:
        tried = (*self.candidates, *self.added)
        every = [method(spec).traits for spec in tried]
        return replace(
            super().declare(),
            collectives=(),
            needs_loss_scale=any(traits.needs_loss_scale for traits in every),
            kernels=tuple(dict.fromkeys(name for traits in every for name in traits.kernels)),
            remembers=tuple(dict.fromkeys(kind for traits in every for kind in traits.remembers)),
            own=tuple(dict.fromkeys(kind for traits in every for kind in traits.own)),
            of_ranks=tuple(dict.fromkeys(kind for traits in every for kind in traits.of_ranks)),
            of_first=tuple(dict.fromkeys(kind for traits in every for kind in traits.of_first)),
            subtracts_mean=any(traits.subtracts_mean for traits in every),
            needs_learning_rates=any(traits.needs_learning_rates for traits in every),
            needs_link_cost=any(traits.needs_link_cost for traits in every),
            tries=tried,
            spared=self.added,
            unbiased=False,
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        every = map(method, self.traits.tries)
        return next(m.remembered_numel(kind, parameter) for m in every if kind in m.traits.remembers)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        left_out = self.unsuited(optimizer, parameters)
        told = (method(s).caution(optimizer, parameters) for s in self.traits.tries if s not in left_out)
        return next(filter(None, told), None)

    @staticmethod
    def _check_sizes(chosen: list[Method]) -> None:
        """Check that candidates' states with the same name have the same size."""
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
    """Return a plan of a candidate without residuals that also sends another's residuals."""
    return Delivery(plan, segments)


def not_comparable(one: Method) -> str | None:
    """Return why a method cannot be compared with others by the time of a step alone, or None if it can."""
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
    if one.traits.parts is not None:
        return (
            "sends a part of the gradient a round, the faster the more it leaves out, and what is left out is lost "
            "without error feedback: use ErrorFeedback around it, by name rather than by trial"
        )
    return None


def _not_served(one: Method) -> str | None:
    """Return why a link that tries several methods cannot serve one of them, or None if it can."""
    if one.traits.needs_optimizer:
        return "acts on the optimizer's steps, which the other candidates leave alone: name it by itself"
    if one.traits.sharded:
        return (
            "exchanges among the ranks of a node and between nodes, for which a link that tries others has no "
            "connections: name it by itself"
        )
    if one.traits.waiting in one.traits.remembers and one.traits.waiting != Traits.waiting:
        return (
            f"keeps what it has not sent as {one.traits.waiting!r}, which no other candidate would send: use "
            "ErrorFeedback around its operator, such as ErrorFeedback(TopK(density=0.05))"
        )
    return None
