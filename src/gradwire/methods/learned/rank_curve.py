"""RankCurve: the leader's largest elements, with values read from a curve over their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.ops import Exchange, Reduce
from gradwire.exchange.protocols import Context, Outcome, leader
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.protocols.memory import WORKERS
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.feedback.waiting import longest, momentum_beside_residual
from gradwire.methods.learned.autoencoder import ElementScales
from gradwire.methods.learned.phases import PhasedPlan
from gradwire.methods.low_rank.float_means import Beside, mean_of_floats
from gradwire.methods.sparse.clt_k import LeadersElements, LeadersPlan
from gradwire.methods.sparse.top_k import TopK, check_density

CURVE, FITTED = "rank_curve", "rank_curve_rounds"
"""State, the same on all ranks: the sum of the curves of the second phase's rounds, and the number of these rounds.
Beside them is the number of workers, :data:`WORKERS`."""


@dataclass(frozen=True, kw_only=True)
class RankCurve(ResidualAlgorithm):
    r"""The leader's largest elements in its order, and no values: these are read from a curve that was fitted before.

    It is what remains of :class:`LGC` by all-reduce without its autoencoder. The phases, the residual e_i, the leader
    of a round, its k = max(1, floor(density d)) largest elements of each parameter and their order, descending by its
    values, are those of :class:`LGC`. With p_i = g_i + e_i, x(r) the value of x at the element of rank r in that order,
    and s the root mean square of the leader's k values, a number for each parameter::

        phase 2     mean(r) = (1 / N) sum_i p_i(r)   as CLTk; curve(r) = mean over the phase's rounds of mean(r) / s
        phase 3     mean(r) = s curve(r)             0 at all other elements, in both phases

    In phase 3 a round sends positions, their order in log2(k) bits an element, and a scale for each parameter. Every
    rank computes the curve from values that all receive in phase 2, so nothing is trained or sent at its end.

    The curve is the mean's expectation given the leader's order: it falls with the number of workers, whose values at
    the leader's elements cancel, and knows nothing of the other workers' values in the round. Its error is lost with
    ``feedback="selection"``, as LGC's is. ``docs/lgc.md`` has the errors of both, and of values in a few bits. With
    another number of workers after a checkpoint, or other members, it is fitted anew, in as many rounds.

    **Memory.** A residual as long as the parameters on every rank, without the loss scale under automatic mixed
    precision, and one number for each chosen element.

    Args:
        density: Share k/d of each parameter's elements that are chosen, above 0 to 1.
        full_rounds: Rounds of the first phase, in float32, 0 or more, including ``warmup_steps`` of :func:`attach`.
        training_rounds: Rounds of the second phase, 1 or more. Those with a value that is not finite do not count.
        feedback: "selection": the residual is p_i with zeros at the chosen elements. "reconstruction": it is p_i less
            the mean, so that nothing is lost, and residuals may grow as the curve is no contraction of the values of
            workers that do not lead.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range.

    The exchange begins when all gradients are computed. Parameters that are not compressed are sent in float32.

    Wire: ``docs/wire-format.md``.

    Reference: none; the ablation of L. Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning",
    IEEE TNNLS 2021, in ``docs/lgc.md``.

    Example:
        >>> import torch, gradwire as gw
        >>> link = gw.SimulatedLink(
        ...     [("w", torch.empty(4))], gw.RankCurve(density=0.5, full_rounds=0, training_rounds=1), 1, min_numel=0
        ... )
        >>> link.reduce_(torch.tensor([[3.0, 0.0, -1.0, 0.5]])).tolist()
        [3.0, 0.0, -1.0, 0.0]
        >>> mean = link.reduce_(torch.tensor([[0.0, -2.0, 0.0, 5.5]]))  # the residual adds 0.5
        >>> mean.round(decimals=3).tolist()
        [0.0, -2.0, 0.0, 6.0]
    """

    density: float = 0.001
    full_rounds: int = 200
    training_rounds: int = 300
    feedback: str = "selection"
    momentum: float = 0.0

    name: ClassVar[str] = "rank_curve"
    tag: ClassVar[int] = 56
    properties: ClassVar[Properties] = Properties(
        summary="Positions and order of one worker's largest elements, values from a curve over their ranks",
        paper="the ablation of Abrahamyan et al., IEEE TNNLS 2021",
        bit_stable=True,
        bits_per_element=0.001 * (11.5 + 10) * 2 * 2 / 3,
        state="a residual per parameter and rank, a curve",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("RankCurve", self.density))
        object.__setattr__(self, "momentum", checked_momentum("RankCurve", self.momentum))
        for name, least in (("full_rounds", 0), ("training_rounds", 1)):
            value = getattr(self, name)
            wanted = f"{name} is a number of rounds, at least {least}, not {value!r}"
            require(is_whole(value, least), "RankCurve", wanted)
        known = self.feedback in ("selection", "reconstruction")
        require(known, "RankCurve", f"feedback is 'selection' or 'reconstruction', not {self.feedback!r}")

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            collectives=("two_shot", "all_gather"),
            whole_step=True,
            kernels=("selection", "indices", "signs"),
            remembers=(*traits.remembers, WORKERS, CURVE, FITTED),
            of_ranks=(*traits.of_ranks, WORKERS, CURVE, FITTED),
            subtracts_mean=self.feedback == "reconstruction",
            unbiased=False,
        )

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        delta = TopK(density=self.density).delta_of(longest(parameters)) or 0.0
        return momentum_beside_residual(self, optimizer, delta=delta)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if not divide(setting.segments)[0]:
            return self.dense_plan(setting)
        setting = replace(setting, chunk_numel=max(1, sum(s.numel for s in setting.segments)))
        return self._after_momentum(_CurvedPlan(self, setting, _Fit(self, setting), _Curved(self, setting)), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return super().dense_plan(replace(setting, collective="two_shot"))


class _CurvedPlan(PhasedPlan):
    """Plan whose second phase goes on until there is a curve of as many rounds as it is meant to have."""

    def __init__(self, method: RankCurve, setting: PlanSetting, learning: _Fit, learned: _Curved) -> None:
        super().__init__(method, setting, learning, learned)
        self._numel, self._rounds = learning.elements.numel, method.training_rounds

    def phase(self, context: Context) -> int:
        found = super().phase(context)
        if found < 2 or context.workspace.device == "meta":
            return found
        kept = fitted(context, self._numel)
        return found if kept is not None and kept[1] >= self._rounds else 1


def fitted(context: Context, numel: int) -> tuple[torch.Tensor, int] | None:
    """Return the stored sum of curves over ``numel`` ranks and their number, None if there is none of these workers."""
    total, rounds, workers = (context.memory.value(name) for name in (CURVE, FITTED, WORKERS))
    if total is None or rounds is None or total.numel() != numel:
        return None
    if workers is not None and int(workers) != context.world_size:
        return None
    return total, int(rounds)


class _Scales:
    """Exchange of the leader's scales, in which every rank takes part to say which parameters are not finite."""

    def __init__(self, setting: PlanSetting, elements: LeadersElements) -> None:
        self.light = light = divide(setting.segments)[0]
        self._kernels, self.of_elements = setting.kernels, ElementScales(elements.counts)
        numel = [s.numel for s in light]
        self._table = SegmentTable([s.offset for s in light], numel, [0] * len(numel), [(0, 0)] * len(numel))

    def run(self, context: Context, flat: torch.Tensor, places: torch.Tensor) -> Exchange[torch.Tensor]:
        """Return the root mean squares of the leader's values, +inf for a parameter that is not finite on any rank.

        Bytes sent by a rank: those of a maximum of a float32 for each parameter.
        """
        scales = flat.new_zeros(len(self.light))
        if not flat.is_meta:
            if context.rank == leader(context.round, context.world_size):
                scales = self.of_elements.of(flat[places])
            scales[~self._kernels.finite(flat, self._table)] = torch.inf
        return (yield Reduce(scales, "max"))


class _Fit(LeadersPlan):
    """Plan of the second phase, which adds the curve of its round to the stored sum."""

    def __init__(self, method: RankCurve, setting: PlanSetting) -> None:
        super().__init__(setting, method.density, method.tag, ordered=True)
        self._scales = _Scales(setting, self.elements)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        found = yield from super().prepare(context, flat)
        scales = yield from self._scales.run(context, flat, self.places)
        return found, scales

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        found, scales = prepared
        outcome = yield from super().run(context, flat, found)
        if flat.is_meta:
            return outcome
        curve = self._scales.of_elements.normal(flat[self.places], scales).double()
        before = fitted(context, self.elements.numel)
        total, rounds = (curve, 1) if before is None else (before[0] + curve, before[1] + 1)
        context.memory.stage_value(CURVE, total)
        context.memory.stage_value(FITTED, torch.tensor(rounds, device="cpu"))
        context.memory.stage_value(WORKERS, torch.tensor(context.world_size, device="cpu"))
        return outcome


class _Curved(BucketPlan):
    """Plan of the third phase: the leader's positions, order and scales, and the curve."""

    chunks = 1

    def __init__(self, method: RankCurve, setting: PlanSetting) -> None:
        self._method, self.collective = method, setting.collective
        light, dense = divide(setting.segments)
        self._beside = Beside(dense)
        self.runs = [join((s.offset, s.offset + s.numel) for s in light)]
        self._elements = LeadersElements(setting, method.density, ordered=True)
        self._scales = _Scales(setting, self._elements)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[tuple[torch.Tensor, torch.Tensor]]:
        root = leader(context.round, context.world_size)
        places = yield from self._elements.run(context, self._method.tag, flat, root)
        scales = yield from self._scales.run(context, flat, places)
        return places, scales

    def run(
        self, context: Context, flat: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor]
    ) -> Exchange[Outcome]:
        places, scales = prepared
        beside = flat.new_empty(self._beside.numel)
        self._beside.take(flat, beside)
        own_beside = beside.clone() if context.wants_sent else None
        if self._beside.numel:
            yield from mean_of_floats(context, self.collective, self._method.tag, beside)
        if flat.is_meta:
            return Outcome()

        kept = fitted(context, self._elements.numel)
        if kept is None:
            raise TypeError("there is no curve")
        curve = (kept[0] / kept[1]).to(torch.float32)
        found = torch.where(torch.isfinite(scales), scales, 0.0)[self._scales.of_elements.each] * curve
        own = found if self._method.feedback == "reconstruction" else flat[places]
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        flat.index_copy_(0, places, found)
        for i in torch.nonzero(~torch.isfinite(scales)).flatten().tolist():
            s = self._scales.light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        self._beside.put(beside, flat)
        finite = bool(torch.isfinite(scales).all() and torch.isfinite(beside).all() and torch.isfinite(found).all())
        if own_beside is None:
            return Outcome(finite)

        def sent(out: torch.Tensor, weight: float) -> None:
            out.index_add_(0, places, own, alpha=weight)
            self._beside.add(own_beside, weight, out)

        return Outcome(finite, sent)
