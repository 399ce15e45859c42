"""LGC by a parameter server: one worker's code is used for all, and every worker sends its few largest elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs import Draw, Summary
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome, broadcast, collected, leader
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment, divide
from gradwire.exchange.wire import OrAbsent, Packing, Whole, padded
from gradwire.kernels import SegmentTable
from gradwire.methods.learned.autoencoder import TRAINER, Training, told
from gradwire.methods.learned.lgc_all_reduce import VECTORS, CodingMethod, CodingPlan
from gradwire.methods.low_rank.float_means import mean_of_floats
from gradwire.methods.sparse.sparse_codec import LargestRule, Rule, SparseCodec, SparseSummary
from gradwire.methods.sparse.sparse_values import CastValues, UnitTable
from gradwire.methods.sparse.top_k import TopK

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


SERVER = TRAINER
"""Rank that decodes for all, the one that trained."""

Elements = tuple[torch.Tensor, torch.Tensor]
"""Units that a worker kept, ascending, and their values."""


class WatchedTopK(BucketPlan):
    """Plan of gathered top-k, of which the trainer keeps a copy."""

    chunks = 1

    def __init__(self, method: CodingMethod, setting: PlanSetting) -> None:
        self._rows: list[Elements] = []
        self._inner = SectionPlan(_Watched(TopK(density=method.density), self._rows), setting)
        self.collective, self.runs = self._inner.collective, self._inner.runs
        light = divide(setting.segments)[0]
        self._table = UnitTable(light, [1] * len(light))
        self._ordered = method.order == "value"
        self._most = LargestRule(method.innovation).most(self._table.blocks(None)).tolist()

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[object]:
        return (yield from self._inner.prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: object) -> Exchange[Outcome]:
        outcome = yield from self._inner.run(context, flat, prepared)  # type: ignore[arg-type]
        if context.rank == TRAINER and self._rows:
            vectors = torch.stack([self._vector(*row) for row in self._rows])
            context.parts.put(VECTORS, (vectors, torch.stack([self._innovation(row) for row in vectors])))
        self._rows.clear()
        return outcome

    def _vector(self, chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return a worker's values in its own order."""
        if not self._ordered:
            return values.clone()
        parts = values.split(self._table.counts(chosen))
        return torch.cat([torch.sort(part, descending=True, stable=True).values for part in parts])

    def _innovation(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the vector with only the largest elements of each parameter, and zeros elsewhere."""
        found, at = torch.zeros_like(vector), 0
        for count, most in zip(self._table.counts(self._rows[0][0]), self._most):
            part = vector[at : at + count]
            largest = torch.topk(part.abs(), min(most, count)).indices
            found[at : at + count][largest] = part[largest]
            at += count
        return found


class _Watched:
    """Operator whose decoder stores every worker's elements in ``rows``."""

    tag: ClassVar[int] = TopK.tag

    def __init__(self, operator: TopK, rows: list[Elements]) -> None:
        self._operator, self._rows = operator, rows
        self.traits = operator.traits

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SparseCodec:
        codec, rows = self._operator.codec(kernels, segments, world_size, seed), self._rows
        return _WatchedCodec(
            kernels, codec.table, world_size, rule=codec.rule, block=None, values=codec.values, rows=rows
        )


class _WatchedCodec(SparseCodec):
    def __init__(
        self, kernels: Kernels, units: UnitTable, world_size: int, *, rows: list[Elements], **options: object
    ) -> None:
        super().__init__(kernels, units, world_size, **options)  # type: ignore[arg-type]
        self._rows = rows

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        self._rows[:] = [self.read(row) for row in rows]
        super().decode_rows(rows, summary, flat)


class _FewRule(Rule):
    """Rule with a maximum number of units of each block, which are chosen elsewhere."""

    def __init__(self, most: Callable[[SegmentTable], torch.Tensor]) -> None:
        self._most = most

    def most(self, table: SegmentTable) -> torch.Tensor:
        return torch.minimum(self._most(table), torch.from_numpy(table.numel.copy()))

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Only the server encodes the mean, with given elements. A call is a defect.
        raise AssertionError("the server says which elements the mean has")


@dataclass(frozen=True, eq=False)
class _Told:
    """Data that a worker sends to the server: scales, innovation and, from the leader, the code."""

    scales: torch.Tensor
    innovation: Elements
    places: torch.Tensor | None = None
    code: torch.Tensor | None = None


class CommonCode(CodingPlan):
    """Plan that sends the leader's code and all innovations to the server, and the server's mean to all."""

    def __init__(self, method: CodingMethod, setting: PlanSetting, training: Training) -> None:
        super().__init__(method, setting, training)
        table = self._table = UnitTable(self._light, [1] * len(self._light))
        values, own, few = CastValues(torch.float32), LargestRule(method.density), LargestRule(method.innovation)
        world = setting.world_size

        def most(blocks: SegmentTable) -> torch.Tensor:
            return own.most(blocks) + world * few.most(blocks)

        self._few = SparseCodec(setting.kernels, table, 1, rule=few, block=None, values=values)
        self._mean = SparseCodec(setting.kernels, table, 1, rule=_FewRule(most), block=None, values=values)
        self._own = SparseCodec(setting.kernels, table, 1, rule=own, block=None, values=values)
        if setting.coder is not None:
            for codec in (self._few, self._mean):
                codec.use_coder(setting.coder)
        self._every = table.places(torch.arange(table.units, dtype=torch.int32, device="cpu")).long()

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[torch.Tensor]:
        due = context.round == self._method.first_compressed
        return (yield from told(context, self._method.tag, self._training, self._setting.seed, due))

    def run(self, context: Context, flat: torch.Tensor, prepared: torch.Tensor) -> Exchange[Outcome]:
        world, tag = context.world_size, self._method.tag
        master = leader(context.round, world)
        bodies = None if flat.is_meta else self._tell(context, flat, prepared, context.rank == master)
        up = replace(context, exchange=0, workspace=context.workspace.part("up"))
        everyone = yield from collected(up, tag, self._packings, bodies, SERVER)
        bodies = None
        if everyone is not None and not flat.is_meta:
            bodies = self._mean_of(
                flat, prepared, [self._heard(p, r == master) for r, p in enumerate(everyone)], master
            )
        down = replace(context, exchange=1, workspace=context.workspace.part("down"))
        kinds = [self._mean.packing(self._mean.units), Whole(padded(4 * len(self._light)))]
        mean, flags = yield from broadcast(down, tag, kinds, bodies, SERVER)
        beside = flat.new_empty(self._beside.numel)
        self._beside.take(flat, beside)
        own_beside = beside.clone() if context.wants_sent else None
        if self._beside.numel:
            side = replace(context, exchange=2, workspace=context.workspace.part("beside"))
            yield from mean_of_floats(side, "two_shot", tag, beside)
        if flat.is_meta:
            return Outcome()

        contributed = self._selection(flat) if self._method.feedback == "selection" else None
        chosen, values = self._mean.read(mean)
        places, values = self._table.places(chosen).long(), values.clone()
        spoilt = flags[: 4 * len(self._light)].clone().view(torch.float32)
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        flat.index_copy_(0, places, values)
        for i in torch.nonzero(~torch.isfinite(spoilt)).flatten().tolist():
            s = self._light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        self._beside.put(beside, flat)
        finite = bool(torch.isfinite(spoilt).all() and torch.isfinite(values).all() and torch.isfinite(beside).all())
        if own_beside is None:
            return Outcome(finite)
        places, values = contributed or (places, values)

        def sent(out: torch.Tensor, weight: float) -> None:
            out.index_add_(0, places, values, alpha=weight)
            self._beside.add(own_beside, weight, out)

        return Outcome(finite, sent)

    @property
    def _packings(self) -> list[Packing]:
        """Sections of a worker's payload: scales, innovation and, from the leader, positions, order and code."""
        masters = [OrAbsent(p) for p in (*self._elements.packings, Whole(padded(4 * self._code)))]
        return [Whole(padded(4 * len(self._light))), self._few.packing(self._few.units), *masters]

    def _tell(self, context: Context, flat: torch.Tensor, weights: torch.Tensor, master: bool) -> list[torch.Tensor]:
        space = context.workspace.part("bodies")
        few = space.get("innovation", self._few.payload_bytes(self._few.units))
        self._few.encode(flat, SparseSummary(), Draw(context.round, context.rank), few)
        spoilt = ~self._setting.kernels.finite(flat, self._segments)
        if not master:
            absent = torch.empty(0, dtype=torch.uint8, device="cpu")
            return [_octets(_spoilt_or_zero(spoilt)), few, *[absent] * (len(self._packings) - 2)]
        room = space.get("positions", self._elements.codec.payload_bytes(self._elements.codec.units))
        parts = self._elements.write(flat, room)
        own = flat[self._elements.read(parts)]
        scales = self._scales.of(own)
        scales[spoilt] = torch.inf
        code = self._training.autoencoder.encode(weights, self._scales.normal(own, scales))
        return [_octets(scales), few, *parts, _octets(code)]

    def _heard(self, parts: Sequence[torch.Tensor], master: bool) -> _Told:
        scales = parts[0][: 4 * len(self._light)].view(torch.float32)
        innovation = self._few.read(parts[1])
        if not master:
            return _Told(scales, innovation)
        code = parts[-1][: 4 * self._code].view(torch.float32)
        return _Told(scales, innovation, self._elements.read(list(parts[2:-1])), code)

    def _mean_of(
        self, flat: torch.Tensor, weights: torch.Tensor, workers: Sequence[_Told], master: int
    ) -> list[torch.Tensor]:
        """Return the mean over workers of the vectors decoded from the leader's code and each one's innovation.

        For worker k that is the decoder's output for the code and k's innovation at the leader's elements, and k's
        innovation at its own positions.
        """
        common, weight = workers[master], 1.0 / len(workers)
        if common.places is None or common.code is None:
            raise TypeError("the master told no code")
        places, scales = common.places, common.scales
        each = torch.where(torch.isfinite(scales), scales, 0.0)[self._scales.each]
        total, named = torch.zeros_like(flat), torch.zeros(len(flat), dtype=torch.bool, device="cpu")
        named[places] = True
        for worker in workers:
            chosen, values = worker.innovation
            own = self._table.places(chosen).long()
            named[own] = True
            whole = torch.zeros_like(flat)
            whole[own] = values
            innovation = self._scales.normal(torch.nan_to_num(whole[places], 0.0, 0.0, 0.0), scales)
            code, autoencoder = common.code, self._training.autoencoder
            found = autoencoder.decode(weights, code, self._elements.numel, innovation)
            whole[places] = found * each
            whole[own] = values
            total.add_(whole, alpha=weight)
        units = torch.nonzero(named[self._every]).flatten().to(torch.int32)
        body = torch.zeros(self._mean.payload_bytes(self._mean.units), dtype=torch.uint8, device="cpu")
        self._mean.write(units, total[self._every[units.long()]], Draw(0, 0), body)
        spoilt = torch.stack([~torch.isfinite(worker.scales) for worker in workers]).any(0)
        return [body, _octets(_spoilt_or_zero(spoilt))]

    def _selection(self, flat: torch.Tensor) -> Elements:
        """Return the places and values of this worker's own largest elements."""
        blocks = self._own.blocks
        positions, counts = self._own.rule.choose(self._setting.kernels, flat, blocks, Draw(0, 0))
        first = torch.repeat_interleave(torch.from_numpy(self._table.first[:-1].copy()), counts)
        places = self._table.places((positions + first).to(torch.int32)).long()
        return places, flat[places]


def _spoilt_or_zero(spoilt: torch.Tensor) -> torch.Tensor:
    """Return inf for each parameter that is not finite, else 0, float32."""
    return torch.where(spoilt, torch.inf, 0.0).to(torch.float32)


def _octets(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values as bytes, padded to a multiple of 16."""
    out = torch.zeros(padded(4 * values.numel()), dtype=torch.uint8, device="cpu")
    out[: 4 * values.numel()] = values.contiguous().view(torch.uint8)
    return out
