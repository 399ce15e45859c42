"""The range of what a method takes that adds up rounds: beyond it, a value counts as not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gradwire.exchange.deferred_checks import Flag, all_hold
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Segment

__all__ = ["LARGEST", "BoundedPlan", "in_range"]

LARGEST = 2.0**40
"""The largest magnitude that a method takes that adds up rounds, as it is exchanged, with the loss scale in it.

What is remembered is a sum of what was exchanged, and methods multiply it with such sums: 2^48 products of two numbers
of this size add up within float32, so that nothing that a round leaves behind makes a later round overflow.
"""


def in_range(values: torch.Tensor) -> Flag:
    """Return whether all values are numbers of at most :data:`LARGEST`, as a flag that is read later."""
    return all_hold(values.abs() <= LARGEST)


class BoundedPlan(BucketPlan):
    """Makes an infinity of every value beyond :data:`LARGEST` before an inner plan exchanges a bucket.

    A spike that is finite would be remembered where an infinity is not, and what is remembered of it may overflow in
    every later round, each of which would then be discarded. As an infinity it reaches all ranks by the way that the
    method has for these, and no rank remembers anything of the round. Each element is judged by itself, so that neither
    ranks nor the layout of buckets differ.

    Args:
        inner: How the bucket is exchanged.
        segments: Of whole parameters, as they lie in the bucket.
        owner: Name of the method, for the warning.
    """

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], owner: str) -> None:
        # Not asynchronous, whatever the inner plan is: all of the bucket is looked at before any chunk is sent.
        self.inner, self._segments, self._owner = inner, segments, owner
        self.chunks, self.collective, self.runs = inner.chunks, inner.collective, inner.runs
        self.keeps_dtype, self.finishes = inner.keeps_dtype, inner.finishes

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        if not flat.is_meta and flat.numel():
            self._bound(context, flat)
        return (yield from self.inner.prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return self.inner.run(context, flat, prepared)

    def finish(self, context: Context) -> Exchange[None]:
        return self.inner.finish(context)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self.inner.target_(context, gradient)

    def _bound(self, context: Context, flat: torch.Tensor) -> None:
        if flat.device.type == "cpu":
            # One pass that only reads. Of a device the answer would have to be waited for.
            low, high = (float(extreme) for extreme in torch.aminmax(flat))
            if low >= -LARGEST and high <= LARGEST:
                return
            self._warn(context, flat)
        flat.masked_fill_(flat.abs() > LARGEST, math.inf)

    def _warn(self, context: Context, flat: torch.Tensor) -> None:
        """Tell of the first parameter with a spike, if there is one: of infinities and NaN a GradScaler knows."""
        for s in self._segments:
            sizes = flat[s.offset : s.offset + s.numel].abs()
            beyond = sizes[(sizes > LARGEST) & sizes.isfinite()]
            if beyond.numel():
                context.warn_here(
                    "range",
                    f"round {context.round}: {s.parameter.name!r} has values beyond 2^40 ({beyond.numel()}, up to "
                    f"{float(beyond.max()):.2g}), which {self._owner} does not take: the round counts as overflowed, "
                    "so that its mean is infinite on all ranks and nothing of it is remembered; skip such a step, and "
                    "scale the loss down if it happens again",
                )
                return
