"""Base of methods that exchange the changes of several optimizer steps instead of gradients, and local SGD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Method, Properties, cast_of, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter
from gradwire.exchange.steps_locally import GLOBAL
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.wrappers.wrapper import Around


class LocalStepsMethod(Around):
    """Base of methods whose workers step locally, and exchange differences every few steps.

    A worker's *difference* is the global parameters minus its own, like a gradient: the inner method exchanges it, and
    :meth:`step_` changes both by its mean. Not a dataclass, so that each method's own fields keep their order in its
    spec.
    """

    wrapped_field: ClassVar[str] = "inner"

    inner: Method
    every: int

    fragments: int = 1
    """Number of parts of the model, which are exchanged in turn."""
    delay: int = 0
    """Number of steps from the start of an exchange to its effect."""
    order: str = "sequential"
    """Assignment of elements to fragments."""
    keeps_own: ClassVar[bool] = False
    """True if workers' own parameters differ from the global ones after an exchange."""

    remembers_beside: ClassVar[tuple[str, ...]] = (GLOBAL,)
    """Names of the vectors of state, as long as the parameters, the same on all ranks."""

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            direction=False,
            owns_momentum=False,
            needs_loss_scale=True,
            # State of the inner method, and the vectors of this one.
            remembers=(*self.inner.traits.remembers, *self.remembers_beside),
            # Number of optimizer steps between exchanges.
            local_steps=self.every,
            unbiased=self.inner.traits.unbiased,
            unbiased_note="the mean of parameters" if self.inner.traits.unbiased else self.inner.traits.unbiased_note,
        )

    @property
    def wrapped(self) -> Method:
        """Inner method."""
        return self.inner

    def remembered_numel(self, kind: str, parameter: Any) -> int:
        return parameter.numel if kind in self.remembers_beside else super().remembered_numel(kind, parameter)

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        return list(dict.fromkeys((parameter, *self.inner.kept_as(parameter))))

    def check_inner(self) -> None:
        """Check the common fields.

        Raises:
            HyperparameterError: ``every`` is out of range, or the inner method does not exchange a mean.
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
        """True if parameters are exchanged instead of differences, which in float32 rounds the mean less."""
        return cast_of(self.inner) == torch.float32

    @abstractmethod
    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        """Step a worker's own parameters and the global ones.

        All vectors are float32 and have the same length.

        Args:
            own: The worker's own parameters, changed in place.
            held: The global parameters, changed in place, the same on all workers.
            mean: The global parameters minus the mean difference, which is the mean of the workers' own parameters
                except for the inner method's error; the same on all workers.
            velocity: The outer momentum, changed in place; None if the method has none.
            workers: Number of workers.
        """

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        # Workers may use any optimizer.
        return

    def wait_of(self, numel: int | None = None) -> float | None:
        # The optimizer's momentum acts before the exchange.
        return None

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        return None

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.inner.plan(setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        # Warm-up exchanges gradients, and what the inner method remembers is to be of differences alone.
        if self.inner.traits.remembers:
            return replace(setting, collective="two_shot").float32_plan()
        return self.inner.dense_plan(setting)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalStepsMethod):
    r"""Local SGD: workers step locally and average their parameters every ``every`` steps.

    With x the global parameters, the same on all workers, and x_i worker i's after ``every`` optimizer steps from x::

        d_i = x - x_i        x <- x - (1 / N) sum_i C(d_i)        x_i <- x

    C is the inner method, which may have a residual: with ``ErrorFeedback(...)`` the part left out is sent with the
    next difference. With ``FP32()`` the parameters themselves are averaged, which rounds less. Between exchanges
    nothing is sent. Any optimizer may be used; its state is not exchanged.

    *Post-local* SGD exchanges gradients in the first steps; set their number with the option ``warmup_steps``.

    An average of diverged parameters is not a step of SGD: if workers' data differ, they converge to a point near the
    minimum of their mean loss, which is the farther off the more and the larger the local steps are.

    Args:
        inner: Method that exchanges the differences.
        every: Number of optimizer steps between exchanges.

    Raises:
        HyperparameterError: a field is out of range.

    Memory: the global parameters, 4 bytes an element, and the state of the inner method.

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

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        held.copy_(mean)
        own.copy_(held)
