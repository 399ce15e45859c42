"""PowerSGD: matrices as products of two thin factors, with one step of the power method in each round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, Properties
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.low_rank.factors import FactorPlan, LowRankAlgorithm, all_finite, shape_of
from gradwire.methods.low_rank.float_means import first_of_two

FACTOR = "factor"
"""State of a parameter apart from its residual: the right factor, ``columns * rank`` numbers."""


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRankAlgorithm):
    r"""PowerSGD: each matrix as a product of two low-rank factors, with error feedback.

    With M_i worker i's gradient of a parameter plus its residual, as a matrix of n by m, and a factor Q of m by r, the
    same on all workers and random at first::

        P = orthonormalise((1 / N) sum_i M_i Q)       Q <- (1 / N) sum_i M_i^T P
        mean = P Q^T        residual_i <- M_i - P (M_i^T P)^T

    Each round is one step of the power method from the last round's factor: for a constant matrix the product converges
    to the best of rank r. Both sums are linear, so the result is that of one worker with the mean of the matrices. The
    operator is not a contraction for every matrix: the part orthogonal to Q is lost until the residual has rotated Q.

    The paper subtracts the mean from every residual instead. The outcome is the same, since only the mean of the
    residuals enters it. But the difference between a worker's gradients and the mean then stays in its residual:
    residuals of workers drift apart without bound, and if a worker ends, the residuals of the others are wrong, since
    only their mean over all workers was right. Here a worker subtracts its own contribution, so its residual is the
    part that it has not sent.

    A matrix has the outermost dimension in memory as rows and all others as columns. It is compressed if its two
    factors have ``least_saving`` times fewer numbers. All other parameters, such as vectors, are sent in float32 with
    the right factors. All sums are computed in a specified order, so the bits are the same on every machine and in
    every layout.

    Args:
        matrix_rank: Number of columns r of a factor.
        least_saving: Least ratio of a matrix's elements to its factors' for which it is compressed; 1 or more.
        momentum: Momentum of each worker before compression, see :class:`ErrorFeedback`. The paper uses the optimizer's
            momentum after the exchange, with ``momentum=0.0`` here.
        values: Encoding of factors: ``FP32()``, ``BF16()``, or an operator that is a contraction, such as
            ``QSGDinf(levels=7, block_size=256)``, applied to each vector of a factor as a parameter. Rounding errors of
            a product remain in the residuals: with an operator C worker i subtracts what it sent,
            residual_i <- M_i - P C(M_i^T P)^T, and with ``BF16()``, which rounds the mean once more, the mean.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: left factors, then right factors and uncompressed parameters, by two-shot or a gather
    (``docs/wire-format.md``). The initial factor is drawn from the shared stream. It is uniform, where the paper's is
    normal, since machines would round normal numbers differently.

    Reference: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.

    Example:
        >>> import torch, gradwire as gw
        >>> w = torch.outer(torch.arange(1.0, 33.0), torch.ones(32))
        >>> torch.allclose(gw.simulate([{"w": w}, {"w": 3 * w}], gw.PowerSGD()).mean["w"], 2 * w)
        True
    """

    matrix_rank: int = 2
    least_saving: float = 2.0
    momentum: float = 0.0
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "powersgd"
    tag: ClassVar[int] = 40
    properties: ClassVar[Properties] = Properties(
        summary="Matrices as products of two factors of a low rank, with error feedback",
        paper="Vogels et al., PowerSGD, NeurIPS 2019",
        bit_stable=True,
        bits_per_element=32 * 2 * 2000 / 1e6,
        state="a residual per parameter and rank, a factor per parameter",
        state_bytes_per_element=4.0,
        stream="shared",
    )

    def __post_init__(self) -> None:
        self.check_fields()

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            # The factor, and the state of every residual algorithm.
            remembers=(*traits.remembers, FACTOR),
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        if kind != FACTOR:
            return parameter.numel
        rows, columns = shape_of(parameter)
        return columns * min(self.matrix_rank, rows, columns)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(_PowerPlan(self, setting), setting)


class _PowerPlan(FactorPlan):
    """Plan that exchanges left factors, then right factors with uncompressed parameters."""

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        kernels, table = self.setting.kernels, self.table
        left, right = flat.new_empty(self.left.numel), self.room(flat, self.right)
        factors = right[: self.right.numel]
        if not flat.is_meta:
            kernels.multiply_right(flat, table, self.right.held(context, FACTOR, self.setting.seed), left)
        if self.matrices:
            yield from self.mean(first_of_two(context), left, self.left)

        basis = left if flat.is_meta else kernels.orthonormalise(left, table, "left")
        if not flat.is_meta:
            kernels.multiply_left(flat, table, basis, factors)
        own = right.clone() if context.wants_sent else None
        coded = yield from self.mean(context, right, self.right)
        if flat.is_meta:
            return Outcome()
        self.take_rest(flat, self.right, right)
        kernels.multiply_out(basis, factors, table, flat)
        if self.matrices:
            self.right.keep(context, FACTOR, right)
        finite = all_finite(right) and all_finite(left)
        if own is None:
            return Outcome(finite)

        def product(of: torch.Tensor, out: torch.Tensor, weight: float) -> None:
            kernels.multiply_out(basis, of, table, out, weight)

        return Outcome(finite, self.contribution(self.right, own, right, coded, product))
