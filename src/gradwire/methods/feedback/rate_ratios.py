"""By how much a residual has to be rescaled when learning rates change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Segment

__all__ = ["LEARNING_RATE", "RateRatios"]

LEARNING_RATE = "learning_rate"
"""The values that are kept, one a parameter: the last rate above 0."""


class RateRatios:
    """The last learning rate of each parameter over that of this round.

    A residual in the unit of a gradient that waits from a round with the rate a for one with the rate b would have
    moved a parameter by a times itself; multiplied by a / b it still does.

    Args:
        parts: Parameters and where they lie, each by itself also where they are joined.
    """

    def __init__(self, parts: Sequence[Segment]) -> None:
        self._parts = parts

    def read(self, context: Context) -> list[tuple[int, int, float]]:
        """Return (begin, end, ratio) of runs that have one ratio, and stage this round's rates.

        The ratio is 1 where no rate is known or there has been none before, and 0 where the rate is 0: what waits for
        such a parameter must go on waiting, with the rate that it has.
        """
        rates, found = context.learning_rates or {}, list[tuple[int, int, float]]()
        for s in self._parts:
            begin, ratio = s.offset, self._ratio(context, s.parameter.name, rates.get(s.parameter.name))
            if found and found[-1][1:] == (begin, ratio):
                begin = found.pop()[0]
            found.append((begin, s.offset + s.numel, ratio))
        return found

    def _ratio(self, context: Context, name: str, rate: float | None) -> float:
        if not rate:
            return 1.0 if rate is None else 0.0
        key = f"{LEARNING_RATE}/{name}"
        held = context.memory.value(key)
        before = rate if held is None else float(held)
        if held is None or before != rate:
            context.memory.stage_value(key, torch.tensor(rate, dtype=torch.float64))
        return before / rate
