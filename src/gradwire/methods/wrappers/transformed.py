"""A plan that exchanges another vector in a bucket's place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gradwire.exchange.method import Method
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.pieces import join
from gradwire.exchange.segments import Parameter, Segment, divide
from gradwire.kernels import SegmentTable

if TYPE_CHECKING:
    from gradwire.exchange.ops import Exchange

__all__ = ["TransformedPlan"]


class TransformedPlan(BucketPlan):
    """Makes *slots* of the compressed parameters, lets an inner plan exchange these, and brings their mean back.

    The vector that is exchanged holds the slots of all compressed segments, each as a parameter of the same name, then
    dense segments whole. It is one chunk. Slots may lose an infinity or NaN of the parameter: it is put into the first
    of them, so that every rank makes +inf of the whole parameter.

    Args:
        method: The inner method; None: slots travel in float32, by sums whose bits no layout decides.
        setting: Of the bucket; its backend serves the family "signs".
        slots: How many each compressed segment has, at least one.
    """

    def __init__(self, method: Method | None, setting: PlanSetting, slots: Sequence[int]) -> None:
        self._kernels = setting.kernels
        self._light, dense = divide(setting.segments)
        offset, numel = [s.offset for s in self._light], [s.numel for s in self._light]
        self._table = SegmentTable(offset, numel, [0] * len(numel), [(0, 0)] * len(numel))
        self._slots = sum(slots)
        short: list[Segment] = []
        for s, count in zip(self._light, slots):
            short.append(Segment(Parameter(s.parameter.name, (count,), (1,)), _end(short), 0, count))
        self._first = torch.tensor([s.offset for s in short], dtype=torch.int64)
        self._dense: list[tuple[Segment, Segment]] = []
        for s in dense:
            short.append(replace(s, offset=_end(short)))
            self._dense.append((s, short[-1]))
        self._numel = _end(short)
        inner = replace(setting, segments=short, chunk_numel=max(1, self._numel))
        self._inner = inner.float32_plan() if method is None else method.plan(inner)
        self.chunks, self.collective = self._inner.chunks, self._inner.collective
        self.runs = [join((s.offset, s.offset + s.numel) for s in self._light)] * self.chunks

    @abstractmethod
    def gather(self, round: int, flat: torch.Tensor, slots: torch.Tensor) -> None:
        """Make all slots of the bucket's compressed parameters."""

    @abstractmethod
    def scatter(self, round: int, slots: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        """Write, or add, what the slots stand for to the compressed parameters; the slots may be spoilt."""

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        short = context.workspace.get("slots", 4 * self._numel).view(torch.float32)
        if not flat.is_meta:
            slots = short[: self._slots]
            self.gather(context.round, flat, slots)
            finite = self._kernels.finite(flat, self._table)
            slots[self._first[~finite]] = torch.inf
            for s, at in self._dense:
                short[at.offset : at.offset + at.numel] = flat[s.offset : s.offset + s.numel]
        inner = yield from self._inner.prepare(context, short)
        return short, inner

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        short, inner = prepared
        outcome = yield from self._inner.run(context, short, inner)
        if flat.is_meta:
            return outcome
        spoilt = ~torch.isfinite(short[self._first])
        self._back(context.round, short, flat, add=False)
        for i in torch.nonzero(spoilt).flatten().tolist():
            s = self._light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        own = outcome.sent
        if own is None:
            return outcome

        def sent(out: torch.Tensor, weight: float) -> None:
            part = torch.zeros(self._numel)
            own(part, weight)
            self._back(context.round, part, out, add=True)

        return replace(outcome, sent=sent)

    def _back(self, round: int, short: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        self.scatter(round, short[: self._slots], flat, add)
        for s, at in self._dense:
            target, values = flat[s.offset : s.offset + s.numel], short[at.offset : at.offset + at.numel]
            target.add_(values) if add else target.copy_(values)


def _end(segments: Sequence[Segment]) -> int:
    return segments[-1].offset + segments[-1].numel if segments else 0
