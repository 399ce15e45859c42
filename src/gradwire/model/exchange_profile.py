"""Profiles of exchanges: their jobs as stages of local work and operations, timed on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import LANES, Stage, profile_locally
from gradwire.exchange.method import Method
from gradwire.exchange.network_cost import Delays
from gradwire.exchange.planning import Options, Planner, exchanged
from gradwire.methods.spec import method as read_method
from gradwire.model.gradients import Gradients, drawn
from gradwire.model.profile import ReadyBucket


@dataclass(frozen=True)
class BucketJobs:
    """Jobs of one bucket: its preparation and its chunks.

    Attributes:
        asynchronous: Whether no lane's thread takes part. Work before the first collective is then done by the thread
            that brings the bucket, as in DDP's own hooks.
    """

    prepare: tuple[Stage, ...]
    chunks: tuple[tuple[Stage, ...], ...]
    asynchronous: bool

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends, on average over rounds that alternate."""
        return sum(s.sent_bytes for job in (self.prepare, *self.chunks) for s in job)

    @property
    def work_s(self) -> float:
        """Seconds of local work."""
        return sum(s.work_s for job in (self.prepare, *self.chunks) for s in job)


@dataclass(frozen=True)
class ExchangeProfile:
    """Profile of a step's exchange by one method.

    Attributes:
        spec: Spec of the method.
        buckets: Jobs of each bucket, in the order in which buckets become ready.
        delays: Critical path of a step with all buckets ready at its beginning.
    """

    spec: str
    world_size: int
    buckets: tuple[BucketJobs, ...]
    delays: Delays = field(default_factory=Delays)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step, on average over rounds that alternate."""
        return sum(b.sent_bytes for b in self.buckets)


def exchange_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    buckets: Sequence[ReadyBucket],
    world_size: int,
    options: Options | None = None,
    repeats: int = 5,
    lanes: int = LANES,
    gradients: Gradients | None = None,
) -> ExchangeProfile:
    """Plan and profile every bucket on this machine.

    Args:
        parameters: Parameters by name; their values are not read, so ``meta`` tensors suffice.
        buckets: Buckets in DDP's layout.
        lanes: Number of lanes, with which delays are counted; DDP alone has one.
        gradients: Values of the gradients (:func:`gradwire.model.gradients.values_of`), on which the bytes of entropy
            coders depend; independent normal values if they are not known.

    Raises:
        IncompatibleError: the method has local steps, cannot serve that many ranks, or does not allow an option.
    """
    chosen = read_method(method)
    if chosen.traits.local_steps:
        raise IncompatibleError(
            f"it exchanges in one of {chosen.traits.local_steps} steps, and not as buckets of gradients become "
            "ready: see gradwire.model.forecast"
        )
    planner = Planner(chosen, parameters, world_size, options or Options())
    planner.compile()
    delays = planner.delays([bucket.names for bucket in buckets], lanes)
    return ExchangeProfile(repr(chosen), world_size, jobs_of(planner, buckets, world_size, repeats, gradients), delays)


def jobs_of(
    planner: Planner,
    buckets: Sequence[ReadyBucket],
    world_size: int,
    repeats: int,
    gradients: Gradients | None = None,
) -> tuple[BucketJobs, ...]:
    """Plan and profile buckets of a planner's parameters on this machine.

    If they hold all parameters and a link would join them, all jobs are those of the last one.
    """
    generator = torch.Generator().manual_seed(0)

    def jobs(names: Sequence[str]) -> BucketJobs:
        plan = planner.plan(names, 0)
        numel = {name: planner.parameters[name].numel for name in names}
        flat = drawn(numel, gradients or {}, generator).to(plan.dtype)
        link, period = planner.options.link_cost, planner.method.traits.period
        prepare, chunks = profile_locally(
            plan, flat, world_size, repeats, link=link, period=period, sizes=tuple(numel.values())
        )
        return BucketJobs(tuple(prepare), tuple(tuple(c) for c in chunks), plan.asynchronous)

    order = planner.step_order()
    if planner.joins_buckets and {name for bucket in buckets for name in bucket.names} == set(order):
        nothing = BucketJobs((), (), asynchronous=False)
        return (nothing,) * (len(buckets) - 1) + (jobs(order),)
    return tuple(jobs(bucket.names) for bucket in buckets)


def nothing_but_the_sum(exchange: ExchangeProfile) -> ExchangeProfile:
    """Return the profile of DDP without a hook from ``fp32``'s: DDP scales while it copies, so no work is left."""
    bare = tuple(
        BucketJobs(
            tuple(replace(s, work_s=0.0) for s in b.prepare),
            tuple(tuple(replace(s, work_s=0.0) for s in chunk) for chunk in b.chunks),
            b.asynchronous,
        )
        for b in exchange.buckets
    )
    return ExchangeProfile("ddp fp32", exchange.world_size, bare, exchange.delays)


def delays_of(method: Method, shapes: Mapping[str, Sequence[int]], world_size: int) -> Delays | None:
    """Return the one-way delays of an exchange of parameters of these shapes in one bucket.

    None if the method chooses among others, or needs to know the cluster.
    """
    if method.traits.tries:
        return None
    meta = {name: torch.empty(tuple(shape), device="meta", dtype=torch.float32) for name, shape in shapes.items()}
    parameters, options = exchanged(method, meta, Options())
    try:
        return Planner(method, parameters, world_size, options).delays([list(parameters)])
    except IncompatibleError:
        return None
