"""By how much a residual has to be rescaled when learning rates change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Segment

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


SECOND_MOMENTS = ("second_moment", "highest_second_moment")
"""The kinds of vectors that are kept, the same on all ranks."""

MOST = torch.finfo(torch.float32).max


class SecondMoments:
    """The second moments of one round, of the elements that are compressed and of all others.

    With v and w of each element eps at first, and h its gradient::

        v <- beta v + (1 - beta) h^2        w <- max(w, v)

    They are kept less eps, so that memory's zeros are their first values. What is above float32's range counts as its
    largest number.

    Args:
        beta: At least 0 and below 1.
        eps: Above 0, in the unit of a squared gradient.
        context: Of the round; gradients are to be given unscaled.
        segments: Of the bucket. Memory keeps nothing of those that are marked as dense.

    Attributes:
        highest: w less eps before the round, laid out as the bucket.
    """

    def __init__(self, beta: float, eps: float, context: Context, segments: Sequence[Segment]) -> None:
        self._beta, self._eps = beta, eps
        self._held = [context.memory.read(kind, segments, replicated=True) for kind in SECOND_MOMENTS]
        self._staged = [context.memory.stage(kind, segments, replicated=True) for kind in SECOND_MOMENTS]
        self.highest = self._held[1]
        for held, staged in zip(self._held, self._staged):
            for s in segments:
                staged[s.offset : s.offset + s.numel] = held[s.offset : s.offset + s.numel]

    def update(self, places: torch.Tensor | slice, gradient: torch.Tensor) -> torch.Tensor:
        """Take up gradients at places of the bucket, each once a round; return the new sqrt(w) there.

        Args:
            gradient: Of which all ranks have the same bits.
        """
        moment, highest = self._staged
        # A square of a float32 may be beyond its range.
        square = gradient.double().square_().sub_(self._eps).mul_(1 - self._beta)
        after = moment[places].double().mul_(self._beta).add_(square).clamp_(max=MOST).float()
        moment[places] = after
        highest[places] = torch.maximum(highest[places], after)
        return self.root(highest[places])

    def root(self, highest: torch.Tensor) -> torch.Tensor:
        """Return sqrt(w), of w less eps."""
        return highest.add(self._eps).sqrt_()
