"""What a method does with a module's buckets: jobs made of stages, from the method's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Stage, profile_locally
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Planner
from gradwire.methods.spec import method as read_method
from gradwire.model.timeline import ReadyBucket

__all__ = ["BucketJobs", "ExchangeProfile", "exchange_of", "jobs_of", "nothing_but_the_sum"]


@dataclass(frozen=True)
class BucketJobs:
    """One bucket's preparation and chunks.

    Attributes:
        asynchronous: No lane's thread takes part: work before the first operation is done by the thread that brings
            the bucket, as in DDP's own hooks.
    """

    prepare: tuple[Stage, ...]
    chunks: tuple[tuple[Stage, ...], ...]
    asynchronous: bool

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends."""
        return sum(s.sent_bytes for job in (self.prepare, *self.chunks) for s in job)

    @property
    def work_s(self) -> float:
        """Seconds of local work."""
        return sum(s.work_s for job in (self.prepare, *self.chunks) for s in job)


@dataclass(frozen=True)
class ExchangeProfile:
    """A step's exchange by one method.

    Attributes:
        spec: The method.
        buckets: In the order in which they become ready.
    """

    spec: str
    world_size: int
    buckets: tuple[BucketJobs, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(b.sent_bytes for b in self.buckets)

    @property
    def codec_s(self) -> float:
        """Seconds of local work in a step, alone on a core."""
        return sum(b.work_s for b in self.buckets)


def exchange_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    buckets: Sequence[ReadyBucket],
    world_size: int,
    options: Options | None = None,
    repeats: int = 5,
) -> ExchangeProfile:
    """Plan and profile every bucket on this machine.

    Args:
        parameters: By name; their values are not read, so ``meta`` tensors do.
        buckets: As DDP lays them out.

    Raises:
        IncompatibleError: the method takes local steps, cannot serve that many ranks, or an option does not fit it.
    """
    chosen = read_method(method)
    if chosen.local_steps:
        raise IncompatibleError(
            f"it exchanges in one of {chosen.local_steps} steps, and not as buckets of gradients become ready: see "
            "gradwire.model.cycle"
        )
    planner = Planner(chosen, parameters, world_size, options or Options())
    planner.compile()
    return ExchangeProfile(repr(chosen), world_size, jobs_of(planner, buckets, world_size, repeats))


def jobs_of(planner: Planner, buckets: Sequence[ReadyBucket], world_size: int, repeats: int) -> tuple[BucketJobs, ...]:
    """Plan and profile buckets of a planner's parameters on this machine."""
    generator = torch.Generator().manual_seed(0)
    jobs = []
    for bucket in buckets:
        plan = planner.plan(bucket.names, 0)
        flat = torch.randn(bucket.numel, generator=generator)
        prepare, chunks = profile_locally(plan, flat, world_size, repeats, link=planner.options.link_cost)
        jobs.append(BucketJobs(tuple(prepare), tuple(tuple(c) for c in chunks), plan.asynchronous))
    return tuple(jobs)


def nothing_but_the_sum(exchange: ExchangeProfile) -> ExchangeProfile:
    """Return DDP without a hook from the ``fp32`` method: it scales while it fills the bucket, so no work is left."""
    bare = tuple(
        BucketJobs(
            tuple(replace(s, work_s=0.0) for s in b.prepare),
            tuple(tuple(replace(s, work_s=0.0) for s in chunk) for chunk in b.chunks),
            b.asynchronous,
        )
        for b in exchange.buckets
    )
    return ExchangeProfile("ddp fp32", exchange.world_size, bare)
