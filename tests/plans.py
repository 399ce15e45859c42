"""Plans of buckets, for tests that need no link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.exchange.method import Method
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import Segment
from gradwire.kernels import Kernels

__all__ = ["make_plan"]


def make_plan(
    method: Method,
    segments: Sequence[Segment],
    *,
    kernels: Kernels,
    world_size: int,
    collective: str,
    seed: int,
    chunk_numel: int,
    warm_up: bool = False,
    **more: Any,
) -> BucketPlan:
    """Plan the exchange of one bucket, in a round of warm-up or later; see ``PlanSetting``."""
    setting = PlanSetting(segments, kernels, world_size, collective, seed, chunk_numel, **more)
    return method.dense_plan(setting) if warm_up else method.plan(setting)
