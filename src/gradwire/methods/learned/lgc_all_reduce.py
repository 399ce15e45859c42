"""LGC by all-reduce: codes of the same elements are added up over workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gradwire.exchange.ops import Exchange, Reduce
from gradwire.exchange.protocols import Context, Outcome, collected_values, leader
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import divide
from gradwire.kernels import SegmentTable
from gradwire.methods.learned.autoencoder import TRAINER, ElementScales, Training, latent_length, told
from gradwire.methods.low_rank.float_means import Beside, mean_of_floats
from gradwire.methods.sparse.clt_k import LeadersElements, LeadersPlan

VECTORS = "(autoencoder)"
"""Key under which a round stores the vectors of all workers for the trainer."""

SEVENTH_EXCHANGE = 6


class CodingMethod(Protocol):
    """Interface of the plans' method: its fields, its tag, and the first round of its third phase."""

    @property
    def tag(self) -> int: ...

    @property
    def density(self) -> float: ...

    @property
    def innovation(self) -> float: ...

    @property
    def order(self) -> str: ...

    @property
    def feedback(self) -> str: ...

    @property
    def first_compressed(self) -> int: ...


class WatchedSum(LeadersPlan):
    """Plan that adds up the leader's elements, and sends every worker's values to the trainer as well."""

    def __init__(self, method: CodingMethod, setting: PlanSetting) -> None:
        super().__init__(setting, method.density, method.tag, ordered=method.order == "value")

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        found = yield from super().prepare(context, flat)
        own = found[0][: self.elements.numel]
        watching = replace(context, exchange=SEVENTH_EXCHANGE, workspace=context.workspace.part("trainer"))
        rows = yield from collected_values(watching, self._tag, own, TRAINER)
        if rows is not None and not flat.is_meta:
            context.parts.put(VECTORS, (rows.clone(), None))
        return found


@dataclass(frozen=True, eq=False)
class _Prepared:
    """State of all ranks before codes are added up: weights, places of the elements, and their parameters' scales."""

    weights: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor


class CodingPlan(BucketPlan):
    """Base of the plans of the third phase: a code and scales of the leader's elements, and dense parameters beside."""

    chunks = 1

    def __init__(self, method: CodingMethod, setting: PlanSetting, training: Training) -> None:
        self._method, self._setting, self._training = method, setting, training
        self.collective = setting.collective
        light, dense = divide(setting.segments)
        self._light, self._beside = light, Beside(dense)
        self.runs = [join((s.offset, s.offset + s.numel) for s in light)]
        self._elements = LeadersElements(setting, method.density, ordered=method.order == "value")
        self._scales = ElementScales(self._elements.counts)
        numel = [s.numel for s in light]
        self._segments = SegmentTable([s.offset for s in light], numel, [0] * len(numel), [(0, 0)] * len(numel))
        self._code = latent_length(self._elements.numel)


class CodedMean(CodingPlan):
    """Plan that averages codes of the leader's elements, and decodes the mean code."""

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[_Prepared]:
        tag, due = self._method.tag, context.round == self._method.first_compressed
        weights = yield from told(context, tag, self._training, self._setting.seed, due)
        root = leader(context.round, context.world_size)
        places = yield from self._elements.run(context, tag, flat, root)
        scales = flat.new_empty(len(self._light))
        if not flat.is_meta:
            scales = self._scales.of(flat[places])
            scales[~self._setting.kernels.finite(flat, self._segments)] = torch.inf
        scales = yield Reduce(scales, "max")
        return _Prepared(weights, places, scales)

    def run(self, context: Context, flat: torch.Tensor, prepared: _Prepared) -> Exchange[Outcome]:
        places, scales, autoencoder = prepared.places, prepared.scales, self._training.autoencoder
        values = flat.new_empty(self._code + self._beside.numel)
        code, beside = values[: self._code], values[self._code :]
        self._beside.take(flat, beside)
        if not flat.is_meta:
            own = flat[places]
            code.copy_(autoencoder.encode(prepared.weights, self._scales.normal(own, scales)))
        own_beside = beside.clone() if context.wants_sent else None
        yield from mean_of_floats(context, self.collective, self._method.tag, values)
        if flat.is_meta:
            return Outcome()

        found = autoencoder.decode(prepared.weights, code, self._elements.numel)
        found = torch.where(torch.isfinite(scales), scales, 0.0)[self._scales.each] * found
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        flat.index_copy_(0, places, found)
        for i in torch.nonzero(~torch.isfinite(scales)).flatten().tolist():
            s = self._light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        self._beside.put(beside, flat)
        finite = bool(torch.isfinite(scales).all() and torch.isfinite(values).all() and torch.isfinite(found).all())
        if own_beside is None:
            return Outcome(finite)
        contributed = found if self._method.feedback == "reconstruction" else own

        def sent(out: torch.Tensor, weight: float) -> None:
            out.index_add_(0, places, contributed, alpha=weight)
            self._beside.add(own_beside, weight, out)

        return Outcome(finite, sent)
