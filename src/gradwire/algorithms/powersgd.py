"""PowerSGD: matrices as products of two thin factors, improved by one step of the power method a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.algorithms.error_feedback import ResidualAlgorithm, momentum_beside_residual
from gradwire.algorithms.local_momentum import checked_momentum
from gradwire.algorithms.low_rank import Matrix, draw_columns, matrices, multiply_out, orthonormalise, shape_of
from gradwire.codecs import DenseCodec, NoSummary
from gradwire.compressors import TernGrad
from gradwire.methods import Properties, require
from gradwire.ops import Exchange
from gradwire.protocols import PROTOCOLS, Context, Outcome, Section
from gradwire.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.protocols.pieces import join
from gradwire.segments import Parameter, Segment

__all__ = ["PowerSGD"]

FACTOR = "factor"
"""What is remembered of a parameter beside its residual: the right factor, ``columns * rank`` numbers."""

LEFT_EXCHANGE = 2
"""Number of the exchange of left factors, which comes before that of right ones."""


@dataclass(frozen=True, kw_only=True)
class PowerSGD(ResidualAlgorithm):
    r"""PowerSGD: each matrix as a product of two factors of a low rank, with error feedback.

    With M_i worker i's gradient of a parameter plus its residual, as a matrix of n by m, and a factor Q of m by r, the
    same on all workers and at first random::

        P = orthonormalise((1 / N) sum_i M_i Q)       Q <- (1 / N) sum_i M_i^T P
        mean = P Q^T        residual_i <- M_i - P Q^T

    One step of the power method a round, from where the last one ended: for a matrix that stays as it is, the product
    becomes the best of rank r. Both sums are linear, so that workers do as one worker with the mean of their matrices.
    The mean is no contraction of every matrix: what is orthogonal to Q is not seen, until the residual has turned Q.

    A matrix has the outermost dimension in memory as rows and all others as columns. It is compressed where two factors
    have ``least_saving`` times fewer numbers; all else, vectors among it, travels in float32 with the right factors.
    Sums over workers, the Gram-Schmidt process and the product are made in a stated order, so that workers on unlike
    machines end with the same bits; a worker's own products M Q and M^T P are its library's.

    Args:
        matrix_rank: Columns r of a factor.
        least_saving: How many times fewer numbers the factors of a matrix must have; 1 or more.
        momentum: Of each worker's own, before compression, see :class:`ErrorFeedback`. The paper has the optimizer's
            momentum after it, which is ``momentum=0.0`` here.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: left factors, then right factors and what is not compressed, in float32 by two-shot or a gather
    (``docs/wire-format.md``). The first factor is drawn from the shared stream; it is uniform, where the paper's is
    normal, which no machine would round alike.

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

    name: ClassVar[str] = "powersgd"
    tag: ClassVar[int] = 40
    collectives: ClassVar[tuple[str, ...]] = ("two_shot", "all_gather")
    kernels: ClassVar[tuple[str, ...]] = ()
    unbiased: ClassVar[bool] = False
    unbiased_note: ClassVar[str | None] = "no; nothing is lost"
    properties: ClassVar[Properties] = Properties(
        summary="Matrices as products of two factors of a low rank, with error feedback",
        paper="Vogels et al., PowerSGD, NeurIPS 2019",
        bit_stable=False,
        bits_per_element=32 * 2 * 2000 / 1e6,
        state="a residual per parameter and rank, a factor per parameter",
        stream="shared",
    )

    def __post_init__(self) -> None:
        whole = isinstance(self.matrix_rank, int) and not isinstance(self.matrix_rank, bool)
        require(whole and self.matrix_rank >= 1, "PowerSGD", f"matrix_rank is at least 1, not {self.matrix_rank!r}")
        number = isinstance(self.least_saving, int | float) and not isinstance(self.least_saving, bool)
        require(number and self.least_saving >= 1, "PowerSGD", f"least_saving is at least 1, not {self.least_saving!r}")
        object.__setattr__(self, "least_saving", float(self.least_saving))
        object.__setattr__(self, "momentum", checked_momentum("PowerSGD", self.momentum))

    @property
    def remembers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The factor beside what every residual algorithm remembers."""
        return (*super().remembers, FACTOR)

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        if kind != FACTOR:
            return parameter.numel
        rows, columns = shape_of(parameter)
        return columns * min(self.matrix_rank, rows, columns)

    @property
    def innermost(self) -> TernGrad:
        """Any operator for the same protocol: nothing of it is used where everything travels in float32."""
        return TernGrad()

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        # The paper trains with momentum after the exchange, at the rates of SGD: what is left out is small and changes
        # from round to round.
        return momentum_beside_residual(self, optimizer, 1.0)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(_FactorPlan(self, setting), setting)


class _FactorPlan(BucketPlan):
    """Left factors, then right ones with what is not compressed."""

    chunks = 1

    def __init__(self, method: PowerSGD, setting: PlanSetting) -> None:
        self.method, self.setting, self.collective = method, setting, setting.collective
        self.matrices = matrices(setting.segments, method.matrix_rank, method.least_saving)
        whole = {m.segment for m in self.matrices}
        self.rest = [s for s in setting.segments if s not in whole and s.numel]
        self.runs = [join((m.segment.offset, m.segment.offset + m.segment.numel) for m in self.matrices)]
        self.left = _side_by_side(self.matrices, [m.rows for m in self.matrices])
        self.right = _side_by_side(self.matrices, [m.columns for m in self.matrices])
        self.factors = sum(s.numel for s in self.right)
        self.beside = sum(s.numel for s in self.rest)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        ours = [m.of(flat) for m in self.matrices] if not flat.is_meta else []
        # Factors lie vector by vector: so a library reads the matrix row by row, several times as fast.
        left = flat.new_empty(sum(s.numel for s in self.left))
        for part, m, values, factor in zip(_views(self.left, left), self.matrices, ours, self._held(context)):
            torch.mm(factor, values.t(), out=part.view(m.rank, m.rows))
        if self.matrices:
            before = replace(context, workspace=context.workspace.part("left"), exchange=LEFT_EXCHANGE)
            yield from self._mean(before, left)

        # Right factors lie before what is not compressed.
        right = flat.new_empty(self.factors + self.beside)
        bases = orthonormalise(
            [p.view(m.rank, m.rows) for p, m, _ in zip(_views(self.left, left), self.matrices, ours)]
        )
        for part, m, values, basis in zip(_views(self.right, right), self.matrices, ours, bases):
            torch.mm(basis, values, out=part.view(m.rank, m.columns))
        beside = [flat[s.offset : s.offset + s.numel] for s in self.rest]
        if beside:
            torch.cat(beside, out=right[self.factors :])
        own = right[self.factors :].clone() if context.wants_sent else None
        yield from self._mean(context, right)
        if flat.is_meta:
            return Outcome()
        if beside:
            torch._foreach_copy_(beside, list(right[self.factors :].split([len(b) for b in beside])))
        for part, m, values, basis in zip(_views(self.right, right), self.matrices, ours, bases):
            multiply_out(basis, part.view(m.rank, m.columns), values)
        if self.matrices:
            context.memory.stage(FACTOR, self.right, replicated=True).copy_(right[: self.factors])
        finite = bool(torch.isfinite(right).all()) and bool(torch.isfinite(left).all())
        if own is None:
            return Outcome(finite)

        def sent(out: torch.Tensor, weight: float) -> None:
            # What a worker contributed to a matrix is the product itself, as in the paper: only the mean of the
            # residuals decides what comes of them. It is what the bucket still holds when this is asked.
            for m, product in zip(self.matrices, ours):
                m.of(out).add_(product, alpha=weight)
            at = 0
            for s in self.rest:
                out[s.offset : s.offset + s.numel].add_(own[at : at + s.numel], alpha=weight)
                at += s.numel

        return Outcome(finite, sent)

    def _held(self, context: Context) -> list[torch.Tensor]:
        """Return the factors; one that is zero, as at first and after a gradient of zeros, is drawn."""
        if not self.matrices or context.workspace.device == "meta":
            return []
        held = context.memory.read(FACTOR, self.right, replicated=True)
        factors = [part.view(m.rank, m.columns) for part, m in zip(_views(self.right, held), self.matrices)]
        largest = torch.stack(torch._foreach_norm(factors, float("inf"))).tolist()
        return [
            f if most else draw_columns(m, self.setting.seed, context.round)
            for f, m, most in zip(factors, self.matrices, largest)
        ]

    def _mean(self, context: Context, values: torch.Tensor) -> Exchange[None]:
        """Replace values by their mean over ranks, in float32 and in the order of ranks."""
        whole = [Segment(Parameter("(factors)", (len(values),), (1,)), 0, 0, len(values))]
        section = Section(DenseCodec(whole, context.world_size), NoSummary())
        without = replace(context, wants_sent=False)
        yield from PROTOCOLS[self.collective](without, self.method.tag, [section], values)


def _side_by_side(found: Sequence[Matrix], heights: Sequence[int]) -> list[Segment]:
    """Lay factors one after the other, each under its parameter's name."""
    segments, at = [], 0
    for matrix, height in zip(found, heights):
        segments.append(Segment(matrix.segment.parameter, at, 0, height * matrix.rank))
        at += height * matrix.rank
    return segments


def _views(segments: Sequence[Segment], values: torch.Tensor) -> list[torch.Tensor]:
    return [values[s.offset : s.offset + s.numel] for s in segments]
