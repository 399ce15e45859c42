"""signSGD and Signum: a majority vote on the sign of every element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.method import Method, Properties
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment, divide
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.signs.majority_vote import MajorityVoteCodec, zero_throughout
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.wrappers.wrapper import WrappedPlan

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["SignSGD", "Signum"]


@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    r"""signSGD with majority vote: one bit an element in each direction.

    With g_i worker i's gradient and sign(0) = +1::

        outcome = sign(sum_i sign(g_i))        a tie gives +1

    A worker whose gradient of a parameter is zero throughout, as where it did not use it or its data has run out, does
    not vote on that parameter; where none votes the outcome is 0.

    The outcome is a *direction* with entries -1 and 1, or 0 where none votes, not the mean of the gradients: every
    element moves by the learning rate. Use ``torch.optim.SGD`` without momentum, with a learning rate of the order of
    1e-4 (where SGD has 0.1) and decoupled weight decay, p <- p - lr (outcome + decay p): its ``weight_decay``, which is
    added after the exchange. Clipping by norm, after it too, would only scale the learning rate.

    Scaling a worker's gradient changes nothing. The vote is median-like: with very different workers it is not the sign
    of the mean, and signSGD may go uphill where noise is skewed; :class:`EFSignSGD` does not. Fewer than half of the
    workers cannot overturn a vote in which the others agree.

    Since parameters that travel in float32 bring the mean, all are voted on: ``min_numel`` is 0 unless given. Those of
    ``exclude``, and all in rounds of warm-up, need a learning rate of their own. Under mixed precision hand
    ``grad_scaler=`` to ``attach``: the direction is then multiplied by the loss scale, which the scaler divides by.

    Wire: bits, 80 elements in ten bytes, and two flag bits a parameter; the vote likewise (``docs/wire-format.md``). A
    parameter with an infinity or a NaN on any rank comes back as +inf on all. Draws nothing.

    Reference: J. Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018; J. Bernstein
    et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[5.0, -0.1, 2.0], [-1.0, -3.0, 0.5], [-1.0, 9.0, 1.0]])
        >>> gw.simulate(g, gw.SignSGD()).mean
        tensor([-1., -1.,  1.])
    """

    name: ClassVar[str] = "signsgd"
    tag: ClassVar[int] = 17
    collectives: ClassVar[tuple[str, ...]] = ("two_shot", "all_gather")
    on_device: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("signs",)
    direction: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    needs_loss_scale: ClassVar[bool] = True
    min_numel: ClassVar[int] = 0
    properties: ClassVar[Properties] = Properties(
        summary="The sign that most workers have; a direction, not a mean",
        paper="Bernstein et al., signSGD with majority vote, ICLR 2019",
        bit_stable=True,
        bits_per_element=1.0,
    )

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> MajorityVoteCodec:
        return MajorityVoteCodec(kernels, segments, world_size)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _Vote(SectionPlan(self, setting), setting.segments)


@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    r"""Signum with majority vote: :class:`SignSGD` on each worker's momentum.

    With v_i worker i's momentum, zero at first::

        v_i <- momentum v_i + (1 - momentum) g_i        outcome = sign(sum_i sign(v_i))

    A worker whose gradient of a parameter is zero throughout does not vote on it either; its momentum decays.

    The momentum is this method's: the optimizer needs none. It is this rank's own state, unscaled under mixed
    precision; a round with a non-finite value changes none.

    Args:
        momentum: beta, at least 0 and below 1; 0 is signSGD.

    Raises:
        HyperparameterError: ``momentum`` is out of range.

    Reference: J. Bernstein et al., ICLR 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> link = gw.SimulatedLink([("w", torch.empty(2))], gw.Signum(momentum=0.5), 1)
        >>> for g in ([4.0, 4.0], [-1.0, -9.0]):
        ...     print(link.reduce_(torch.tensor([g])))
        tensor([1., 1.])
        tensor([ 1., -1.])
    """

    momentum: float = 0.9

    name: ClassVar[str] = "signum"
    remembers: ClassVar[tuple[str, ...]] = ("momentum",)
    owns_momentum: ClassVar[bool] = True
    tag: ClassVar[int] = 18
    properties: ClassVar[Properties] = Properties(
        summary="The sign that most workers' momentum has; a direction, not a mean",
        paper="Bernstein et al., signSGD with majority vote, ICLR 2019",
        bit_stable=True,
        bits_per_element=1.0,
        state="a momentum per parameter and rank",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", checked_momentum("Signum", self.momentum))

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _MomentumVote(SectionPlan(self, setting), setting.segments, self.momentum, setting.kernels)


class _Vote(WrappedPlan):
    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        if context.loss_scale != 1.0:
            for a, b in self.runs[context.chunk]:
                flat[a:b].mul_(context.loss_scale)
        return outcome


class _MomentumVote(_Vote):
    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], momentum: float, kernels: Kernels) -> None:
        super().__init__(inner, segments)
        self._momentum, self._kernels = momentum, kernels
        self._table = sign_table(divide(segments)[0])

    def before(self, context: Context, flat: torch.Tensor) -> None:
        silent = zero_throughout(self._kernels, flat, self._table)
        held = context.memory.read("momentum", self.segments)
        staged = context.memory.stage("momentum", self.segments)
        for a, b in self.all_runs:
            torch.mul(held[a:b], self._momentum, out=staged[a:b])
            staged[a:b].add_(flat[a:b], alpha=(1 - self._momentum) / context.loss_scale)
            flat[a:b].copy_(staged[a:b])
        # A momentum that only decays keeps its signs for good: this rank does not vote.
        is_here = flat.device.type == "cpu"
        for i, (begin, numel) in enumerate(zip(self._table.offset.tolist(), self._table.numel.tolist())):
            if not is_here or silent[i]:
                flat[begin : begin + numel].masked_fill_(silent[i], 0.0)
