"""L-GreCo: the dial of each layer, chosen for the fewest bytes within a budget of error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.exchange.codecs import Constant, Draw
from gradwire.exchange.method import Method, Properties, cast_of, is_number, is_whole, operator_of, plain, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome, gathered_values
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment, divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable
from gradwire.methods.levels.qsgd import QSGDinf
from gradwire.methods.wrappers.dial import Dialled
from gradwire.methods.wrappers.wrapper import pieces
from gradwire.seeds import link_seed

PARTS = 10_000
"""Parts of the budget; errors are rounded up to parts."""


def fewest_bytes(
    sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], uniform: int, parts: int = PARTS
) -> list[int]:
    """Choose one candidate a layer for the fewest bytes, with a sum of errors of at most the uniform choice's.

    Errors are rounded up to parts of the budget, and the best choice that then fits is found by dynamic programming,
    where least[b] is the fewest bytes of the layers so far within b parts. So the sum of the errors never exceeds the
    budget, and every choice that uses at most 1 - layers / parts of it is considered. All arithmetic is exact: the same
    numbers give the same choice on any machine.

    Time is layers x candidates x parts steps; memory is a byte for each layer and part.

    Args:
        sizes: Bytes of each layer with each candidate, ``[layers][candidates]``.
        errors: Squared errors, in the same layout, at least 0 and finite.
        uniform: Candidate whose sum of errors over all layers is the budget.
        parts: Number of parts of the budget.

    Returns:
        The candidate of each layer, or the uniform one for all if nothing takes fewer bytes.

    Example:
        >>> fewest_bytes([[4, 8, 16], [40, 80, 160]], [[9.0, 3.0, 1.0], [12.0, 9.0, 2.0]], uniform=1)
        [1, 1]
        >>> fewest_bytes([[4, 8, 16], [40, 80, 160]], [[9.0, 3.0, 0.0], [12.0, 9.0, 2.0]], uniform=1)
        [2, 0]
    """
    default = [uniform] * len(sizes)
    budget = sum((Fraction(row[uniform]) for row in errors), Fraction())
    steps = [[_parts(error, budget, parts) for error in row] for row in errors]
    most = sum(row[uniform] for row in sizes) + 1
    least, taken = np.zeros(parts + 1, dtype=np.int64), []
    for size, step in zip(sizes, steps):
        best = np.full(parts + 1, most, dtype=np.int64)
        chosen = np.zeros(parts + 1, dtype=np.uint8)
        for candidate, (count, share) in enumerate(zip(size, step)):
            if share > parts:
                continue
            total = least[: parts + 1 - share] + count
            fewer = total < best[share:]
            best[share:][fewer] = total[fewer]
            chosen[share:][fewer] = candidate
        least = np.minimum(best, most)
        taken.append(chosen)
    if least[parts] >= most - 1:
        return default
    found, left = [], parts
    for chosen, step in zip(reversed(taken), reversed(steps)):
        found.append(int(chosen[left]))
        left -= step[found[-1]]
    return found[::-1]


def _parts(error: float, budget: Fraction, parts: int) -> int:
    """Round an error up to parts of the budget; an error above the budget has one part more than all."""
    if not error:
        return 0
    return parts + 1 if error > budget else math.ceil(Fraction(error) * parts / budget)


WINDOW = "window"
"""State of a parameter: the sum of the operator's inputs since the last choice."""

DIAL = "dial"
"""Prefix of the stored values, "dial/NAME" for each parameter: the value of its dial."""

TRIALS = 1 << 16
"""Link number that no link has, so that draws for trying candidates are independent of those for gradients."""

FURTHER_SECTION_BYTES = 20
"""Largest overhead of a section of a payload: its length, and zeros up to a multiple of 16."""


@dataclass(frozen=True, kw_only=True)
class LGreCo(Dialled):
    r"""L-GreCo: the value of a dial for each layer, with the fewest bytes at no more error than a uniform value.

    With G_i^l the sum of worker i's inputs to the operator for layer (parameter) l since the last choice, and C_c the
    operator with candidate c::

        e(l, c) = sum_i |C_c(G_i^l) - G_i^l|^2
        choose c(l) to minimise sum_l bytes(l, c(l))  subject to  sum_l e(l, c(l)) <= sum_l e(l, uniform)

    where uniform is the value in ``compressor``. In the last of every ``every`` rounds the workers try all candidates,
    exchange their errors, and add them up in the order of ranks. All of them then solve the same problem, by dynamic
    programming with 10 000 parts of the budget: see :func:`gradwire.methods.wrappers.l_greco.fewest_bytes`. The round
    itself uses the new choice; before the first one all layers have the uniform value. If a sum of errors is not
    finite, the choice is not changed.

    bytes(l, c) is the size of the layer's payload alone, or its maximum if it depends on data; an entropy coder
    (:class:`Coded`) is not considered. Candidates are tried with independent draws, so a choice does not depend on
    later errors, and an unbiased operator stays unbiased.

    ``link.diagnostics()`` returns the current value as ``dial`` of each parameter; ``link.state_dict()["global"]`` has
    it under "dial/NAME".

    **Memory.** One float32 vector as long as the parameters on every rank, without the loss scale under automatic mixed
    precision, and one number a parameter, the same on all ranks. A round with a non-finite value does not change them.

    Args:
        compressor: Operator on one vector with the uniform value, which all workers can gather and whose blocks do not
            cross parameters.
        field: Name of the dial, a numeric field such as "levels", "bits" or "density".
        values: Candidates, with at least one other than the uniform value, which is always a candidate. They are stored
            in ascending order.
        every: Number of rounds between choices.

    Raises:
        HyperparameterError: a field is out of range, ``compressor`` is not such an operator, or it refuses a value.

    The exchange begins when all gradients are computed. ``ErrorFeedback(LGreCo(...))`` works if the operator is a
    contraction with all values; residuals are then part of its input.

    Wire: by a gather, a section for each chosen candidate (``docs/wire-format.md``), and in rounds with a choice the
    float64 error of each layer and candidate.

    Reference: M. Alimohammadi, I. Markov, E. Frantar, D. Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression
    for Efficient and Accurate Deep Learning", MLSys 2024.

    Example:
        >>> import torch, gradwire as gw
        >>> method = gw.method("LGreCo(QSGDinf(levels=7), values=(3, 15), every=1)")
        >>> g = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0))
        >>> grads = [{"a": g[0], "b": 0.1 * g[1], "c": 0.1 * g[2]}] * 2
        >>> chosen = gw.simulate(grads, method).state["global"]
        >>> {name: float(value) for name, value in chosen.items() if name.startswith("dial/")}
        {'dial/a': 15.0, 'dial/b': 3.0, 'dial/c': 3.0}
    """

    compressor: Method = dataclasses.field(default_factory=QSGDinf, kw_only=False)
    field: str = "levels"
    values: tuple[float, ...] = (1, 3, 7, 15, 31)
    every: int = 1000

    name: ClassVar[str] = "l_greco"
    properties: ClassVar[Properties] = Properties(
        summary="For each layer its own levels, bits or density: the fewest bytes, within the error of a uniform one",
        paper="Alimohammadi et al., L-GreCo, MLSys 2024",
        bit_stable=True,
        bits_per_element=2 * (4 + 32 / 512),
        state="a sum of gradients per parameter and rank, a choice per parameter",
        state_bytes_per_element=4.0,
        stream="the compressor's",
    )

    def __post_init__(self) -> None:
        inner, values, every = self.compressor, self.values, self.every
        fits = operator_of(inner) is not None and cast_of(inner) is None and "all_gather" in inner.traits.collectives
        require(
            fits
            and not (inner.traits.joined or inner.traits.whole_step or inner.traits.direction)
            and inner.properties.bit_stable,
            "LGreCo",
            "compressor is an operator on one vector that can be gathered, with blocks of a parameter, such as "
            f"QSGDinf(), not {inner!r}",
        )
        uniform = self.dial
        listed = isinstance(values, tuple | list) and all(is_number(value) for value in values)
        require(listed, "LGreCo", f"values is a tuple of numbers for {self.field}, not {values!r}")
        object.__setattr__(self, "values", tuple(sorted(set(map(plain, values)))))
        others = set(values) - {uniform}
        most = 1 <= len(others) <= 255
        require(most, "LGreCo", f"values has 1 to 255 others than {self.field}={uniform!r}, not {values!r}")
        require(is_whole(every, 1), "LGreCo", f"every is a number of rounds, not {every!r}")
        self.check_variants()

    def refusal_of_feedback(self, unseen: str) -> str | None:
        return None

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            collectives=("all_gather",),
            re_encoding=False,
            whole_step=True,
            needs_loss_scale=True,
            kernels=tuple(dict.fromkeys((*traits.kernels, "moments"))),
            remembers=(WINDOW, DIAL),
            own=(WINDOW,),
            unbiased_note=self.compressor.traits.unbiased_note,
        )

    @cached_property
    def variants(self) -> tuple[Method, ...]:
        """Variants of the operator, one for each candidate, in ascending order."""
        return tuple(self.turned(value) for value in sorted({*self.values, self.dial}))

    def is_due(self, round: int) -> bool:
        """Return whether a choice is made in ``round``."""
        return round >= 0 and (round + 1) % self.every == 0

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _LayerPlan(self, setting)


class _LayerPlan(BucketPlan):
    """Plan with a section for each operator chosen for a bucket's parameters."""

    def __init__(self, method: LGreCo, setting: PlanSetting) -> None:
        self._method, self._setting = method, setting
        self._operators = [found for m in method.variants if (found := m.as_operator) is not None]
        self._dials = [float(method.dial_of(m)) for m in method.variants]
        self._uniform = self._dials.index(float(method.dial))
        # The order of names does not depend on buckets.
        self._layers = sorted(divide(setting.segments)[0], key=lambda s: s.parameter.name)
        self._plans: dict[tuple[int, ...], SectionPlan] = {}
        first = self._plan_of([self._uniform] * len(self._layers))
        self.chunks, self.collective, self.runs, self._tag = first.chunks, first.collective, first.runs, first.tag

    def _plan_of(self, choice: Sequence[int]) -> SectionPlan:
        """Return the plan of a choice; the last one is cached."""
        key = tuple(choice)
        if key not in self._plans:
            others = {s.parameter.name: self._operators[c] for s, c in zip(self._layers, choice)}
            self._plans = {key: SectionPlan(self._operators[self._uniform], self._setting, others)}
        return self._plans[key]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        choice, due = self._chosen(context), self._layers and self._method.is_due(context.round)
        if flat.is_meta:
            if due:
                errors = torch.empty(len(self._layers), len(self._dials), dtype=torch.float64, device="meta")
                yield from self._told(context, errors)
        elif self._layers:
            window = self._added_up(context, flat)
            if due:
                everyone = yield from self._told(context, self._errors(context, window))
                choice = self._choose(everyone, choice)
                window.zero_()
                for s, candidate in zip(self._layers, choice):
                    dial = torch.tensor(self._dials[candidate], dtype=torch.float64, device="cpu")
                    context.memory.stage_value(f"{DIAL}/{s.parameter.name}", dial)
        plan = self._plan_of(choice)
        return plan, (yield from plan.prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        plan: SectionPlan
        plan, inner = prepared
        return (yield from plan.run(context, flat, inner))

    def _chosen(self, context: Context) -> list[int]:
        """Return the stored candidate of each layer, or the uniform one if it is not a candidate."""
        found = []
        for s in self._layers:
            dial = context.memory.value(f"{DIAL}/{s.parameter.name}")
            known = dial is not None and float(dial) in self._dials
            found.append(self._dials.index(float(dial)) if dial is not None and known else self._uniform)
        return found

    def _added_up(self, context: Context, flat: torch.Tensor) -> torch.Tensor:
        """Add the bucket to the stored sum, and return the staged sum."""
        segments = self._setting.segments
        held, staged = context.memory.read(WINDOW, segments), context.memory.stage(WINDOW, segments)
        for a, b in pieces(sorted((s.offset, s.offset + s.numel) for s in self._layers)):
            torch.add(held[a:b], flat[a:b], alpha=1 / context.loss_scale, out=staged[a:b])
        return staged

    def _errors(self, context: Context, window: torch.Tensor) -> torch.Tensor:
        """Return the squared error of each candidate, float64 ``[layers, candidates]``, with this rank's draws."""
        kernels, seed = self._setting.kernels, link_seed(self._setting.seed, TRIALS)
        ordered = sorted(self._layers, key=lambda s: s.offset)
        place = {s.parameter.name: i for i, s in enumerate(ordered)}
        table = _table(ordered)
        draw, every = Draw(context.round, context.rank), Constant(torch.arange(len(ordered), device="cpu"))
        found = []
        for operator in self._operators:
            codec = operator.codec(kernels, ordered, context.world_size, seed)
            summary, off = codec.summarise(window), window.clone()
            summary = summary.select(every, summary.shared)
            body = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8, device="cpu")
            codec.encode(off, summary, draw, body)
            codec.add_own(body, codec.remember(summary, off, draw, True), -1.0, off)
            moments = kernels.moments(off, table)
            found.append(torch.where(torch.isfinite(moments.max_abs), moments.norm.square(), torch.inf))
        index = torch.tensor([place[s.parameter.name] for s in self._layers], device="cpu")
        return torch.stack(found, 1)[index]

    def _told(self, context: Context, errors: torch.Tensor) -> Exchange[torch.Tensor]:
        return gathered_values(dataclasses.replace(context, exchange=2), self._tag, errors)

    def _choose(self, everyone: torch.Tensor, before: list[int]) -> list[int]:
        """Return the candidates for the errors of all ranks, ``[ranks, layers, candidates]``."""
        total = everyone[0].clone()
        for errors in everyone[1:]:
            total += errors
        if not bool(torch.isfinite(total).all()):
            return before
        choice = fewest_bytes(self._sizes, total.tolist(), self._uniform)
        saved = sum(row[self._uniform] - row[c] for row, c in zip(self._sizes, choice))
        further = len(set(choice)) - 1
        return choice if saved > further * FURTHER_SECTION_BYTES else [self._uniform] * len(choice)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Bytes of each layer's payload alone, for each candidate."""
        setting = self._setting

        def size(segment: Segment, operator: Operator) -> int:
            codec = operator.codec(setting.kernels, [segment], setting.world_size, setting.seed)
            return codec.payload_bytes(codec.units)

        return [[size(s, operator) for operator in self._operators] for s in self._layers]


def _table(segments: Sequence[Segment]) -> SegmentTable:
    numel = [s.numel for s in segments]
    return SegmentTable([s.offset for s in segments], numel, [0] * len(numel), [(0, 0)] * len(numel))
