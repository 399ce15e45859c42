"""EF21: contracted differences to each worker's estimate of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.method import InheritedBits, Method, Properties, cast_of, require
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Float32, PlanSetting, SectionPlan
from gradwire.exchange.protocols.memory import WORKERS
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.feedback.local_momentum import LocalMomentum, checked_momentum
from gradwire.methods.feedback.shifts import SHIFTS, ShiftAlgorithm, memory_pair, shift_dtype
from gradwire.methods.signs.ef_signsgd import ScaledSign
from gradwire.methods.wrappers.wrapper import WrappedPlan, Wrapper, pieces

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class EF21(ShiftAlgorithm, Wrapper):
    r"""EF21: each worker sends a contraction of its gradient's difference to an estimate of it.

    With grad_i worker i's gradient, g_i its estimate and g the mean of all g_i, which every worker keeps, zero at
    first, and C a contraction::

        c_i = C(grad_i - g_i)              g_i <- g_i + c_i
        g   <- g + (1 / N) sum_i c_i       outcome: g

    This is :class:`DIANA` with an operator that may be biased, and with shifts that change by everything that is sent.
    The sent vectors go to zero as gradients converge, so with exact gradients and a constant step size the method
    converges to the optimum, even with heterogeneous workers. There are no bursts, as from the residual of
    :class:`ErrorFeedback`: the outcome is a delayed mean of gradients.

    **Bound.** If |C(x) - x|^2 <= (1 - delta) |x|^2, let theta = 1 - sqrt(1 - delta) and beta = (1 - delta) / theta. Let
    G be the mean over workers of |g_i - grad_i|^2 after a round, and m the mean of the squared distance by which
    gradients move until the next one. After the next round, G is at most (1 - theta) G + beta m.

    **Start.** With zeros at first, g_i is C(grad_i) after the first round, as in the paper. In warm-up rounds, where
    gradients are sent uncompressed, g_i becomes grad_i: with ``warmup_steps=1`` the error G starts from zero.

    **Momentum.** The noise of minibatches does not average out in g_i. With ``momentum`` (EF21-SGDM) grad_i is replaced
    by an average of each worker's gradients::

        v_i <- momentum v_i + (1 - momentum) grad_i

    The paper's eta is 1 - momentum. Here v_i is zero at first, so the first 1 / (1 - momentum) outcomes are shorter;
    the paper starts from a gradient. The momentum is applied to all parameters, including those sent in float32, and in
    warm-up rounds.

    **Memory.** g_i and g are stored by parameter, without the loss scale under automatic mixed precision; g_i is state
    of this rank, g is the same on all. A round with a non-finite value does not change them. With another number of
    workers after a checkpoint they restart from zero, since g would not be the mean of the remaining g_i.

    Args:
        compressor: The contraction C: ``fp32``, or an operator on one vector, :class:`Rotated` around one, or
            :class:`MultiScale`, with a known ``delta`` or an error in each element below the largest magnitude on any
            worker.
        momentum: Momentum of v_i, at least 0 and below 1; if above 0 the optimizer must have none.
        shifts: Type of g_i and g, "float64" or "float32", as for :class:`DIANA`.

    Raises:
        HyperparameterError: ``compressor`` is not an operator on one vector or not a contraction, or the backend sums
            what it sends in sixteen bits; ``momentum`` is out of range, or ``shifts`` is neither "float64" nor
            "float32".

    Reference: P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically
    Faster Error Feedback", NeurIPS 2021, algorithm 2 and lemma 3; I. Fatkhullin, A. Tyurin, P. Richtarik, "Momentum
    Provably Improves Error Feedback!", NeurIPS 2023, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(2, 640, generator=torch.Generator().manual_seed(0))
        >>> link = gw.SimulatedLink([("w", torch.empty(640))], "ef21", 2, min_numel=0)
        >>> errors = [float((link.reduce_(g.clone()) - g.mean(0)).norm()) for _ in range(100)]
        >>> errors[-1] < 0.01 * errors[0]
        True
    """

    compressor: Method = field(default_factory=lambda: ScaledSign(block_size=64), kw_only=False)
    momentum: float = 0.0
    shifts: str = "float64"

    name: ClassVar[str] = "ef21"
    delta_formula: ClassVar[str | None] = "the compressor's, of grad - g"
    properties: ClassVar[InheritedBits] = InheritedBits(
        "compressor",
        Properties(
            summary="Contracted differences to each worker's estimate of its gradient, biased operators included",
            paper="Richtarik et al., EF21, NeurIPS 2021",
            bit_stable=True,
            bits_per_element=2 * (1 + 32 / 64),
            state="an estimate per parameter and rank, their mean, a momentum",
            state_bytes_per_element=16.0,
            stream="the compressor's",
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", checked_momentum("EF21", self.momentum))
        shift_dtype("EF21", self.shifts)
        if cast_of(self.compressor) != torch.float32:
            check_contraction("EF21", self.compressor, "so its estimates may grow without bound", "no estimate")
        require(
            not self.compressor.traits.rounds_sums,
            "EF21",
            f"{self.compressor!r} is summed by the backend in sixteen bits, and the mean of the estimates drifts by "
            "what that loses: use values=FP32()",
        )

    def declare(self) -> Traits:
        traits, inner = super().declare(), self.compressor.traits
        return replace(
            traits,
            owns_momentum=self.momentum > 0,
            on_device=self.compressor.traits.on_device,
            # The estimates, the momentum if there is one, and the compressor's state.
            remembers=(*SHIFTS, *(momentum := ("momentum",) if self.momentum else ()), *inner.remembers),
            own=("shift", *momentum, *inner.own),
            of_ranks=SHIFTS,
            unbiased=False,
            unbiased_note="no; exact where gradients settle",
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self._after_momentum(self.differences(setting, 1.0), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        travels_whole = self.compressor.cast_dtype == torch.float32
        # Float32 sums have the same bits by every protocol, but the compressor's may be the backend's sum.
        sections = SectionPlan(Float32(), replace(setting, collective="two_shot"))
        whole = self.compressor.plan(setting) if travels_whole else sections
        return self._after_momentum(_Estimates(whole, setting.segments, shift_dtype("EF21", self.shifts)), setting)

    def _after_momentum(self, plan: BucketPlan, setting: PlanSetting) -> BucketPlan:
        if not self.momentum:
            return plan
        return LocalMomentum(plan, setting.segments, self.momentum, dampening=self.momentum)


class _Estimates(WrappedPlan):
    """Plan that stores uncompressed vectors as estimates."""

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        super().__init__(inner, segments)
        self._dtype = dtype

    def before(self, context: Context, flat: torch.Tensor) -> None:
        context.memory.stage_value(WORKERS, torch.tensor(context.world_size, device="cpu"))
        self._keep(context, "shift", flat, self.all_runs, replicated=False)

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        self._keep(context, "mean_shift", flat, self.runs[context.chunk], replicated=True)
        return outcome

    def _keep(
        self, context: Context, kind: str, flat: torch.Tensor, runs: Sequence[tuple[int, int]], *, replicated: bool
    ) -> None:
        _, staged = memory_pair(context, kind, self.segments, self._dtype, replicated=replicated)
        for a, b in pieces(runs, flat):
            torch.div(flat[a:b].to(self._dtype), context.loss_scale, out=staged[a:b])
