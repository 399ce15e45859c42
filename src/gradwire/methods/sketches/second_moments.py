"""State of SketchedAMSGrad: second moments, and ratios of learning rates for rescaling residuals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Segment

LEARNING_RATE = "learning_rate"
"""Stored value of each parameter: the last learning rate above 0."""


class RateRatios:
    """Ratio of each parameter's last learning rate to that of this round.

    A residual in the unit of a gradient, kept from a round with the rate a to one with the rate b, would have moved a
    parameter by a times itself. Multiplied by a / b it still does.

    Args:
        parts: Parameters and their places, separate even where they are joined.
    """

    def __init__(self, parts: Sequence[Segment]) -> None:
        self._parts = parts

    def read(self, context: Context) -> list[tuple[int, int, float]]:
        """Return (begin, end, ratio) of runs with equal ratio, and stage this round's rates.

        The ratio is 1 if no rate or no previous rate is known, and 0 if the rate is 0: the residual of such a parameter
        stays as it is, with its rate.
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
            context.memory.stage_value(key, torch.tensor(rate, dtype=torch.float64, device="cpu"))
        return before / rate


SECOND_MOMENTS = ("second_moment", "highest_second_moment")
"""Kinds of stored vectors, the same on all ranks."""

MOST = torch.finfo(torch.float32).max


class SecondMoments:
    """Second moments of one round, for compressed elements and all others.

    With v and w of each element eps at first, and h its gradient::

        v <- beta v + (1 - beta) h^2        w <- max(w, v)

    They are stored minus eps, so that the initial zeros of stored state are valid. Values above float32's range are
    clamped to its largest number.

    Args:
        beta: Decay of the moment, at least 0 and below 1.
        eps: First value, above 0, in the unit of a squared gradient.
        context: Context of the round; gradients must be unscaled.
        segments: Segments of the bucket. Nothing is stored for those marked as dense.

    Attributes:
        highest: w minus eps before the round, laid out as the bucket.
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
        """Add gradients at places of the bucket, each once in a round, and return the new sqrt(w) there.

        Args:
            gradient: Gradients, with the same bits on all ranks.
        """
        moment, highest = self._staged
        # The square of a float32 may be out of its range.
        square = gradient.double().square_().sub_(self._eps).mul_(1 - self._beta)
        after = moment[places].double().mul_(self._beta).add_(square).clamp_(max=MOST).float()
        moment[places] = after
        highest[places] = torch.maximum(highest[places], after)
        return self.root(highest[places])

    def root(self, highest: torch.Tensor) -> torch.Tensor:
        """Return sqrt(w), given w minus eps."""
        return highest.add(self._eps).sqrt_()
