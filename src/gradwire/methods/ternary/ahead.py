"""TernGrad's scalers of the round before: a round that waits for two one-way delays instead of three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.codecs.base import Constant, Summary, usable
from gradwire.exchange.deferred_checks import Flag
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import PlanSetting, SectionPlan
from gradwire.exchange.protocols.sections import Prepared
from gradwire.exchange.segments import divide
from gradwire.exchange.wire import padded
from gradwire.kernels import SegmentTable
from gradwire.methods.ternary.ternary_codec import TernaryCodec, TernarySummary, ternary

if TYPE_CHECKING:
    from gradwire.exchange.compressor import Compressor
    from gradwire.kernels import Kernels

SCALER = "scaler"
"""Kind of the scalers of the next round in a link's state; the parameter's name follows it."""


@dataclass(frozen=True)
class AheadSummary(TernarySummary):
    """Scalers of the segments for this round, and those that this rank tells for the next one.

    Attributes:
        own: This rank's scalers, float32 ``[segments]``.
        heard: Scalers of the next round by segment of the bucket, which decoders fill in.
        index: The segment of the bucket that each segment is a piece of.
    """

    own: torch.Tensor
    heard: dict[int, torch.Tensor]
    index: Sequence[int] = ()

    def select(self, index: Constant, shared: torch.Tensor | None) -> AheadSummary:
        chosen = super().select(index, shared)
        here = index.on(self.own.device)
        places = tuple(index.on(torch.device("cpu")).tolist())
        return AheadSummary(chosen.shared, chosen.scale, chosen.limit, self.own[here], self.heard, places)


class AheadCodec(TernaryCodec):
    """Codec of trits of a known scaler; a payload begins with its sender's float32 scalers for the next round.

    They are padded to sixteen bytes, and every owner of a share receives them, so that all ranks know their maximum
    before they decode the sums. A maximum that is not finite makes the parameter's mean +inf in this round.
    """

    def __init__(
        self, kernels: Kernels, table: SegmentTable, world_size: int, *, clip: float | None, clip_by: str
    ) -> None:
        super().__init__(kernels, table, world_size, clip=clip, clip_by=clip_by, shared=True)
        self.side_bytes = padded(4 * len(table.numel))

    def told(self, summary: TernarySummary) -> torch.Tensor:
        return _ahead(summary).own

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        super().reduce(rows[:, self.side_bytes :], begin, out)

    def heard(self, rows: torch.Tensor, summary: Summary) -> AheadSummary:
        ours = _ahead(summary)
        told = rows[:, : 4 * len(ours.own)].contiguous().view(torch.float32).amax(0)
        for segment, scaler in zip(ours.index, told):
            ours.heard[segment] = scaler
        return replace(ours, scale=torch.where(torch.isfinite(told), ours.scale, told))

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        super().decode_rows(rows[:, self.side_bytes :], self.heard(rows, summary), flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return self.starts_finite(flat)


class AheadPlan(SectionPlan):
    """A plan of sections whose scalers are those of the round before.

    The first round, and any in which a parameter's scaler is not known or zero, exchanges them first.

    Args:
        method: The operator, whose codec is an :class:`AheadCodec`.
        setting: Setting of the bucket.
    """

    def __init__(self, method: Compressor, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._names = [s.parameter.name for s in divide(setting.segments)[0]]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Prepared]:
        if not self.codecs:
            return []
        known = self._known(context, flat)
        if known is not None:
            return [(self._measured(flat), known)]
        ((summary, shared),) = yield from super().prepare(context, flat)
        return [(_with_own(summary), shared)]

    def run(self, context: Context, flat: torch.Tensor, prepared: Prepared) -> Exchange[Outcome]:
        outcome = yield from super().run(context, flat, prepared)
        for summary, _ in prepared:
            for segment, scaler in list(_ahead(summary).heard.items()):
                context.memory.stage_value(f"{SCALER}/{self._names[segment]}", scaler / context.loss_scale)
        return outcome

    def _measured(self, flat: torch.Tensor) -> AheadSummary:
        (codec,) = self.codecs
        return _with_own(codec.summarise(flat))

    def _known(self, context: Context, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the scalers of all segments; None if one is unknown or zero, the same on all ranks."""
        if context.round < 0:
            # The usual round of a dry run, in which scalers are known.
            return torch.empty(len(self._names), device=flat.device, dtype=torch.float32)
        held = [context.memory.value(f"{SCALER}/{name}") for name in self._names]
        found = [scaler for scaler in held if scaler is not None]
        if len(found) < len(held):
            return None
        known = torch.stack(found) * context.loss_scale
        # A parameter without a gradient in the last round would lose this round's.
        return usable(known) if bool((known > 0).all()) else None


def _with_own(summary: Summary) -> AheadSummary:
    measured = ternary(summary)
    return AheadSummary(measured.shared, measured.scale, measured.limit, measured.scale, {})


def _ahead(summary: Summary) -> AheadSummary:
    if not isinstance(summary, AheadSummary):
        raise TypeError(f"a codec of scalers of the round before cannot use a {type(summary).__name__}")
    return summary
