"""Clipping of each worker's own gradient by its norm, before anything is added to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.kernels import SegmentTable
from gradwire.methods.wrappers.wrapper import WrappedPlan, pieces

if TYPE_CHECKING:
    from gradwire.kernels import Moments

__all__ = ["ClippedGradient"]


class ClippedGradient(WrappedPlan):
    """Exchanges each worker's gradient g_i clipped to a norm, ``g_i min(1, limit / |g_i|)``.

    The bucket holds all gradients of a step, those that travel in float32 included. Its norm is added up over
    parameters from exact sums (:class:`gradwire.kernels.Moments`), so that neither threads nor backends decide a bit. A
    gradient that is not finite is left as it is.

    Args:
        limit: In the unit of the gradient before the loss was scaled.
    """

    def __init__(self, inner: BucketPlan, setting: PlanSetting, limit: float) -> None:
        super().__init__(inner, setting.segments)
        whole = [s for s in setting.segments if s.numel]
        numel = [s.numel for s in whole]
        self._kernels, self._limit = setting.kernels, limit
        self._table = SegmentTable([s.offset for s in whole], numel, [0] * len(whole), [(0, 0)] * len(whole))

    def before(self, context: Context, flat: torch.Tensor) -> None:
        moments: Moments = self._kernels.moments(flat, self._table)
        norm = math.sqrt(math.fsum(moments.norm.square().tolist()))
        if norm > self._limit * context.loss_scale and bool(torch.isfinite(moments.max_abs).all()):
            for a, b in pieces([(0, flat.numel())]):
                flat[a:b].mul_(self._limit * context.loss_scale / norm)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self.before(context, gradient)
        self.inner.target_(context, gradient)
