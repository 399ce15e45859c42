"""Methods that exchange what several optimizer steps have changed, in the place of gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.local_steps import GLOBAL
from gradwire.exchange.method import Method, Properties, cast_of, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.wrappers.wrapper import Around


class LocalStepsMethod(Around):
    """A method whose workers step by themselves, and exchange how far they came every so many steps.

    A worker's *difference* is the global parameters less its own, like a gradient: the inner method exchanges it, and
    :meth:`step_` changes both by its mean. No dataclass, so that each method's own fields keep their order in its spec.
    """

    wrapped_field: ClassVar[str] = "inner"

    inner: Method
    every: int

    fragments: int = 1
    """Parts of the model that are exchanged one after the other."""
    delay: int = 0
    """Steps from the beginning of an exchange to its effect."""
    order: str = "sequential"
    """Which elements a fragment has."""
    keeps_own: ClassVar[bool] = False
    """Whether workers' own parameters stay apart from the global ones after an exchange."""

    remembers_beside: ClassVar[tuple[str, ...]] = (GLOBAL,)
    """The vectors that it keeps, as long as the parameters, the same on all ranks."""

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            direction=False,
            owns_momentum=False,
            needs_loss_scale=True,
            # What the inner method remembers, and vectors beside it.
            remembers=(*self.inner.traits.remembers, *self.remembers_beside),
            # Optimizer steps from one exchange to the next.
            local_steps=self.every,
        )

    @property
    def wrapped(self) -> Method:
        """The inner method."""
        return self.inner

    def remembered_numel(self, kind: str, parameter: Any) -> int:
        return parameter.numel if kind in self.remembers_beside else self.inner.remembered_numel(kind, parameter)

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        return list(dict.fromkeys((parameter, *self.inner.kept_as(parameter))))

    def check_inner(self) -> None:
        """Check the fields that all have.

        Raises:
            HyperparameterError: ``every`` is out of range, or the inner method is none that exchanges a mean.
        """
        owner, inner = type(self).__name__, self.inner
        require(is_whole(self.every, 1), owner, f"every is at least 1 step, not {self.every!r}")
        require(
            isinstance(inner, Method)
            and bool(inner.traits.collectives)
            and not (inner.traits.local_steps or inner.traits.direction),
            owner,
            f"inner is a method whose outcome is a mean, such as FP32() or EDEN(bits=4), not {inner!r}",
        )
        require(
            not inner.traits.needs_optimizer, owner, f"{inner!r} acts on an optimizer's steps: use it without {owner}"
        )

    @property
    def exchanges_parameters(self) -> bool:
        """Whether parameters themselves are exchanged: in float32 their mean is that of differences, rounded less."""
        return cast_of(self.inner) == torch.float32

    @abstractmethod
    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        """Step a worker's own parameters, and the global ones.

        All are float32 of one length.

        Args:
            own: The worker's own, changed in place.
            held: The global ones, changed in place, the same on all workers.
            mean: The global parameters less the mean difference: what the workers' own ones are on average, but for
                what the inner method errs by; the same on all workers.
            velocity: The outer momentum, changed in place; None where the method has none.
            workers: How many there are.
        """

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        # Any optimizer steps a worker's own parameters.
        return

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        return None

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.inner.plan(setting)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalStepsMethod):
    r"""Local SGD: workers step by themselves and average their parameters every ``every`` steps.

    With x the global parameters, the same on all workers, and x_i worker i's after ``every`` optimizer steps from x::

        d_i = x - x_i        x <- x - (1 / N) sum_i C(d_i)        x_i <- x

    C is the inner method, which may remember what it left out: ``ErrorFeedback(...)`` inside sends it with the next
    difference. With ``FP32()`` the parameters themselves are averaged, which rounds less. Between exchanges nothing
    travels. The optimizer may be any; its state stays the worker's own.

    *Post-local* SGD begins with gradients exchanged at every step: the option ``warmup_steps`` says for how many.

    Averages of parameters that have gone different ways are no step of SGD: on unlike data the workers tend to a point
    beside the minimum of their mean loss, the farther off the more steps and the larger they are.

    Args:
        inner: The method by which differences are exchanged.
        every: Optimizer steps from one exchange to the next.

    Raises:
        HyperparameterError: a field is out of range.

    Memory: the global parameters, 4 bytes an element, beside what the inner method keeps.

    Reference: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; T. Lin et al., "Don't Use
    Large Mini-Batches, Use Local SGD", ICLR 2020, for post-local SGD.

    Example:
        >>> import gradwire as gw
        >>> gw.method("LocalSGD(every=8, inner=EDEN(bits=4))").traits.local_steps
        8
    """

    inner: Method = field(default_factory=FP32, kw_only=False)
    every: int = 8

    name: ClassVar[str] = "local_sgd"
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves; their parameters are averaged every few steps by any method",
        paper="Stich, ICLR 2019",
        bit_stable=False,
        bits_per_element=32.0,
        state="the global parameters",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        self.check_inner()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased=True,
            unbiased_note="the mean of parameters",
        )

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        held.copy_(mean)
        own.copy_(held)
