"""Second moments of gradients and their running maxima, by the rule of AMSGrad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Segment

__all__ = ["SECOND_MOMENTS", "SecondMoments"]

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
