"""A schedule around any method with a dial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from gradwire.compressors import Compressor, TopK
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.methods import Inherited, Method, Properties, require
from gradwire.protocols.bucket_plan import Algorithm, BucketPlan, PlanSetting
from gradwire.segments import Parameter
from gradwire.wrappers.schedule import CURVES, ScheduledPlan, first_rounds, points_of
from gradwire.wrappers.wrapper import Wrapper

__all__ = ["MOST_STAGES", "Scheduled"]

MOST_STAGES = 64
"""Each has a plan of its own for every bucket."""

STEP = "step"

ALIKE = (
    "collectives",
    "re_encoding",
    "cut",
    "share_cut",
    "whole_step",
    "joined",
    "direction",
    "owns_momentum",
    "needs_loss_scale",
    "needs_optimizer",
    "remembers",
    "min_numel",
)
"""What the link asks of a method once, for all rounds."""

PROBE = Parameter("(probe)", (1 << 12, 1 << 12), (1 << 12, 1))
"""A matrix that is larger than any dial."""


@dataclass(frozen=True, kw_only=True)
class Scheduled(Wrapper):
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
    with Variable Communication Rates", 2024, section 4.

    Example:
        >>> import torch, gradwire as gw
        >>> method = gw.method("Scheduled(TopK(density=0.01), field='density', start=0.16, rounds=8, stages=2)")
        >>> [(first, m.density) for first, m in method.stage_methods]
        [(0, 0.16), (4, 0.04), (8, 0.01)]
        >>> g = torch.arange(1.0, 1001.0)[None]
        >>> [int(gw.simulate(g, method, round=r).mean.count_nonzero()) for r in (3, 4, 8)]
        [160, 40, 10]
    """

    compressor: Method = dataclasses.field(default_factory=lambda: TopK(density=0.001))
    field: str = "density"
    start: float | tuple[float, ...] = 0.25
    schedule: str = "exponential"
    rounds: float = 1000
    stages: int | None = None

    name: ClassVar[str] = "scheduled"
    unbiased_note: ClassVar[str | None] = None
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
            isinstance(inner, Algorithm | Compressor) and not isinstance(inner, Scheduled),
            "Scheduled",
            f"compressor is a method with a dial, such as TopK(density=0.001), not {inner!r}",
        )
        step = self.schedule == STEP
        known = (*CURVES, STEP)
        require(self.schedule in known, "Scheduled", f"schedule is one of {known}, not {self.schedule!r}")
        require(isinstance(self.field, str), "Scheduled", f"field is the name of a field, not {self.field!r}")
        end = self._dial
        require(_number(self.rounds) and self.rounds > 0, "Scheduled", f"rounds is above 0, not {self.rounds!r}")
        if step:
            listed = isinstance(start, tuple | list) and bool(start) and all(_number(value) for value in start)
            require(listed, "Scheduled", f"start is a tuple of values for schedule='step', not {start!r}")
            object.__setattr__(self, "start", tuple(start))  # type: ignore[arg-type]
        else:
            require(_number(start), "Scheduled", f"start is a number for schedule={self.schedule!r}, not {start!r}")
            needs_sign = self.schedule in ("exponential", "reciprocal")
            require(
                not needs_sign or start * end > 0,  # type: ignore[operator]
                "Scheduled",
                f"schedule={self.schedule!r} goes between numbers of one sign, not from {start!r} to {end!r}",
            )
        given = len(start) if step else None  # type: ignore[arg-type]
        count = given or 4 if self.stages is None else self.stages
        whole = isinstance(count, int) and not isinstance(count, bool)
        fits = whole and 1 <= count <= min(MOST_STAGES, math.ceil(self.rounds)) and given in (None, count)
        told = f"as many as start has values, {given}" if given else f"1 to {MOST_STAGES}"
        require(fits, "Scheduled", f"stages is {told}, and at most rounds={self.rounds!r}, not {count!r}")
        object.__setattr__(self, "stages", count)
        self._check_stages()

    @property
    def _dial(self) -> float:
        """Find the last value of the dial."""
        value = getattr(_holder(self.compressor, self.field), self.field)
        require(
            _number(value), "Scheduled", f"{self.field}={value!r} of {self.compressor!r} is no number to begin with"
        )
        return value  # type: ignore[no-any-return]

    @cached_property
    def stage_methods(self) -> tuple[tuple[int, Method], ...]:
        """The first round of each stage, and its method; equal values one after the other are one stage."""
        end, rounds, count = self._dial, self.rounds, int(self.stages or 1)
        if isinstance(self.start, tuple):
            values = list(self.start)
        else:
            values = points_of(self.schedule, self.start, end, rounds, count)
        whole = "float" not in _fields(_holder(self.compressor, self.field))[self.field]
        found: list[tuple[int, Method]] = []
        for first, value in zip(first_rounds(rounds, count), [*values, end]):
            method = _turned(self.compressor, self.field, math.floor(value + 0.5) if whole else value)
            if not found or found[-1][1] != method:
                found.append((first, method))
        return tuple(found)

    def _check_stages(self) -> None:
        last = self.compressor
        for _, method in self.stage_methods:
            at = f"{self.field}={getattr(_holder(method, self.field), self.field)!r}"
            for name in ALIKE:
                ours, theirs = getattr(method, name), getattr(last, name)
                require(
                    ours == theirs,
                    "Scheduled",
                    f"with {at}, {last!r} has {name}={ours!r}, and not {theirs!r} as at the end",
                )
            for kind in last.remembers:
                sizes = [m.remembered_numel(kind, PROBE) for m in (method, last)]
                require(
                    sizes[0] == sizes[1],
                    "Scheduled",
                    f"with {at}, {last!r} keeps a {kind} of another size than at the end, so that it could not go on "
                    f"from stage to stage; schedule another field than {self.field!r}",
                )

    @property
    def _methods(self) -> list[Method]:
        return [method for _, method in self.stage_methods]

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether the method is with all values of the dial."""
        return all(method.unbiased for method in self._methods)

    @property
    def kernels(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of all stages."""
        return tuple(dict.fromkeys(family for method in self._methods for family in method.kernels))

    @property
    def open_coders(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the method."""
        return self.compressor.open_coders if isinstance(self.compressor, Algorithm) else ()

    def with_coder(self, coder: str) -> Algorithm:
        inner = self.compressor
        return replace(self, compressor=inner.with_coder(coder)) if isinstance(inner, Algorithm) else self

    @property
    def omega_formula(self) -> str | None:  # type: ignore[override]
        """That of the method, where it has one with all values."""
        return None if self.omega is None else _of_worst(self.compressor.omega_formula)

    @property
    def delta_formula(self) -> str | None:
        """That of the method, where it has one with all values."""
        return None if self.delta is None else _of_worst(self.compressor.delta_formula)

    def omega_of(self, numel: int | None = None) -> float | None:
        return _all_known([method.omega_of(numel) for method in self._methods], max)

    def delta_of(self, numel: int | None = None) -> float | None:
        return _all_known([method.delta_of(numel) for method in self._methods], min)

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        return _all_known([method.usual_delta_of(numel) for method in self._methods], min)

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        return self.compressor.remembered_numel(kind, parameter)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        told = (method.caution(optimizer, parameters) for method in reversed(self._methods))
        return next((sentence for sentence in told if sentence is not None), None)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        plans = [setting.plan(method) for method in self._methods]
        try:
            return ScheduledPlan(plans, [first for first, _ in self.stage_methods])
        except ValueError as error:
            raise IncompatibleError(
                f"{self!r}: {error}, since what is compressed, or how it is cut, depends on {self.field!r}: schedule "
                "another field"
            ) from None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fields(method: Method) -> dict[str, str]:
    """Map the names of a method's fields to their types, as they are written."""
    return {f.name: str(f.type) for f in dataclasses.fields(method)}


def _holder(method: Method, name: str) -> Method:
    """Find the outermost method with a field of that name, among one and those that it is around."""
    inner: object = method
    while isinstance(inner, Method):
        if name in _fields(inner):
            return inner
        inner = getattr(inner, "compressor", None)
    raise HyperparameterError(f"Scheduled: {method!r} has no field {name!r}")


def _turned(method: Method, name: str, value: float) -> Method:
    """Return a method with its dial at another value.

    Raises:
        HyperparameterError: it does not take that value.
    """
    if name in _fields(method):
        return replace(method, **{name: value})
    inner: Method = method.compressor  # type: ignore[attr-defined]
    return replace(method, compressor=_turned(inner, name, value))  # type: ignore[call-arg]


def _all_known(found: list[float | None], worst: Any) -> float | None:
    return None if None in found else worst(found)


def _of_worst(formula: str | None) -> str | None:
    return None if formula is None else f"{formula}, of the worst stage"
