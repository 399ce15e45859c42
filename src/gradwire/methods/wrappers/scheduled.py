"""Schedules: exchanges that change with the round."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Inherited, Method, Properties, is_number, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.traits import Traits
from gradwire.methods.sparse.top_k import TopK
from gradwire.methods.wrappers.dial import Dialled

CURVES: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, part: start + part * (end - start),
    "exponential": lambda start, end, part: start * (end / start) ** part,
    "cosine": lambda start, end, part: end + (start - end) * (1 + math.cos(math.pi * part)) / 2,
    "reciprocal": lambda start, end, part: 1 / (1 / start + part * (1 / end - 1 / start)),
}
"""By name, the value of a schedule from ``start`` to ``end`` of which that part, 0 to 1, has passed."""


def first_rounds(rounds: float, stages: int) -> list[int]:
    """Return the first round of each of so many equal stages of a schedule, and of what follows them.

    A round is of stage i if it is at least i / stages of ``rounds``, and less than (i + 1) / stages.

    Example:
        >>> first_rounds(10, 4)
        [0, 3, 5, 8, 10]
    """
    return [math.ceil(Fraction(rounds) * i / stages) for i in range(stages + 1)]


def points_of(curve: str, start: float, end: float, rounds: float, stages: int) -> list[float]:
    """Return the value of each stage: that of the curve in its first round.

    All but the first are rounded to six digits. Powers and cosines of libraries differ in the last bit, and workers on
    unlike machines must not differ in how many elements they send.

    Example:
        >>> points_of("exponential", 0.25, 0.001, 4, 4)
        [0.25, 0.0628717, 0.0158114, 0.00397635]
    """
    later = first_rounds(rounds, stages)[1:-1]
    return [start, *(float(f"{CURVES[curve](start, end, first / rounds):.6g}") for first in later)]


class ScheduledPlan(BucketPlan):
    """Exchanges a bucket by the plan of the stage that a round belongs to.

    The stage is a function of the round alone, so that all ranks take the same and a training that is resumed goes on
    in it. A round below 0, which dry runs take for a usual one, belongs to the last stage.

    Args:
        stages: Plans of one bucket by methods that differ in a dial, such as a density, but neither in what they
            compress nor in how they cut it.
        first: The first round of each stage, ascending from 0.

    Raises:
        ValueError: the plans cut the bucket into different chunks, or travel by different collectives.
    """

    def __init__(self, stages: Sequence[BucketPlan], first: Sequence[int]) -> None:
        last = stages[-1]
        self._stages, self._first = stages, first
        self.chunks, self.collective, self.runs = last.chunks, last.collective, last.runs
        self.asynchronous, self.keeps_dtype = last.asynchronous, last.keeps_dtype
        if any(_layout(stage) != _layout(last) for stage in stages):
            raise ValueError("stages of a schedule exchange a bucket in different parts")

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        return (yield from self._stage(context).prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return (yield from self._stage(context).run(context, flat, prepared))

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self._stage(context).target_(context, gradient)

    def _stage(self, context: Context) -> BucketPlan:
        return self._stages[-1 if context.round < 0 else bisect_right(self._first, context.round) - 1]


def _layout(plan: BucketPlan) -> tuple[Any, ...]:
    runs = [list(chunk) for chunk in plan.runs]
    return plan.chunks, plan.collective, plan.asynchronous, plan.keeps_dtype, runs


MOST_STAGES = 64
"""Each has a plan of its own for every bucket."""

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Scheduled(Dialled):
    r"""Any method with a dial, such as a density or a number of bits, that changes with the round.

    The dial goes from ``start`` to the value that ``compressor`` holds, which it has from round T = ``rounds`` on. With
    u = t / T and values a = ``start`` and b at the end, round t < T has::

        linear         a + u (b - a)
        exponential    a (b / a)^u
        cosine         b + (a - b) (1 + cos(pi u)) / 2
        reciprocal     1 / (1 / a + u (1 / b - 1 / a))
        step           start[i]  in the i-th of as many equal parts

    quantised in time: T has ``stages`` equal stages, each with the value of its first round, at most 64. Values are
    rounded to six digits, and to whole numbers where the dial is one. They are functions of the round alone: the same
    on all workers, and a training that is resumed goes on as it would have. Rounds in float32 at the start
    (``warmup_steps`` of :func:`attach`) count among them.

    DGC's warm-up has the densities 25, 6.25, 1.5625 and 0.4 % for an epoch of R rounds each, then 0.1 %: an exponential
    from 0.25 to 0.001 in ``rounds=4 * R``, or exactly those by ``start=(0.25, 0.0625, 0.015625, 0.004)`` and
    ``schedule="step"``. VARCO's compression ratio c goes linearly from c_max to c_min by round (T' - 2) / a of T', the
    dial being 1 / c: ``start=1 / c_max``, ``schedule="reciprocal"``, ``rounds=(T' - 2) / a`` around
    ``RandK(density=1 / c_min)``.

    **Memory.** Residuals, momenta and shifts belong to parameters and go on from stage to stage. A dial on which the
    size of what is remembered depends, such as the rank of :class:`PowerSGD`'s factors, is refused.

    **Properties.** It is unbiased if it is with every value; ``omega`` and ``delta`` are those of the worst value;
    bytes of a dry run, and bits per element, are those of the last stage.

    Args:
        compressor: The method, with the last value of the dial. It may be around another, whose dial it then may be:
            ``ErrorFeedback(TopK(density=0.001))``.
        field: The name of the dial, a number: the outermost field of that name.
        start: The value in round 0; for ``schedule="step"`` a tuple of those of all stages but the last.
        schedule: "exponential", "linear", "cosine", "reciprocal" or "step".
        rounds: T, in which the last value is reached.
        stages: Into how many parts T is divided, 1 to 64 and no more than there are rounds; None: four, or as many as
            ``start`` has values.

    Raises:
        HyperparameterError: a field is out of range, or the method does not take a value of the schedule, or with one
            of them travels, or remembers, otherwise than with the last.
        IncompatibleError: when attached: what is compressed depends on the dial.

    Reference: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression", ICLR 2018, section 3.3;
    J. Cervino, M. A. Turja, H. Mostafa, N. Himayat, A. Ribeiro, "Distributed Training of Large Graph Neural Networks
    with Variable Communication Rates", 2024.

    Example:
        >>> import torch, gradwire as gw
        >>> method = gw.method("Scheduled(TopK(density=0.01), field='density', start=0.16, rounds=8, stages=2)")
        >>> [(first, m.density) for first, m in method.stage_methods]
        [(0, 0.16), (4, 0.04), (8, 0.01)]
        >>> g = torch.arange(1.0, 1001.0)[None]
        >>> [int(gw.simulate(g, method, round=r).mean.count_nonzero()) for r in (3, 4, 8)]
        [160, 40, 10]
    """

    compressor: Method = dataclasses.field(default_factory=lambda: TopK(density=0.001), kw_only=False)
    field: str = "density"
    start: float | tuple[float, ...] = 0.25
    schedule: str = "exponential"
    rounds: float = 1000
    stages: int | None = None

    name: ClassVar[str] = "scheduled"
    properties: ClassVar[Inherited] = Inherited(
        "compressor",
        Properties(
            summary="Another method with a dial, such as a density, that changes with the round",
            paper="Lin et al., Deep Gradient Compression, ICLR 2018; Cervino et al., 2024",
            bit_stable=True,
            bits_per_element=2 * 0.001 * (32 + 11.5),
            state="the method's",
            stream="the method's",
        ),
    )

    def __post_init__(self) -> None:
        inner, start = self.compressor, self.start
        require(
            isinstance(inner, Method)
            and bool(inner.traits.collectives)
            and not (inner.traits.local_steps or inner.cast_dtype is not None or inner.name == self.name),
            "Scheduled",
            f"compressor is a method with a dial, such as TopK(density=0.001), not {inner!r}",
        )
        step = self.schedule == STEP
        known = (*CURVES, STEP)
        require(self.schedule in known, "Scheduled", f"schedule is one of {known}, not {self.schedule!r}")
        end = self.dial
        require(is_number(self.rounds, above=0), "Scheduled", f"rounds is above 0, not {self.rounds!r}")
        if step:
            listed = isinstance(start, tuple | list) and bool(start) and all(is_number(value) for value in start)
            require(listed, "Scheduled", f"start is a tuple of values for schedule='step', not {start!r}")
            object.__setattr__(self, "start", tuple(start))  # type: ignore[arg-type]
        else:
            require(is_number(start), "Scheduled", f"start is a number for schedule={self.schedule!r}, not {start!r}")
            needs_sign = self.schedule in ("exponential", "reciprocal")
            require(
                not needs_sign or start * end > 0,  # type: ignore[operator]
                "Scheduled",
                f"schedule={self.schedule!r} goes between numbers of one sign, not from {start!r} to {end!r}",
            )
        given = len(start) if step else None  # type: ignore[arg-type]
        count = given or 4 if self.stages is None else self.stages
        fits = is_whole(count, 1, min(MOST_STAGES, math.ceil(self.rounds))) and given in (None, count)
        told = f"as many as start has values, {given}" if given else f"1 to {MOST_STAGES}"
        require(fits, "Scheduled", f"stages is {told}, and at most rounds={self.rounds!r}, not {count!r}")
        object.__setattr__(self, "stages", count)
        self.check_variants()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased_note=None,
        )

    @cached_property
    def stage_methods(self) -> tuple[tuple[int, Method], ...]:
        """The first round of each stage, and its method; equal values one after the other are one stage."""
        end, rounds, count = self.dial, self.rounds, int(self.stages or 1)
        if isinstance(self.start, tuple):
            values = list(self.start)
        else:
            values = points_of(self.schedule, self.start, end, rounds, count)
        found: list[tuple[int, Method]] = []
        for first, value in zip(first_rounds(rounds, count), [*values, end]):
            method = self.turned(value)
            if not found or found[-1][1] != method:
                found.append((first, method))
        return tuple(found)

    @property
    def variants(self) -> list[Method]:
        """The method of each stage."""
        return [method for _, method in self.stage_methods]

    def plan(self, setting: PlanSetting) -> BucketPlan:
        plans = [method.plan(setting) for method in self.variants]
        try:
            return ScheduledPlan(plans, [first for first, _ in self.stage_methods])
        except ValueError as error:
            raise IncompatibleError(
                f"{self!r}: {error}, since what is compressed, or how it is cut, depends on {self.field!r}: schedule "
                "another field"
            ) from None
