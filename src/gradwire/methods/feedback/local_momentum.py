"""Momentum before compression, which each worker applies to its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.method import is_number, require
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Segment
from gradwire.methods.wrappers.wrapper import WrappedPlan, pieces


def checked_momentum(owner: str, value: object, field: str = "momentum") -> float:
    """Return a method's momentum as a float, after checking it.

    Raises:
        HyperparameterError: it is not a number of at least 0 and below 1.
    """
    require(is_number(value, least=0, below=1), owner, f"{field} is a number from 0 to below 1, not {value!r}")
    return float(value)  # type: ignore[arg-type]


class LocalMomentum(WrappedPlan):
    """Plan that exchanges each worker's momentum instead of its gradient.

    With g_i worker i's gradient and m_i its momentum, zero at first::

        m_i <- momentum m_i + (1 - dampening) g_i        the inner plan exchanges m_i, or g_i + momentum m_i (Nesterov)

    The mean over workers of m_i is the momentum of the mean gradient, so with a lossless inner plan and no dampening
    the outcome is exactly the direction of ``torch.optim.SGD`` with this momentum. It is applied to all elements,
    including those sent in float32. ``m_i`` is state of this rank, "momentum", stored without the loss scale under
    automatic mixed precision.
    """

    def __init__(
        self,
        inner: BucketPlan,
        segments: Sequence[Segment],
        momentum: float,
        dampening: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(inner, segments)
        self._momentum, self._weight, self._nesterov = momentum, 1 - dampening, nesterov
        self._remembered = _remembered(segments)
        self._whole = [(s.offset, s.offset + s.numel) for s in segments]

    def before(self, context: Context, flat: torch.Tensor) -> None:
        held = context.memory.read("momentum", self._remembered)
        staged = context.memory.stage("momentum", self._remembered)
        for a, b in pieces(self._whole):
            self._move(held[a:b], flat[a:b], context.loss_scale, staged[a:b])

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        # Computed from the stored momentum of the last round, since parts of the staged one may have been cleared.
        held = context.memory.read("momentum", self._remembered)
        for a, b in pieces(self._whole):
            self._move(held[a:b], gradient[a:b], context.loss_scale, torch.empty_like(held[a:b]))

    def _move(self, held: torch.Tensor, vector: torch.Tensor, loss_scale: float, moved: torch.Tensor) -> None:
        """Replace a gradient by the vector to exchange, and write the momentum to ``moved``."""
        torch.mul(held, self._momentum, out=moved)
        moved.add_(vector, alpha=self._weight / loss_scale)
        if self._nesterov:
            vector.add_(moved, alpha=self._momentum * loss_scale)
        else:
            torch.mul(moved, loss_scale, out=vector)


def forget_momentum(context: Context, segments: Sequence[Segment], places: torch.Tensor) -> None:
    """Set a round's staged momentum to zero at ``places`` of a bucket, for example of elements that were sent exactly.

    Called by a plan inside :class:`LocalMomentum` with the same segments.
    """
    context.memory.stage("momentum", _remembered(segments))[places] = 0


def _remembered(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments marked as not dense, since momentum of dense segments is stored, too."""
    return [replace(s, dense=False) for s in segments]
