"""Deep Gradient Compression: accumulated local momenta, and each worker's gradient clipped by its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.method import Method, Properties, is_number, is_whole, require
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable
from gradwire.methods.feedback.error_feedback import Feedback
from gradwire.methods.feedback.local_momentum import LocalMomentum, checked_momentum
from gradwire.methods.sparse.top_k import TopK, check_density
from gradwire.methods.wrappers.scheduled import ScheduledPlan
from gradwire.methods.wrappers.wrapper import WrappedPlan, pieces

if TYPE_CHECKING:
    from gradwire.kernels import Moments


class ClippedGradient(WrappedPlan):
    """Plan that exchanges each worker's gradient g_i clipped to a norm, ``g_i min(1, limit / |g_i|)``.

    The bucket has all gradients of a step, including those sent in float32. Its norm is added up over parameters from
    exact sums (:class:`gradwire.kernels.Moments`), so that it does not depend on threads or backends. A gradient that
    is not finite is not changed.

    Args:
        limit: Largest norm, in the unit of the gradient before the loss was scaled.
    """

    def __init__(self, inner: BucketPlan, setting: PlanSetting, limit: float) -> None:
        super().__init__(inner, setting.segments)
        whole = [s for s in setting.segments if s.numel]
        numel = [s.numel for s in whole]
        self._kernels, self._limit = setting.kernels, limit
        self._table = SegmentTable([s.offset for s in whole], numel, [0] * len(whole), [(0, 0)] * len(whole))

    def before(self, context: Context, flat: torch.Tensor) -> None:
        moments: Moments = self._kernels.moments(flat, self._table)
        norm = math.sqrt(math.fsum(moments.norm.square().tolist()))
        if norm > self._limit * context.loss_scale and bool(torch.isfinite(moments.max_abs).all()):
            for a, b in pieces([(0, flat.numel())]):
                flat[a:b].mul_(self._limit * context.loss_scale / norm)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self.before(context, gradient)
        self.inner.target_(context, gradient)


@dataclass(frozen=True, kw_only=True)
class DGC(Method):
    r"""Deep Gradient Compression: the largest elements of each worker's accumulated momentum.

    With g_i worker i's gradient, u_i its momentum and v_i its accumulated vector, both zero at first, of d elements
    each, and k = max(1, floor(density d))::

        u_i <- momentum u_i + g_i
        v_i <- v_i + u_i                       v_i + g_i + momentum u_i  with ``nesterov``
        x_i  = TopK_k(v_i)                     mean = (1 / N) sum_i x_i
        v_i <- v_i - x_i                       u_i <- 0  where x_i is not 0

    Momentum is applied before the accumulation (momentum correction), so that elements that are sent late have the
    momentum that they would have had; the optimizer has none. It is applied to all parameters, including those sent in
    float32. When an element is sent its momentum is cleared (momentum factor masking), so that stale momentum has no
    further effect; rounds with density 1, in which nothing is stale, clear none. Without masking, this is
    :class:`ErrorFeedback` with a momentum around :class:`TopK`.

    The k largest are found exactly, which is about as fast as reading the vector; the paper estimates a threshold from
    a sample. The paper's program compresses parameters with two dimensions or more; here ``min_numel`` and ``exclude``
    decide which parameters are sent in float32.

    **Clipping.** With ``clip_norm`` = tau each worker scales its whole gradient to a norm of tau / sqrt(N) at most,
    before anything is added. Gradients of N workers with independent noise then add up to a norm of about tau. The norm
    is over all parameters, so the exchange begins when all gradients are computed. :class:`Hierarchical`, where a rank
    has only a shard of the gradient, refuses it.

    **Warm-up.** With ``warmup_rounds`` = R above 0, the first R rounds have the first of ``warmup_densities``, the next
    R the second, and so on; ``density`` follows. The paper takes an epoch for each. These include rounds in float32 at
    the start (``warmup_steps`` of :func:`attach`), which clear no momentum and accumulate nothing.

    **Weight decay** of the optimizer acts on the outcome, without momentum.

    **Memory.** u_i and v_i are float32, as long as the parameters, on every rank, and without the loss scale under
    automatic mixed precision. A round with a non-finite value does not change them.

    Args:
        density: Share k/d of each parameter that is sent, above 0 to 1; the paper: 0.001.
        momentum: Momentum, at least 0 and below 1; if above 0 the optimizer must have none.
        nesterov: True for Nesterov momentum, as in ``torch.optim.SGD``.
        factor_masking: True to clear the momentum of elements that are sent.
        clip_norm: tau, the largest norm that training without compression would use, in the gradient's unit; None: no
            clipping.
        warmup_densities: Densities of the warm-up stages, each above 0 to 1.
        warmup_rounds: Rounds of a stage; 0: no warm-up.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: as :class:`TopK`.

    Reference: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training", ICLR 2018, algorithms 1 to 4.

    Example:
        >>> import torch, gradwire as gw
        >>> link = gw.SimulatedLink([("w", torch.empty(4))], gw.DGC(density=0.25, momentum=0.5), 1, min_numel=0)
        >>> for _ in range(3):
        ...     print(link.reduce_(torch.tensor([[4.0, 3.0, 1.0, 0.0]])))
        tensor([4., 0., 0., 0.])
        tensor([0.0000, 7.5000, 0.0000, 0.0000])
        tensor([10.,  0.,  0.,  0.])
    """

    density: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    factor_masking: bool = True
    clip_norm: float | None = None
    warmup_densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    warmup_rounds: int = 0

    name: ClassVar[str] = "dgc"
    properties: ClassVar[Properties] = Properties(
        summary="The largest elements of each worker's accumulated momentum, which is cleared where it is sent",
        paper="Lin et al., Deep Gradient Compression, ICLR 2018",
        bit_stable=True,
        bits_per_element=2 * 0.05 * (32 + 5.8),
        state="a momentum and an accumulated vector per parameter and rank",
        state_bytes_per_element=8.0,
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("DGC", self.density))
        object.__setattr__(self, "momentum", checked_momentum("DGC", self.momentum))
        for name in ("nesterov", "factor_masking"):
            value = getattr(self, name)
            require(isinstance(value, bool), "DGC", f"{name} is True or False, not {value!r}")
        limit, stages, rounds = self.clip_norm, self.warmup_densities, self.warmup_rounds
        require(
            limit is None or is_number(limit, above=0), "DGC", f"clip_norm is a norm above 0, or None, not {limit!r}"
        )
        object.__setattr__(self, "clip_norm", None if limit is None else float(limit))
        require(isinstance(stages, tuple | list), "DGC", f"warmup_densities is a tuple of densities, not {stages!r}")
        object.__setattr__(self, "warmup_densities", tuple(check_density("DGC", stage) for stage in stages))
        require(is_whole(rounds, 0), "DGC", f"warmup_rounds is a number of rounds, at least 0, not {rounds!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=self.operator.traits.collectives,
            # Clipping needs the norm of all parameters.
            whole_step=self.clip_norm is not None,
            clips_gradient=self.clip_norm is not None,
            owns_momentum=self.momentum > 0,
            needs_loss_scale=True,
            kernels=self.operator.traits.kernels
            if self.clip_norm is None
            else (*self.operator.traits.kernels, "moments"),
            remembers=(kept := ("accumulated", "momentum") if self.momentum else ("accumulated",)),
            own=kept,
            waiting="accumulated",
            unbiased=False,
            unbiased_note="no; without masking, nothing is lost",
        )

    @property
    def operator(self) -> TopK:
        """Operator of each worker after the warm-up."""
        return TopK(density=self.density)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        stages = [*(self.warmup_densities if self.warmup_rounds else ()), self.density]
        plans = [self._stage(setting, density) for density in stages]
        first = [i * self.warmup_rounds for i in range(len(plans))]
        return self._clipped(plans[0] if len(plans) == 1 else ScheduledPlan(plans, first), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self._clipped(self._with_momentum(self.operator.dense_plan(setting), setting, masked=False), setting)

    def _stage(self, setting: PlanSetting, density: float) -> BucketPlan:
        sent = Feedback(SectionPlan(TopK(density=density), setting), setting.segments, "accumulated")
        return self._with_momentum(sent, setting, masked=self.factor_masking and density < 1)

    def _with_momentum(self, plan: BucketPlan, setting: PlanSetting, *, masked: bool) -> BucketPlan:
        if not self.momentum:
            return plan
        kind = MaskedMomentum if masked else LocalMomentum
        return kind(plan, setting.segments, self.momentum, nesterov=self.nesterov)

    def _clipped(self, plan: BucketPlan, setting: PlanSetting) -> BucketPlan:
        if self.clip_norm is None:
            return plan
        return ClippedGradient(plan, setting, self.clip_norm / math.sqrt(setting.world_size))


class MaskedMomentum(LocalMomentum):
    """Momentum before compression that is cleared where this worker sent a non-zero value."""

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        if outcome.sent is None:
            raise TypeError("an inner plan did not say what it sent")
        staged, runs = context.memory.stage("momentum", self._remembered), self.runs[context.chunk]
        sent = context.workspace.bucket.get("sent elements", 4 * flat.numel()).view(torch.float32)
        for a, b in runs:
            sent[a:b] = 0
        outcome.sent(sent, 1.0)
        for a, b in pieces(runs):
            staged[a:b].masked_fill_(sent[a:b] != 0, 0)
        return outcome
