"""Base of methods that send factors of matrices: matrices, factors, their exchange and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, cast_of, is_number, is_whole, operator_of, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import MatrixTable
from gradwire.kernels.philox import uniform_integers
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.low_rank.float_means import Beside, mean_of_floats
from gradwire.methods.wrappers.wrapper import as_sent
from gradwire.seeds import SHARED, parameter_key


def check_matrix_rank(owner: str, rank: object) -> None:
    """Check the field ``matrix_rank``, the number of vectors in a factor.

    Raises:
        HyperparameterError: it is not an integer of at least 1.
    """
    require(is_whole(rank, 1), owner, f"matrix_rank is at least 1, not {rank!r}")


@dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix of ``rows`` by ``columns``, row by row in memory order, and the rank of its factors."""

    segment: Segment
    rows: int
    columns: int
    rank: int


def shape_of(parameter: Parameter) -> tuple[int, int]:
    """Return the rows and columns of a parameter: its outermost dimension in memory, and all others.

    A parameter with fewer than two dimensions has one row.
    """
    sizes = [(stride, size) for stride, size in zip(parameter.stride, parameter.shape) if size > 1]
    if len(sizes) < 2:
        return 1, parameter.numel
    rows = max(sizes)[1]
    return rows, parameter.numel // rows


def matrices(segments: Sequence[Segment], rank: int, least_saving: float) -> list[Matrix]:
    """Return the parameters for which two factors of that rank have ``least_saving`` times fewer numbers."""
    found = []
    for segment in segments:
        rows, columns = shape_of(segment.parameter)
        use = min(rank, rows, columns)
        if not segment.dense and rows > 1 and rows * columns >= least_saving * use * (rows + columns):
            found.append(Matrix(segment, rows, columns, use))
    return found


def matrix_table(found: Sequence[Matrix]) -> MatrixTable:
    """Return the table of matrices and their factors for the kernels."""
    return MatrixTable(
        [m.segment.offset for m in found], [m.rows for m in found], [m.columns for m in found], [m.rank for m in found]
    )


def draw_factor(name: str, length: int, rank: int, seed: int, round: int) -> torch.Tensor:
    """Return ``[rank, length]`` numbers for a parameter, uniform in [-1, 1), the same on all ranks."""
    numel = length * rank
    groups = torch.arange(-(-numel // 80), device="cpu")
    key = torch.tensor(parameter_key(seed, name, "factor"), device="cpu")
    drawn = uniform_integers(groups, key.expand(len(groups), 2), round, SHARED).reshape(-1)[:numel]
    return ((drawn - (1 << 23)).to(torch.float32) / (1 << 23)).view(rank, length)


Sent = Callable[[torch.Tensor, float], None]
"""``sent(out, weight)`` adds ``weight`` times this rank's sent values of a side, and of all after it, to ``out``."""


class LowRankAlgorithm(ResidualAlgorithm):
    """Base of algorithms that send factors, with the fields ``matrix_rank``, ``least_saving`` and ``values``.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    matrix_rank: int
    least_saving: float
    values: Method

    tag: ClassVar[int]

    def declare(self) -> Traits:
        operator = self.operator
        return replace(
            super().declare(),
            # Cast factors add up. If an owner encoded their mean by an operator, the error would be in no residual.
            collectives=("two_shot", "all_gather") if operator is None else as_sent(operator),
            subtracts_mean=cast_of(self.values) == torch.bfloat16,
            kernels=("low_rank", *(() if operator is None else operator.traits.kernels)),
            unbiased=False,
            unbiased_note="no; nothing is lost",
        )

    @property
    def operator(self) -> Method | None:
        """Operator that encodes factors; None if they are cast."""
        return None if operator_of(self.values) is None or cast_of(self.values) else self.values

    def check_fields(self) -> None:
        """Check the common fields.

        Raises:
            HyperparameterError: a field is out of range.
        """
        owner, saving = type(self).__name__, self.least_saving
        check_matrix_rank(owner, self.matrix_rank)
        require(is_number(saving, least=1, most=math.inf), owner, f"least_saving is at least 1, not {saving!r}")
        object.__setattr__(self, "least_saving", float(saving))
        operator = self.operator
        require(
            cast_of(self.values) in (torch.float32, torch.bfloat16)
            or (
                operator is not None
                and not (operator.traits.joined or operator.traits.needs_link_cost or operator.traits.direction)
            ),
            owner,
            "values is FP32(), BF16() or an operator on one vector such as QSGDinf(levels=7, block_size=256), not "
            f"{self.values!r}",
        )
        if operator is not None:
            check_contraction(owner, operator, "so its residual may grow without bound", "no residual")
        object.__setattr__(self, "momentum", checked_momentum(owner, self.momentum))

    def wait_of(self, numel: int | None = None) -> float | None:
        # What waits for long are differences between workers, which cancel in the mean: on digits the residual of a
        # worker grows many times as long as what it sends, and the mean of residuals does not.
        return None


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite; there may be none."""
    # The maximum propagates a NaN.
    return not values.numel() or math.isfinite(float(values.abs().amax()))


class Side:
    """The left or the right factors of a bucket's matrices, joined.

    Attributes:
        name: "left" or "right".
        segments: Segment of each factor, ``[rank, rows]`` or ``[rank, columns]``, with its parameter's name.
        numel: Number of elements of all factors.
    """

    def __init__(self, found: Sequence[Matrix], name: str) -> None:
        self._matrices, self.name = found, name
        self.segments: list[Segment] = []
        self.numel = 0
        for m in found:
            numel = m.rank * (m.rows if name == "left" else m.columns)
            self.segments.append(Segment(m.segment.parameter, self.numel, 0, numel))
            self.numel += numel
        vectors = [s.numel // m.rank for s, m in zip(self.segments, found) for _ in range(m.rank)]
        self._lengths = torch.tensor(vectors, dtype=torch.int64, device="cpu")

    def held(self, context: Context, kind: str, seed: int) -> torch.Tensor:
        """Return the stored factors, with zero vectors drawn anew.

        Vectors are zero at first, after a gradient of zeros, and if they depended on the others in the round before;
        they would stay zero.
        """
        return self.filled(context.memory.read(kind, self.segments, replicated=True), seed, context.round)

    def filled(self, factors: torch.Tensor, seed: int, round: int, whose: str = "") -> torch.Tensor:
        """Return factors with every zero vector drawn anew, the same on all ranks.

        Args:
            whose: Suffix of parameter names if only some ranks draw.
        """
        if not self._matrices:
            return factors
        nothing = torch.segment_reduce(factors.abs(), "max", lengths=self._lengths) == 0
        if not bool(nothing.any()):
            return factors
        found, at = factors.clone(), 0
        for m, segment in zip(self._matrices, self.segments):
            zero = nothing[at : at + m.rank]
            at += m.rank
            if bool(zero.any()):
                factor = found[segment.offset : segment.offset + segment.numel].view(m.rank, -1)
                drawn = draw_factor(m.segment.parameter.name + whose, factor.shape[1], m.rank, seed, round)
                factor.copy_(torch.where(zero[:, None], drawn, factor))
        return found

    def vectors(self) -> list[Segment]:
        """Return the vectors of all factors as parameters, with the side in their names."""
        found = []
        for m, factor in zip(self._matrices, self.segments):
            length = factor.numel // m.rank
            for i in range(m.rank):
                name = f"{m.segment.parameter.name}, {self.name} vector {i}"
                found.append(Segment(Parameter(name, (length,), (1,)), factor.offset + i * length, 0, length))
        return found

    def keep(self, context: Context, kind: str, values: torch.Tensor) -> None:
        """Store factors at the end of the round, in the unit of its gradients: only their directions are used."""
        context.memory.stage(kind, self.segments, replicated=True).copy_(values[: self.numel])


class FactorPlan(BucketPlan):
    """Plan of a bucket whose matrices are sent as factors, and all else with the factors of one side.

    Attributes:
        matrices: Compressed parameters.
        table: Table of the matrices for the kernels.
        left, right: Left and right factors.
        rest: All other segments.
    """

    chunks = 1

    def __init__(self, method: LowRankAlgorithm, setting: PlanSetting) -> None:
        self.method, self.setting, self.collective = method, setting, setting.collective
        self.matrices = matrices(setting.segments, method.matrix_rank, method.least_saving)
        whole = {m.segment for m in self.matrices}
        self.rest = [s for s in setting.segments if s not in whole and s.numel]
        self.runs = [join((m.segment.offset, m.segment.offset + m.segment.numel) for m in self.matrices)]
        self.table = matrix_table(self.matrices)
        self.left, self.right = Side(self.matrices, "left"), Side(self.matrices, "right")
        self._beside = Beside(self.rest)
        self._plans: dict[tuple[str, int], SectionPlan] = {}

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    def room(self, flat: torch.Tensor, side: Side) -> torch.Tensor:
        """Return a vector for the factors of a side and, after them, uncompressed parameters."""
        values = flat.new_empty(side.numel + self._beside.numel)
        self._beside.take(flat, values[side.numel :])
        return values

    def take_rest(self, flat: torch.Tensor, side: Side, values: torch.Tensor) -> None:
        """Write the values after the factors of a side back to the bucket."""
        self._beside.put(values[side.numel :], flat)

    def add_rest(self, own: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        """Add ``weight`` times this rank's contribution to uncompressed parameters."""
        self._beside.add(own, weight, out)

    def contribution(
        self,
        side: Side,
        own: torch.Tensor,
        mean: torch.Tensor,
        coded: Sent | None,
        product: Callable[[torch.Tensor, torch.Tensor, float], None],
    ) -> Sent:
        """Return what this rank has sent of a bucket, which is subtracted from its residual.

        Args:
            side: The factors that were sent last.
            own: This rank's factors and the values after them, as they were before the exchange.
            mean: Their mean over ranks. Narrow factors are rounded once more in it, which no rank would have sent: it
                counts as the contribution of each instead, so that nothing is lost of the mean.
            coded: What this rank has sent if an operator encodes factors.
            product: Adds the product with factors, times a weight, to a bucket.
        """

        def sent(out: torch.Tensor, weight: float) -> None:
            contributed = mean if self.method.traits.subtracts_mean else own
            if coded is not None:
                coded(contributed := torch.zeros(len(own), dtype=torch.float32, device="cpu"), 1.0)
            product(contributed[: side.numel], out, weight)
            self.add_rest(own[side.numel :], weight, out)

        return sent

    def mean(self, context: Context, values: torch.Tensor, side: Side) -> Exchange[Sent | None]:
        """Replace the factors of a side, and the values after them, by their mean, added in the order of ranks.

        Returns:
            This rank's sent values if an operator encodes the factors and ``context.wants_sent`` is set, else None.
        """
        operator = None if self.method.operator is None else self.method.operator.as_operator
        if operator is None:
            dtype = self.method.values.cast_dtype or torch.float32
            yield from mean_of_floats(context, self.collective, self.method.tag, values, side.numel, dtype)
            return None
        plan = self._plan(operator, side, len(values))
        if not plan.chunks:  # of no element
            return None
        prepared = yield from plan.prepare(context, values)
        outcome = yield from plan.run(context, values, prepared)
        return outcome.sent

    def _plan(self, operator: Operator, side: Side, numel: int) -> SectionPlan:
        """Return the exchange of a side and the values after it; each vector of a factor is encoded separately."""
        found = self._plans.get((side.name, numel))
        if found is None:
            segments = side.vectors()
            if numel > side.numel:
                behind = numel - side.numel
                segments.append(Segment(Parameter("(beside)", (behind,), (1,)), side.numel, 0, behind, dense=True))
            setting = replace(self.setting, segments=segments, chunk_numel=max(1, numel))
            found = self._plans[side.name, numel] = SectionPlan(operator, setting)
        return found
