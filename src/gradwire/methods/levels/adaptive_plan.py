"""The exchange of a bucket whose levels follow the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, gathered_values
from gradwire.exchange.protocols.bucket_plan import Operator, PlanSetting, Prepared, SectionPlan
from gradwire.exchange.segments import divide
from gradwire.kernels import Grid
from gradwire.methods.levels.level_codec import LevelCodec
from gradwire.methods.levels.level_fitting import Distribution
from gradwire.methods.levels.level_statistics import Statistics

__all__ = ["AdaptiveLevelPlan"]

WHOLE = "all blocks"


class AdaptiveMethod(Operator, Protocol):
    """What the plan needs to know of its method."""

    @property
    def overlap(self) -> bool:
        """Whether fitted levels serve from the next round on."""
        ...

    @property
    def statistics(self) -> Statistics:
        """What ranks exchange before a fit."""
        ...

    @property
    def purpose(self) -> torch.Tensor:
        """What levels are fitted for."""
        ...

    def is_update(self, round: int) -> bool:
        """Return whether the levels are fitted anew in that round."""
        ...

    def no_levels(self) -> torch.Tensor:
        """Return as many zeros as there are levels, float64."""
        ...

    def fit(self, distribution: Distribution, before: Sequence[float] | None) -> list[float]:
        """Return the best levels, ascending from -1 to 1."""
        ...


class AdaptiveLevelPlan(SectionPlan):
    """Sections whose levels are fitted in some rounds: before they are used, or at the round's end for those after it.

    At the end, the statistics of all parameters are joined in the order of their names, so that buckets do not decide.
    """

    def __init__(self, method: AdaptiveMethod, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._method, self.finishes = method, method.overlap
        names = [s.parameter.name for s in divide(setting.segments)[0]]
        self._noted: list[tuple[str, slice]] = []
        if isinstance(self.codec, LevelCodec):
            cuts = [slice(a, b) for a, b in itertools.pairwise(self.codec.blocks.first.tolist())]
            whole = [(WHOLE, slice(0, self.codec.blocks.blocks))]
            self._noted = [(n, c) for n, c in zip(names, cuts) if c.stop > c.start] if self.finishes else whole

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Prepared]:
        codec = self.codec
        if not isinstance(codec, LevelCodec):
            return []
        summary, levels = codec.summarise(flat), self._levels(context)
        if self._is_due(context, levels):
            parts: dict[str, Any] = {name: blocks.stop - blocks.start for name, blocks in self._noted}
            if not flat.is_meta:
                part = self._method.statistics.part
                parts = {name: part(codec, summary, flat, blocks) for name, blocks in self._noted}
            if not self.finishes:
                levels = yield from self._fit(context, list(parts.values()), levels)
            for name in parts if self.finishes else ():
                context.parts.put(name, parts[name])
        if levels is not None:
            summary = replace(summary, grid=Grid.ordered(levels.tolist()))
        return [(summary, None)]

    def finish(self, context: Context) -> Exchange[None]:
        parts, levels = context.parts.take(), self._levels(context)
        if parts and self._is_due(context, levels):
            yield from self._fit(context, parts, levels)

    def _levels(self, context: Context) -> torch.Tensor | None:
        """Return the levels that serve; None where none were fitted, or for values that lay otherwise in [-1, 1]."""
        purpose = context.memory.value("levels_of")
        if purpose is None or not torch.equal(purpose, self._method.purpose):
            return None
        return context.memory.value("levels")

    def _is_due(self, context: Context, levels: torch.Tensor | None) -> bool:
        return self._method.is_update(context.round) or (levels is None and not _is_dry(context))

    def _fit(
        self, context: Context, parts: Sequence[Any], before: torch.Tensor | None
    ) -> Exchange[torch.Tensor | None]:
        """Gather all workers' statistics; keep, and return, the levels that rank 0 fits to them.

        Every rank could solve the problem, but error functions may differ in the last bit between machines.

        Args:
            parts: This rank's statistics; in a dry run, numbers of blocks.
        """
        statistics, levels = self._method.statistics, self._method.no_levels()
        if _is_dry(context):
            yield from self._gather(context, 2, statistics.room(sum(parts)).to("meta"))
            yield from self._gather(context, 3, levels.to("meta"))
            return None
        everyone = yield from self._gather(context, 2, statistics.joined(parts))
        if context.rank == 0:
            found = self._method.fit(statistics.distribution(everyone), None if before is None else before.tolist())
            levels = torch.tensor(_apart(found), dtype=torch.float64)
        levels = (yield from self._gather(context, 3, levels))[0].clone()
        context.memory.stage_value("levels", levels)
        context.memory.stage_value("levels_of", self._method.purpose)
        return levels

    def _gather(self, context: Context, exchange: int, values: torch.Tensor) -> Exchange[torch.Tensor]:
        return gathered_values(replace(context, exchange=exchange), self._method.tag, values)


def _is_dry(context: Context) -> bool:
    return context.workspace.device == "meta"


def _apart(levels: Sequence[float]) -> list[float]:
    """Round to float32 and keep neighbours distinct, ends at -1 and 1."""
    rounded = torch.tensor(levels, dtype=torch.float32)
    rounded[0], rounded[-1] = -1.0, 1.0
    for i in range(1, len(rounded)):
        if not rounded[i] > rounded[i - 1]:
            rounded[i] = torch.nextafter(rounded[i - 1], torch.tensor(2.0))
    if float(rounded[-1]) != 1.0:
        even = [-1 + 2 * j / (len(levels) - 1) for j in range(len(levels))]
        return even
    return [float(x) for x in rounded]
