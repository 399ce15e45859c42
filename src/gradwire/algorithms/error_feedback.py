"""Error feedback: what a compressor left out is added to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.algorithms.grandk import GRandK
from gradwire.algorithms.multi_scale import MultiScale
from gradwire.compressors import Cast, Compressor, QSGDinf
from gradwire.methods import Method, Properties, require
from gradwire.protocols import Context, Outcome
from gradwire.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.wrappers.wrapper import WrappedPlan, Wrapper, pieces

__all__ = ["ErrorFeedback", "Feedback"]


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    r"""Error feedback around any compressor C that is a contraction.

    With g_i worker i's gradient and e_i its residual, zero at first::

        p_i = g_i + e_i        mean = (1 / N) sum_i C(p_i)        e_i <- p_i - C(p_i)

    Nothing is lost, it comes later: sum over rounds of what a worker contributed = sum of its gradients - e_i.
    Residuals are kept in units of the gradient, so that a change of the learning rate needs no rescaling, and unscaled
    under automatic mixed precision. They are this rank's own state; a round with a non-finite value changes none.

    If |C(p) - p|^2 <= q |p|^2 with q < 1, residuals of bounded gradients |g| <= B stay below
    B sqrt(q) / (1 - sqrt(q)). Where no element errs by more than c < 1 times the largest magnitude on any worker, as
    with two or more levels of a maximum, they do so in that magnitude, whatever the variance: below B c / (1 - c). For
    :class:`GRandK`, which sends a part of p a round, such a bound holds over its cycle. An unbiased compressor with a
    variance above |p|^2 and without such a bound is no contraction: its residual grows without bound, so it is refused.

    Args:
        compressor: The method C: an operator on one vector, :class:`MultiScale`, or :class:`GRandK` around one.

    Raises:
        HyperparameterError: ``compressor`` is no operator on one vector, or no contraction.

    Reference: F. Seide et al., Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", ICML 2019, algorithm 2.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
        >>> first = gw.simulate(g, gw.ErrorFeedback(compressor=gw.QSGDinf(block_size=256)))
        >>> residuals = torch.stack([first.state[f"rank {r}"]["residual/0"] for r in (0, 1)])
        >>> torch.allclose(first.mean + residuals.mean(0), g.mean(0), atol=1e-6)
        True
    """

    compressor: Method = field(default_factory=lambda: QSGDinf(block_size=256))

    name: ClassVar[str] = "errorfeedback"
    needs_loss_scale: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("residual",)
    properties: ClassVar[Properties] = Properties(
        summary="Adds what the compressor left out to the next gradient",
        paper="Karimireddy et al., ICML 2019",
        unbiased=False,
        unbiased_note="nothing is lost",
        bit_stable=True,
        bits_per_element=2 * (4 + 32 / 256),
        delta="the compressor's",
        state="a residual per parameter and rank",
        stream="the compressor's",
    )

    def __post_init__(self) -> None:
        owner, inner = type(self).__name__, self.compressor
        c = inner.worst_step if isinstance(inner, Method) else None
        if isinstance(inner, GRandK):
            require(
                c is not None and c < 1,
                owner,
                f"{inner!r} is no contraction over its cycle (what is sent of an element may err by as much as the "
                "largest, or no bound is known), so its residual may grow without bound; use at least two levels of a "
                "maximum, such as QSGDMaxNorm(), and rescale=False",
            )
            return
        require(
            isinstance(inner, Compressor | MultiScale),
            owner,
            f"compressor is an operator on one vector, such as QSGDinf(block_size=256), not {inner!r}"
            + (": the backend sums in sixteen bits, and no residual sees what that loses" * isinstance(inner, Cast)),
        )
        if c is not None and c < 1:
            return
        q = inner.worst_error
        reason = "no bound on its error is known" if q is None else f"its squared error may be {q:.3g} times the signal"
        require(
            q is not None and q < 1,
            owner,
            f"{inner!r} is no contraction ({reason}), so its residual may grow without bound; use smaller blocks, more "
            "levels, or the method without error feedback",
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return Feedback(setting.plan(self.compressor), setting.segments)


class Feedback(WrappedPlan):
    """Adds what an inner plan left out of a bucket to the next one."""

    def before(self, context: Context, flat: torch.Tensor) -> None:
        held = context.memory.read("residual", self.segments)
        staged = context.memory.stage("residual", self.segments)
        for a, b in pieces(self.all_runs):
            flat[a:b].add_(held[a:b].to(flat.dtype), alpha=context.loss_scale)
            staged[a:b].copy_(flat[a:b])

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        staged = context.memory.stage("residual", self.segments)
        if outcome.sent is None:
            raise TypeError("an inner plan did not say what it sent")
        outcome.sent(staged, -1.0)
        if context.loss_scale != 1.0:
            for a, b in self.runs[context.chunk]:
                staged[a:b].div_(context.loss_scale)
        return outcome
