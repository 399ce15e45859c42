"""The time of a step: profiles of exchanges as jobs made of stages, which a fluid simulation schedules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import LANES, Stage, profile_locally
from gradwire.exchange.method import Method
from gradwire.exchange.network_cost import Delays
from gradwire.exchange.planning import Options, Planner
from gradwire.methods.spec import method as read_method
from gradwire.model.fluid import Item, Job, Runner, advance, compute, drain
from gradwire.model.machine import LinkModel, Machine, connection_rate
from gradwire.model.profile import ReadyBucket, Timeline


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
    def sent_bytes(self) -> int:
        """Bytes that one rank sends."""
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
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(b.sent_bytes for b in self.buckets)


def exchange_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    buckets: Sequence[ReadyBucket],
    world_size: int,
    options: Options | None = None,
    repeats: int = 5,
    lanes: int = LANES,
) -> ExchangeProfile:
    """Plan and profile every bucket on this machine.

    Args:
        parameters: Parameters by name; their values are not read, so ``meta`` tensors suffice.
        buckets: Buckets in DDP's layout.
        lanes: Number of lanes, with which delays are counted; DDP alone has one.

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
    return ExchangeProfile(repr(chosen), world_size, jobs_of(planner, buckets, world_size, repeats), delays)


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


@dataclass(frozen=True, kw_only=True)
class Load:
    """Ranks and cores of one computer.

    Attributes:
        ranks: Ranks that share the cores.
        cores: Cores of the computer.
    """

    ranks: int = 1
    cores: int = 1

    @property
    def stretch(self) -> float:
        """Factor by which work lasts longer than on a core of its own."""
        return max(1.0, self.ranks / self.cores)

    @property
    def runners(self) -> float:
        """Threads of one rank that can run side by side at full speed."""
        return max(1.0, self.cores / self.ranks)


@dataclass(frozen=True)
class Steps:
    """A predicted step.

    Attributes:
        step_s: Seconds of the whole step.
        compute_s: Seconds of the timeline.
        busy_s: CPU seconds of the exchange, including the effect of shared cores.
        wire_s: Seconds that the bytes take at the network link's bandwidth.
    """

    step_s: float
    compute_s: float
    busy_s: float
    wire_s: float

    @property
    def floor_s(self) -> float:
        """Least time of a step with these bytes: max(compute, bytes / bandwidth)."""
        return max(self.compute_s, self.wire_s)

    @property
    def bottleneck(self) -> str:
        """The largest part of the step: "compute", "link", "codec and collectives" or "latency"."""
        if self.step_s <= 1.1 * self.compute_s:
            return "compute"
        rest = {"link": self.wire_s, "codec and collectives": self.busy_s}
        name = max(rest, key=lambda n: rest[n])
        return name if rest[name] >= 0.5 * (self.step_s - self.compute_s) else "latency"


def step_time(
    timeline: Timeline, exchange: ExchangeProfile, *, machine: Machine, link: LinkModel, load: Load, lanes: int = LANES
) -> Steps:
    """Predict the time of a step.

    Threads that share cores take work in the order of arrival, so a step is not monotone in the network's speed: as in
    any schedule without foresight (Graham 1969, "Bounds on multiprocessing timing anomalies"), a faster network can
    move work to where it hides fewer bytes. On one core the loss is at most the time of bytes and latencies.

    Args:
        timeline: Timeline measured with all ranks of a computer running.
        exchange: Exchange of as many buckets as the timeline has.
        machine: Calibrated costs.
        link: Network link of a host.
        load: Ranks and cores of a host.
        lanes: Number of lanes.
    """
    factor = load.stretch * machine.contention
    speed = link.bandwidth_bytes_per_s
    flow = speed / link.ranks_per_host if speed else float("inf")
    connection = connection_rate(link.latency_s, link.loss)

    def among(stage: Stage) -> Sequence[int]:
        return range(exchange.world_size) if stage.scope is None else stage.scope.ranks(0)

    def item(stage: Stage) -> Iterator[Item]:
        if stage.work_s:
            yield Item(cpu_s=stage.work_s * factor)
        if stage.kind:
            ring, pairs = stage.kind == "ring", stage.kind == "pairs"
            alone = ring or pairs or stage.kind == "broadcast"
            byte_s = machine.sum_byte_s if ring else machine.byte_s
            efficiency = machine.ring_efficiency if alone else machine.crowd_efficiency
            ranks, inside = among(stage), stage.scope is not None and not link.elsewhere(among(stage))
            leaving = link.leaving(stage.sent_bytes, ring, ranks)
            # Only a crowd uses several connections of a rank at a time.
            rate = connection * (1 if alone else max(1, link.elsewhere(ranks)))
            travel_s = resending_s = 0.0
            if not inside:
                travel_s = stage.delays * link.latency_s
                resending_s = link.resending_s(2 * stage.messages * len(ranks), stage.delays // 2)
            # Bytes that the network link could carry in the time that these take.
            sent_bytes = leaving / efficiency if speed or rate < math.inf else 0.0
            # A ring has two segments under way at a time: of two places, one's bytes are sent while the other's travel.
            # With M delays of d seconds and bytes that take B, it takes max(B, B / 2 + M d).
            held_bytes = sent_bytes / 2 if ring and travel_s else 0.0
            yield Item(
                cpu_s=(machine.call_s + machine.message_s * stage.messages + byte_s * stage.sent_bytes) * factor,
                latency_s=stage.rounds * machine.round_s * load.stretch + resending_s + (0.0 if ring else travel_s),
                sent_bytes=sent_bytes - held_bytes,
                most_bytes_per_s=rate / efficiency,
                travel_s=travel_s if ring else 0.0,
                held_bytes=held_bytes,
                in_turn=pairs and not (stage.scope is not None and stage.scope.local),
            )

    runners = [Runner() for _ in range(lanes)]
    main = Runner()
    busy_s = 0.0
    everything: list[Job] = []

    def queue(items: Iterator[Item], lane: int, after: Job | None = None) -> Job:
        job = Job(deque(items), after, everything[-1] if everything else None)
        runners[lane % lanes].jobs.append(job)
        everything.append(job)
        return job

    def submit(number: int, bucket: BucketJobs) -> None:
        chunks = [list(chunk) for chunk in bucket.chunks]
        if bucket.asynchronous:
            for i, chunk in enumerate(chunks):
                # The thread that brought the bucket has done the first work.
                stages = [replace(s, work_s=s.work_s if k else 0.0) for k, s in enumerate(chunk)]
                queue((x for s in stages for x in item(s)), number + i)
        elif len(chunks) == 1:
            queue((x for s in (*bucket.prepare, *chunks[0]) for x in item(s)), number)
        else:
            first = queue((x for s in bucket.prepare for x in item(s)), number)
            for i, chunk in enumerate(chunks):
                queue((x for s in chunk for x in item(s)), number + i, first)

    now_s = advance([main, *runners], compute(timeline.forward_s), flow, load.runners)
    last_s = 0.0
    for number, (ready, bucket) in enumerate(zip(timeline.buckets, exchange.buckets)):
        inline_s = machine.bucket_s * factor
        if bucket.asynchronous:
            inline_s += sum(chunk[0].work_s for chunk in bucket.chunks if chunk) * factor
        busy_s += inline_s
        now_s += advance([main, *runners], compute(ready.ready_s - last_s + inline_s), flow, load.runners)
        last_s = ready.ready_s
        submit(number, bucket)
    now_s += advance([main, *runners], compute(timeline.backward_s - last_s), flow, load.runners)
    now_s += drain(runners, flow, load.runners)
    for bucket in exchange.buckets:
        for job in (bucket.prepare, *bucket.chunks):
            for k, stage in enumerate(job):
                skip = bucket.asynchronous and not k
                busy_s += sum(i.cpu_s for i in item(stage)) - (stage.work_s * factor if skip else 0.0)
    stages = [s for b in exchange.buckets for job in (b.prepare, *b.chunks) for s in job]
    leaving = (link.leaving(s.sent_bytes, s.kind == "ring", among(s)) for s in stages if s.kind)
    wire_s = sum(leaving) / flow if speed else 0.0
    return Steps(now_s + timeline.after_s, timeline.compute_s, busy_s, wire_s)
