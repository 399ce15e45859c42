"""Error feedback: the part that a compressor leaves out is added to the next gradient."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import InheritedBits, Method, Properties, is_number, require
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.feedback.local_momentum import LocalMomentum, checked_momentum
from gradwire.methods.feedback.waiting import expected_wait, longest, momentum_beside_residual, wait_over_cycle
from gradwire.methods.levels.qsgd import QSGDinf
from gradwire.methods.wrappers.wrapper import WrappedPlan, Wrapper, as_sent, pieces


class ResidualAlgorithm(Method):
    """Base of algorithms with a residual, and with a momentum of each worker before it if the field is not 0.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    momentum: float

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            owns_momentum=self.momentum > 0,
            needs_loss_scale=True,
            remembers=(kept := ("residual", "momentum") if self.momentum else ("residual",)),
            own=kept,
        )

    def fed_back(self, inner: BucketPlan, setting: PlanSetting, decay: float = 1.0) -> BucketPlan:
        """Return a plan that feeds back the part that ``inner`` leaves out, or a share of it."""
        return self._after_momentum(Feedback(inner, setting.segments, decay=decay), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return self._after_momentum(super().dense_plan(setting), setting)

    def _after_momentum(self, plan: BucketPlan, setting: PlanSetting) -> BucketPlan:
        return LocalMomentum(plan, setting.segments, self.momentum) if self.momentum else plan


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(ResidualAlgorithm, Wrapper):
    r"""Error feedback around any compressor C that is a contraction.

    With g_i worker i's gradient, e_i its residual and m_i its momentum, zero at first::

        m_i <- momentum m_i + g_i
        p_i = m_i + e_i        mean = (1 / N) sum_i C(p_i)        e_i <- p_i - C(p_i)

    Without ``momentum``, m_i is the gradient. Nothing is lost, only delayed: the sum over rounds of a worker's
    contributions is the sum of its m_i, minus e_i. Residuals are stored in units of the gradient, so that a change of
    the learning rate needs no rescaling, and without the loss scale under automatic mixed precision. They are state of
    this rank, and a round with a non-finite value does not change them.

    **Momentum.** The part left out is applied later, in bursts. An optimizer's momentum, which follows the exchange,
    continues such bursts for 1 / (1 - momentum) further steps, and overshoots if the residual is several gradients
    long. With ``momentum=0.9`` here each worker applies the momentum before compression instead, and the optimizer has
    none; without loss the steps would be the same. It is applied to all parameters, including those sent in float32,
    and in warm-up rounds.

    **Bounds.** If |C(p) - p|^2 <= q |p|^2 with q < 1, residuals of bounded vectors |m_i| <= B stay below
    B sqrt(q) / (1 - sqrt(q)). If the error of every element is at most c < 1 times the largest magnitude on any worker,
    as with two or more levels of a maximum, and the elements of all m_i stay within B, those of residuals stay below B
    c / (1 - c), whatever the variance. If it is at most a fixed c, as with :class:`Threshold`, they stay below c. For
    :class:`GRandK`, which sends a part of p in each round, such a bound holds over its cycle. An unbiased compressor
    with a variance above |p|^2 and without such a bound is refused: it is not a contraction, and its residual grows
    without bound.

    Args:
        compressor: The compressor C: an operator on one vector, :class:`Rotated` or :class:`LGreCo` around one,
            :class:`MultiScale`, :class:`RandK`, or :class:`GRandK`.
        momentum: Momentum of each worker, at least 0 and below 1; if above 0 the optimizer must have none.
        decay: Share of the residual that is added to the next vector, above 0 to 1: p_i = m_i + decay e_i. Below 1 old
            parts of the residual decay and are lost, as in :class:`SparseLoCo`. Residuals of bounded vectors |m_i| <= B
            then stay below B / (1 - decay) for any operator whose error is never longer than its input.

    Raises:
        HyperparameterError: ``compressor`` is not an operator on one vector or not a contraction, or ``momentum`` or
            ``decay`` is out of range.

    Reference: F. Seide et al., Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", ICML 2019, algorithm 2, which has no momentum.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
        >>> first = gw.simulate(g, gw.ErrorFeedback(compressor=gw.QSGDinf(block_size=256)))
        >>> residuals = torch.stack([first.state[f"rank {r}"]["residual/0"] for r in (0, 1)])
        >>> torch.allclose(first.mean + residuals.mean(0), g.mean(0), atol=1e-6)
        True
    """

    compressor: Method = field(default_factory=lambda: QSGDinf(block_size=256), kw_only=False)
    momentum: float = 0.0
    decay: float = 1.0

    name: ClassVar[str] = "errorfeedback"
    delta_formula: ClassVar[str | None] = "the compressor's, of g + e"
    properties: ClassVar[InheritedBits] = InheritedBits(
        "compressor",
        Properties(
            summary="Adds what the compressor left out to the next gradient",
            paper="Karimireddy et al., ICML 2019",
            bit_stable=True,
            bits_per_element=2 * (4 + 32 / 256),
            state="a residual per parameter and rank",
            state_bytes_per_element=4.0,
            stream="the compressor's",
        ),
    )

    def __post_init__(self) -> None:
        owner, inner = type(self).__name__, self.compressor
        object.__setattr__(self, "momentum", checked_momentum(owner, self.momentum))
        require(is_number(self.decay, above=0, most=1), owner, f"decay is above 0 and at most 1, not {self.decay!r}")
        object.__setattr__(self, "decay", float(self.decay))
        if isinstance(inner, Method) and inner.traits.parts is not None:
            c = inner.traits.worst_step
            require(
                c is not None and c < 1,
                owner,
                f"{inner!r} is no contraction over its cycle (what is sent of an element may err by as much as the "
                "largest, or no bound is known), so its residual may grow without bound; use at least two levels of a "
                "maximum, such as QSGDMaxNorm(), and rescale=False",
            )
            return
        consequence, decays = "so its residual may grow without bound", self.decay < 1
        check_contraction(owner, inner, consequence, "no residual", decays=decays)

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            collectives=as_sent(self.compressor),
            re_encoding=False,
            on_device=self.compressor.traits.on_device,
            # State of every residual algorithm, and of the compressor.
            remembers=(*traits.remembers, *self.compressor.traits.remembers),
            own=(*traits.own, *self.compressor.traits.own),
            of_ranks=self.compressor.traits.of_ranks,
            of_first=self.compressor.traits.of_first,
            sent_by_first=self.compressor.traits.sent_by_first,
            scatters=self.compressor.traits.scatters,
            unbiased=False,
            unbiased_note="no; nothing is lost",
        )

    def refusal_of_collective(self, collective: str) -> str | None:
        if collective != "two_shot" or not self.compressor.traits.re_encoding:
            return None
        return "the error of an owner who encodes the mean again would be in no rank's residual, and be lost"

    def wait_of(self, numel: int | None = None) -> float | None:
        inner = self.compressor
        if inner.traits.parts is not None:
            return wait_over_cycle(inner.traits.parts)
        delta = inner.typical_delta_of(numel)
        # What decays waits no longer: a share decay (1 - delta) is left after each round.
        return None if delta is None else expected_wait(1 - self.decay * (1 - delta))

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        numel, inner = longest(parameters), self.compressor
        bounded = inner.traits.bounds_residuals or inner.traits.parts is not None
        delta = 1.0 if bounded else inner.usual_delta_of(numel) or 0.0
        return momentum_beside_residual(self, optimizer, wait=self.wait_of(numel), delta=delta)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(self.compressor.plan(setting), setting, self.decay)


class Feedback(WrappedPlan):
    """Plan that adds an inner plan's residual, times ``decay``, to the next bucket, and stores it as ``kind``.

    Parameters that the inner plan sends exactly have no residual, whether it was told to or decided so. If they had one
    before, from another method or with other options, it is added once, in full.
    """

    def __init__(
        self, inner: BucketPlan, segments: Sequence[Segment], kind: str = "residual", decay: float = 1.0
    ) -> None:
        super().__init__(inner, segments)
        self._kind, self._decay = kind, decay
        # Memory keeps nothing of dense segments: what is subtracted there as sent was never added.
        self.segments = [replace(s, dense=s.dense or self._is_exact(s)) for s in segments]
        self._exact = [replace(s, dense=False) for s in self.segments if s.dense]

    def _is_exact(self, segment: Segment) -> bool:
        """Return whether a segment has elements and the inner plan compresses none of them."""
        end = segment.offset + segment.numel
        before = bisect_left(self.all_runs, (end, end))
        return segment.numel > 0 and (before == 0 or self.all_runs[before - 1][1] <= segment.offset)

    def before(self, context: Context, flat: torch.Tensor) -> None:
        held = context.memory.read(self._kind, self.segments)
        staged = context.memory.stage(self._kind, self.segments)
        for a, b in pieces(self.all_runs, flat):
            flat[a:b].add_(held[a:b].to(flat.dtype), alpha=self._decay * context.loss_scale)
            staged[a:b].copy_(flat[a:b])
        deliver(context, self._kind, [s for s in self._exact if context.memory.has(self._kind, s.parameter.name)], flat)

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        staged = context.memory.stage(self._kind, self.segments)
        if outcome.sent is None:
            raise TypeError("an inner plan did not say what it sent")
        outcome.sent(staged, -1.0)
        if context.loss_scale != 1.0:
            for a, b in self.runs[context.chunk]:
                staged[a:b].div_(context.loss_scale)
        return outcome


class Delivery(WrappedPlan):
    """Plan that adds another method's residuals to a bucket, once, and keeps none of the inner plan."""

    def before(self, context: Context, flat: torch.Tensor) -> None:
        # All segments that are not dense, since a cast does not declare compressed runs.
        deliver(context, "residual", [s for s in self.segments if not s.dense], flat)


def deliver(context: Context, kind: str, segments: Sequence[Segment], flat: torch.Tensor) -> None:
    """Add residuals of whole parameters, none of them dense, to a bucket, and stage zeros in their place."""
    if not segments:
        return
    held = context.memory.read(kind, segments)
    context.memory.stage(kind, segments).zero_()
    for s in segments:
        flat[s.offset : s.offset + s.numel].add_(held[s.offset : s.offset + s.numel], alpha=context.loss_scale)
