"""Schedules: methods whose dial changes with the round."""

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
from gradwire.exchange.method import Inherited, Method, Properties, is_number, is_whole, plain, require
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
"""Curves by name: the value of a schedule from ``start`` to ``end`` after a given part, 0 to 1."""


def first_rounds(rounds: float, stages: int) -> list[int]:
    """Return the first round of each of ``stages`` equal stages of a schedule, and the first round after them.

    A round is in stage i if it is at least i / stages of ``rounds``, and less than (i + 1) / stages.

    Example:
        >>> first_rounds(10, 4)
        [0, 3, 5, 8, 10]
    """
    return [math.ceil(Fraction(rounds) * i / stages) for i in range(stages + 1)]


def points_of(curve: str, start: float, end: float, rounds: float, stages: int) -> list[float]:
    """Return the value of each stage, which is the curve's in the first round of the stage.

    All but the first are rounded to six digits. Powers and cosines of libraries differ in the last bit, and workers on
    different machines must send the same number of elements.

    Example:
        >>> points_of("exponential", 0.25, 0.001, 4, 4)
        [0.25, 0.0628717, 0.0158114, 0.00397635]
    """
    later = first_rounds(rounds, stages)[1:-1]
    return [start, *(float(f"{CURVES[curve](start, end, first / rounds):.6g}") for first in later)]


class ScheduledPlan(BucketPlan):
    """Plan that exchanges a bucket by the plan of a round's stage.

    The stage depends only on the round, so that all ranks agree and a resumed training continues in it. A round below
    0, which dry runs use for a usual round, is in the last stage.

    Args:
        stages: Plans of the bucket by methods that differ in a dial, such as a density, but not in the parameters that
            they compress or in how they cut them.
        first: The first round of each stage, ascending from 0.

    Raises:
        ValueError: the plans cut the bucket into different chunks, or use different collectives.
    """

    def __init__(self, stages: Sequence[BucketPlan], first: Sequence[int]) -> None:
        last = stages[-1]
        self._stages, self._first = stages, first
        self.chunks, self.collective, self.runs = last.chunks, last.collective, last.runs
        self.asynchronous, self.keeps_dtype, self.dtype = last.asynchronous, last.keeps_dtype, last.dtype
        # In rounds of a stage without work at the end, finish does nothing.
        self.finishes = any(stage.finishes for stage in stages)
        if any(_layout(stage) != _layout(last) for stage in stages):
            raise ValueError("stages of a schedule exchange a bucket in different parts")

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        return (yield from self._stage(context).prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return (yield from self._stage(context).run(context, flat, prepared))

    def finish(self, context: Context) -> Exchange[None]:
        return self._stage(context).finish(context)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self._stage(context).target_(context, gradient)

    def _stage(self, context: Context) -> BucketPlan:
        return self._stages[-1 if context.round < 0 else bisect_right(self._first, context.round) - 1]


def _layout(plan: BucketPlan) -> tuple[Any, ...]:
    runs = [list(chunk) for chunk in plan.runs]
    return plan.chunks, plan.collective, plan.asynchronous, plan.keeps_dtype, runs


MOST_STAGES = 64
"""Largest number of stages, each of which has its own plan for every bucket."""

STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Scheduled(Dialled):
    r"""A method whose dial, such as a density or a number of bits, changes with the round.

    The dial goes from ``start`` to the value in ``compressor``, which it has from round T = ``rounds`` on. With
    u = t / T, a = ``start`` and b the final value, round t < T has::

        linear         a + u (b - a)
        exponential    a (b / a)^u
        cosine         b + (a - b) (1 + cos(pi u)) / 2
        reciprocal     1 / (1 / a + u (1 / b - 1 / a))
        step           start[i]  in the i-th of as many equal parts

    Time is quantised: T has ``stages`` equal stages, at most 64, each with the value of its first round. Values are
    rounded to six digits, and to integers if the dial is one. They depend only on the round, so they are the same on
    all workers and in a resumed training. Rounds in float32 at the start (``warmup_steps`` of :func:`attach`) are
    counted.

    DGC's warm-up has the densities 25, 6.25, 1.5625 and 0.4 % for an epoch of R rounds each, then 0.1 %. Use an
    exponential from 0.25 to 0.001 in ``rounds=4 * R``, or, for exactly these values,
    ``start=(0.25, 0.0625, 0.015625, 0.004)`` and ``schedule="step"``. VARCO's compression ratio c goes linearly from
    c_max to c_min by round (T' - 2) / a of T', and the dial is 1 / c: ``start=1 / c_max``, ``schedule="reciprocal"``,
    ``rounds=(T' - 2) / a`` around ``RandK(density=1 / c_min)``.

    **Memory.** Residuals, momenta and shifts belong to parameters and are kept from stage to stage. A dial on which the
    size of the state depends, such as the rank of :class:`PowerSGD`'s factors, is refused.

    **Properties.** The method is unbiased if it is with every value; ``omega`` and ``delta`` are those of the worst
    value; bytes of a dry run and bits per element are those of the last stage.

    Args:
        compressor: The method, with the final value of the dial. The dial may be that of a wrapped method, as in
            ``ErrorFeedback(TopK(density=0.001))``.
        field: Name of the dial, the outermost numeric field of that name.
        start: Value in round 0; for ``schedule="step"`` a tuple of the values of all stages except the last.
        schedule: "exponential", "linear", "cosine", "reciprocal" or "step".
        rounds: T, the first round with the final value.
        stages: Number of parts of T, 1 to 64 and at most ``rounds``; None: four, or the number of values in ``start``.

    Raises:
        HyperparameterError: a field is out of range, or with a value of the schedule the method is invalid, or has
            other protocols or other state than with the final value.
        IncompatibleError: when attached, if the choice of parameters to compress depends on the dial.

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
            object.__setattr__(self, "start", tuple(map(plain, start)))  # type: ignore[arg-type]
        else:
            require(is_number(start), "Scheduled", f"start is a number for schedule={self.schedule!r}, not {start!r}")
            needs_sign = self.schedule in ("exponential", "reciprocal")
            require(
                not needs_sign or start * end > 0,  # type: ignore[operator]
                "Scheduled",
                f"schedule={self.schedule!r} goes between numbers of one sign, not from {start!r} to {end!r}",
            )
            object.__setattr__(self, "start", plain(start))  # type: ignore[arg-type]
        object.__setattr__(self, "rounds", plain(self.rounds))
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
        """First round and method of each stage; consecutive equal values are one stage."""
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
        """Method of each stage."""
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
