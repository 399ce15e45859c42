"""DQGD, unbiased quantisation without state, and DIANA, compressed differences to a learned reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import InheritedBits, Method, Properties, is_number, operator_of, require
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.optimizers import not_stepped
from gradwire.methods.feedback.shifts import SHIFTS, ShiftAlgorithm, memory_pair, shift_dtype
from gradwire.methods.levels.qsgd import QSGDinf
from gradwire.methods.wrappers.wrapper import WrappedPlan, Wrapper, pieces
from gradwire.optim import L1, Box, Prox


def _check_unbiased(owner: str, inner: Method) -> None:
    require(
        operator_of(inner) is not None and inner.traits.unbiased,
        owner,
        f"compressor is an unbiased operator on one vector, such as QSGDinf(levels=1), not {inner!r}",
    )


def _block_quantisation() -> QSGDinf:
    return QSGDinf(levels=1, block_size=64)


@dataclass(frozen=True, kw_only=True)
class DQGD(Wrapper):
    r"""DQGD: every worker sends an unbiased quantisation of its gradient, without any state.

    mean = (1 / N) sum_i Q(g_i). DIANA's authors compare with it under this name: with heterogeneous workers it stops at
    a plateau of about 2 gamma omega mean_i |grad f_i(x*)|^2 / (mu N), even with exact gradients.

    Args:
        compressor: An unbiased operator Q. The default is block quantisation with p = inf, as in DIANA's paper;
            ``QSGD(levels=1)`` is p = 2.

    Raises:
        HyperparameterError: ``compressor`` is biased, or not an operator on one vector.

    Reference: S. Khirirat, H. R. Feyzmahdavian, M. Johansson, "Distributed Learning with Compressed Gradients", 2018.

    Example:
        >>> import gradwire as gw
        >>> gw.method("DQGD(compressor=QSGD(levels=1))").compressor.levels
        1
    """

    compressor: Method = field(default_factory=_block_quantisation, kw_only=False)

    name: ClassVar[str] = "dqgd"
    properties: ClassVar[InheritedBits] = InheritedBits(
        "compressor",
        Properties(
            summary="An unbiased quantisation of each gradient, no memory",
            paper="Khirirat et al., 2018",
            bit_stable=True,
            bits_per_element=2 * (1.6 + 32 / 64),
            stream="the compressor's",
        ),
    )

    def __post_init__(self) -> None:
        _check_unbiased("DQGD", self.compressor)

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            on_device=self.compressor.traits.on_device,
            unbiased=True,
            omega_formula=self.compressor.traits.omega_formula,
        )

    def omega_of(self, numel: int | None = None) -> float | None:
        return self.compressor.omega_of(numel)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.compressor.plan(setting)


@dataclass(frozen=True, kw_only=True)
class DIANA(ShiftAlgorithm, Wrapper):
    r"""DIANA: each worker sends the quantised difference of its gradient to a learned reference.

    With h_i worker i's shift, h their mean, which every worker keeps, and v a momentum, all zero at first::

        D_i = Q(g_i - h_i)                 h_i <- h_i + alpha D_i
        D   = (1 / N) sum_i D_i            g   = h + D (unbiased)        h <- h + alpha D
        v   <- momentum v + g              outcome: v

    The quantised vectors go to zero. So with exact gradients the method converges linearly to the optimum, even with
    heterogeneous workers, where plain quantisation stops at a plateau. Since g tends to the gradient of the mean, a
    proximal step finds the solution of a regularised problem (:class:`gradwire.ProximalSGD`). With strong minibatch
    noise the gain is small: g_i - h_i stays large.

    Shifts are stored by parameter, without the loss scale under automatic mixed precision; h_i is state of this rank, h
    and v are the same on all. A round with a non-finite value does not change them. By default they are float64: every
    worker rounds its own h_i and all round h, and in float32 the difference of h to the mean of h_i, 1e-6 after some
    thousand rounds, is in every outcome (logistic regression on mushrooms then ends at 3e-9 in squared distance,
    instead of 3e-14). With another number of workers after a checkpoint, shifts restart from zero, since h would not be
    the mean of the remaining h_i.

    Args:
        compressor: An unbiased operator Q.
        alpha: Learning rate of the shifts; None: 1 / (1 + omega), the fastest for a constant gradient, with omega the
            compressor's variance constant. Above 2 / (1 + omega) shifts may diverge.
        momentum: Momentum of v, at least 0 and below 1; if above 0 the optimizer must have none. It is not applied to
            parameters sent in float32, nor in warm-up rounds.
        shifts: "float64" or "float32": half the memory, enough where minibatches are noisy.
        prox: A proximal operator, ``L1(strength=...)`` or ``Box(low=..., high=...)``, applied with the learning rate
            after each step of the optimizer, x <- prox(x - gamma v). Pass the optimizer to ``attach(...,
            optimizer=...)``: it must be a ``torch.optim.SGD`` of all exchanged parameters. A parameter without a
            gradient is not changed. :class:`gradwire.ProximalSGD` applies its own operator, in a simulation, too.

    Raises:
        HyperparameterError: ``compressor`` is biased or not an operator on one vector; ``alpha`` is not above 0 and at
            most 1, is above 2 / (1 + omega), or is None although omega is not known; or ``momentum``, ``shifts`` or
            ``prox`` is invalid.
        IncompatibleError: when attached with ``prox``, if the optimizer is not a ``torch.optim.SGD``, has
            ``maximize=True`` or lacks a parameter.

    Reference: K. Mishchenko, E. Gorbunov, M. Takac, P. Richtarik, "Distributed Learning with Compressed Gradient
    Differences", 2019, algorithm 1. Theorem 2 requires alpha strictly below 1 / (1 + omega), the default; a slightly
    smaller alpha has the paper's guarantee.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(2, 640, generator=torch.Generator().manual_seed(0))
        >>> link = gw.SimulatedLink([("w", torch.empty(640))], "diana", 2, min_numel=0)
        >>> errors = [float((link.reduce_(g.clone()) - g.mean(0)).norm()) for _ in range(200)]
        >>> errors[-1] < 1e-4 * errors[0]
        True
    """

    compressor: Method = field(default_factory=_block_quantisation, kw_only=False)
    alpha: float | None = None
    momentum: float = 0.0
    shifts: str = "float64"
    prox: Prox | None = None

    name: ClassVar[str] = "diana"
    properties: ClassVar[InheritedBits] = InheritedBits(
        "compressor",
        Properties(
            summary="Quantised differences to a learned reference: the optimum itself, with heterogeneous workers",
            paper="Mishchenko et al., DIANA, 2019",
            bit_stable=True,
            bits_per_element=2 * (1.6 + 32 / 64),
            state="a shift per parameter and rank, their mean, a momentum",
            state_bytes_per_element=16.0,
            stream="the compressor's",
        ),
    )

    def __post_init__(self) -> None:
        _check_unbiased("DIANA", self.compressor)
        omega = self.compressor.omega
        given = self.prox is None or isinstance(self.prox, L1 | Box)
        require(given, "DIANA", f"prox is None, L1(strength=...) or Box(low=..., high=...), not {self.prox!r}")
        shift_dtype("DIANA", self.shifts)
        require(
            self.alpha is not None or omega is not None,
            "DIANA",
            f"the variance constant of {self.compressor!r} is not known, so alpha must be given; blocks have one",
        )
        for name, value in (("alpha", self.alpha), ("momentum", self.momentum)):
            if value is not None:
                require(is_number(value), "DIANA", f"{name} is a finite number, not {value!r}")
                low = value > 0 if name == "alpha" else value >= 0
                high = value <= 1 if name == "alpha" else value < 1
                require(low and high, "DIANA", f"{name} is out of range: {value!r}")
                object.__setattr__(self, name, float(value))
        require(
            self.alpha is None or omega is None or self.alpha <= 2 / (1 + omega),
            "DIANA",
            f"alpha={self.alpha} is above 2 / (1 + omega) = {2 / (1 + (omega or 0)):.4g}: shifts diverge, use None",
        )

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            owns_momentum=self.momentum > 0,
            on_device=self.compressor.traits.on_device,
            remembers=(*SHIFTS, "velocity"),
            own=("shift",),
            of_ranks=SHIFTS,
            needs_optimizer=self.prox is not None,
            # v contains the gradients of earlier rounds.
            unbiased=not self.momentum,
            unbiased_note="no; before the momentum" if self.momentum else None,
            omega_formula="the compressor's, of g - h",
        )

    @property
    def rate(self) -> float:
        """Learning rate of the shifts, given or computed."""
        if self.alpha is not None:
            return self.alpha
        if self.compressor.omega is None:
            raise HyperparameterError("DIANA: alpha is needed")
        return 1 / (1 + self.compressor.omega)

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        if self.prox is None:
            return
        if type(optimizer) is not torch.optim.SGD:
            given = "no optimizer" if optimizer is None else type(optimizer).__name__
            raise IncompatibleError(
                f"DIANA(prox=...) steps after each step of torch.optim.SGD, and was given {given}: pass "
                "optimizer=... to attach, or leave prox to gradwire.ProximalSGD"
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise IncompatibleError("DIANA(prox=...) minimises, and the optimizer that was given has maximize=True")
        missed = not_stepped(optimizer, parameters)
        if missed:
            raise IncompatibleError(
                f"DIANA(prox=...) steps after the optimizer, and the one that was given does not step parameter "
                f"{missed[0]!r} ({len(missed)} of {len(parameters)} are not its own): pass the optimizer of all of them"
            )

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        operator = self.prox
        if operator is None:
            return None
        ours = {id(p) for p in parameters.values()}

        def apply(stepped: torch.optim.Optimizer, *_: object) -> None:
            with torch.no_grad():
                for group in stepped.param_groups:
                    for p in (p for p in group["params"] if id(p) in ours and p.grad is not None):
                        operator.apply_(p, float(group["lr"]))

        hook: Callable[[], None] = optimizer.register_step_post_hook(apply).remove
        return hook

    def plan(self, setting: PlanSetting) -> BucketPlan:
        plan = self.differences(setting, self.rate)
        if not self.momentum:
            return plan
        return _HeavyBall(plan, setting.segments, self.momentum, shift_dtype("DIANA", self.shifts))


class _HeavyBall(WrappedPlan):
    """Plan that applies a momentum, the same on all ranks, to an inner plan's outcome."""

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], momentum: float, dtype: torch.dtype) -> None:
        super().__init__(inner, segments)
        self._momentum, self._dtype = momentum, dtype

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        before, velocity = memory_pair(context, "velocity", self.segments, self._dtype, replicated=True)
        scale = context.loss_scale
        for a, b in pieces(self.runs[context.chunk], flat):
            torch.mul(before[a:b], self._momentum, out=velocity[a:b])
            velocity[a:b].add_(flat[a:b].to(self._dtype), alpha=1 / scale)
            flat[a:b] = velocity[a:b] * scale
        return outcome
