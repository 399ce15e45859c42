"""ACP-SGD: the two halves of a step of PowerSGD in alternate rounds."""

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

LEFT, RIGHT = "left_factor", "right_factor"
"""State of a parameter apart from its residual: factors of ``rows * rank`` and ``columns * rank`` numbers."""


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRankAlgorithm):
    r"""ACP-SGD: alternate compressed PowerSGD, which sends one factor of each matrix a round.

    With M_i worker i's gradient of a parameter plus its residual, as a matrix of n by m, in even rounds::

        Q <- orthonormalise(Q)        P_i = M_i Q        P <- (1 / N) sum_i P_i
        mean = P Q^T                  residual_i <- M_i - P_i Q^T

    and in odd rounds, with P of n by r from the round before::

        P <- orthonormalise(P)        Q_i = M_i^T P      Q <- (1 / N) sum_i Q_i
        mean = P Q^T                  residual_i <- M_i - P Q_i^T

    Two rounds are one step of the power method, of which :class:`PowerSGD` makes one in each round. A round takes half
    the bytes, and one exchange instead of two in sequence. A worker sends a projection of M_i, so no residual is longer
    than M_i. A constant matrix of rank r is sent completely in every two rounds: the odd round sends what the even
    round left out.

    The round number determines the half, so all workers agree, even after warm-up rounds and checkpoints. A round that
    is skipped because of a value that is not finite does not change the factors: the next round uses the other side's
    factor of the round before the last.

    Matrices, the choice of parameters to compress, and the order of sums are as for :class:`PowerSGD`.

    Args:
        matrix_rank: Number of columns r of a factor.
        least_saving: Least ratio of a matrix's elements to its factors' for which it is compressed; 1 or more.
        momentum: Momentum of each worker before compression, see :class:`ErrorFeedback`. The paper uses the optimizer's
            momentum after the exchange, with ``momentum=0.0`` here.
        values: Encoding of factors, as for :class:`PowerSGD`. Each worker subtracts what it sent from its residual or,
            with ``BF16()``, which rounds the mean once more, the mean.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: the factors of one side and uncompressed parameters, by two-shot or a gather (``docs/wire-format.md``).
    Initial factors are drawn from the shared stream.

    Reference: L. Zhang, L. Zhang, S. Shi, X. Chu, B. Li, "Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning", ICDCS 2023 (arXiv:2306.08881).

    Example:
        >>> import torch, gradwire as gw
        >>> w = torch.outer(torch.arange(1.0, 33.0), torch.ones(32))
        >>> link = gw.SimulatedLink([("w", w)], gw.ACPSGD(), 2)
        >>> first, second = (link.reduce_(torch.stack([w, 3 * w]).view(2, -1)).clone() for _ in range(2))
        >>> torch.allclose(first + second, 4 * w.view(-1), rtol=1e-4)
        True
    """

    matrix_rank: int = 2
    least_saving: float = 2.0
    momentum: float = 0.0
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "acp_sgd"
    tag: ClassVar[int] = 41
    properties: ClassVar[Properties] = Properties(
        summary="One factor of each matrix a round, left and right ones in turns, with error feedback",
        paper="Zhang et al., ICDCS 2023",
        bit_stable=True,
        bits_per_element=32 * 2 * 1000 / 1e6,
        state="a residual per parameter and rank, two factors per parameter",
        state_bytes_per_element=4.0,
        stream="shared",
    )

    def __post_init__(self) -> None:
        self.check_fields()

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            # A factor is of use in the next round, which must send the other side.
            needs_every_round=True,
            # Left and right factors have different sizes.
            period=2,
            # The factors, and the state of every residual algorithm.
            remembers=(*traits.remembers, LEFT, RIGHT),
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        rows, columns = shape_of(parameter)
        length = {LEFT: rows, RIGHT: columns}.get(kind)
        return parameter.numel if length is None else length * min(self.matrix_rank, rows, columns)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(_AlternatePlan(self, setting), setting)


class _AlternatePlan(FactorPlan):
    """Plan that exchanges the factors of one side, with uncompressed parameters."""

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        even, kernels, table = context.round % 2 == 0, self.setting.kernels, self.table
        (known, before), (side, kind) = ((self.right, RIGHT), (self.left, LEFT))[:: 1 if even else -1]
        values = self.room(flat, side)
        factors = values[: side.numel]
        basis = values
        if not flat.is_meta:
            basis = kernels.orthonormalise(known.held(context, before, self.setting.seed), table, known.name)
            multiply = kernels.multiply_right if even else kernels.multiply_left
            multiply(flat, table, basis, factors)
        own = values.clone() if context.wants_sent else None
        coded = yield from self.mean(context, values, side)
        if flat.is_meta:
            return Outcome()

        def product(of: torch.Tensor, out: torch.Tensor, weight: float | None) -> None:
            left, right = (of, basis) if even else (basis, of)
            kernels.multiply_out(left, right, table, out, weight)

        self.take_rest(flat, side, values)
        product(factors, flat, None)
        if self.matrices:
            side.keep(context, kind, values)
        finite = all_finite(values)
        if own is None:
            return Outcome(finite)

        return Outcome(finite, self.contribution(side, own, values, coded, product))
