"""The time of a step: a fluid simulation that schedules the jobs of an exchange."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from gradwire.exchange.drivers import LANES, Stage
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.profile import Timeline

_DONE, _BYTE = 1e-12, 1e-6


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


@dataclass
class _Item:
    """The remaining parts of a runner's current item: CPU work beside all others, and one after the other the rest.

    Attributes:
        latency_s: Time before the first byte.
        turn: Number of the job, if of all such items the one of the earliest job sends before the others, which have
            what its connections leave of the link; None: sends at any time.
        travel_s: Time after it in which no more than ``sent_bytes`` can be sent.
        held_bytes: Bytes that can be sent after that time.
        most_bytes_per_s: The fastest that bytes can be sent.
    """

    cpu_s: float = 0.0
    latency_s: float = 0.0
    sent_bytes: float = 0.0
    turn: int | None = None
    most_bytes_per_s: float = math.inf
    travel_s: float = 0.0
    held_bytes: float = 0.0

    @property
    def sends(self) -> bool:
        return self.latency_s <= _DONE and self.sent_bytes > _BYTE

    @property
    def travels(self) -> bool:
        return self.latency_s <= _DONE and self.travel_s > _DONE

    @property
    def over(self) -> bool:
        return self.cpu_s <= _DONE and self.latency_s <= _DONE and not self.sends and not self.travels

    def pass_time(self, seconds: float, speed: float, rate: float) -> None:
        """Let time pass, with a share of a core and a rate of bytes."""
        sends, travels = self.sends, self.travels
        if self.cpu_s > _DONE:
            self.cpu_s -= seconds * speed
        if self.latency_s > _DONE:
            self.latency_s -= seconds
        if sends:
            self.sent_bytes -= seconds * rate
        if travels:
            self.travel_s -= seconds
            if self.travel_s <= _DONE:
                self.sent_bytes, self.held_bytes = self.sent_bytes + self.held_bytes, 0.0


@dataclass
class _Job:
    """Items in order; a job starts after ``after``."""

    items: deque[_Item]
    after: _Job | None = None
    done: bool = False


@dataclass
class _Runner:
    """The computing thread, or a lane."""

    jobs: deque[_Job] = field(default_factory=deque)

    def current(self) -> _Item | None:
        while self.jobs:
            job = self.jobs[0]
            if job.after is not None and not job.after.done:
                return None
            while job.items and job.items[0].over:
                job.items.popleft()
            if job.items:
                return job.items[0]
            job.done = True
            self.jobs.popleft()
        return None


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
    connection = link.connection_bytes_per_s

    def among(stage: Stage) -> Sequence[int]:
        return range(exchange.world_size) if stage.scope is None else stage.scope.ranks(0)

    def message(stage: Stage) -> float:
        """Bytes of a message between hosts that rests before; a ring's connections never do."""
        if stage.kind in ("", "ring"):
            return 0.0
        return link.leaving(stage.sent_bytes, False, among(stage)) / max(1, stage.messages)

    def handling_s(stage: Stage) -> float:
        byte_s = machine.sum_byte_s if stage.kind == "ring" else machine.byte_s
        taken_s = machine.call_s + machine.message_s * stage.messages + byte_s * stage.sent_bytes
        return taken_s * factor if stage.kind else 0.0

    def items(stage: Stage, number: int, lane: int) -> Iterator[_Item]:
        if stage.work_s:
            yield _Item(cpu_s=stage.work_s * factor)
        if stage.kind:
            ring, pairs = stage.kind == "ring", stage.kind == "pairs"
            alone = ring or pairs or stage.kind == "broadcast"
            ranks, inside = among(stage), stage.scope is not None and not link.elsewhere(among(stage))
            leaving = link.leaving(stage.sent_bytes, ring, ranks)
            # Only a crowd uses several connections of a rank at a time.
            rate = connection * (1 if alone else max(1, link.elsewhere(ranks))) / machine.efficiency
            travel_s = resending_s = 0.0
            if not inside:
                travel_s = stage.delays * link.latency_s
                # A ring asks for each message in its turn; other messages have been asked for before.
                turns, each = (stage.delays // 2, 2) if ring else (stage.delays, 1)
                resending_s = link.resending_s(each * stage.messages * len(ranks), turns, leaving * len(ranks))
                pacing_s = turns * link.pacing_s(message(stage), most_bytes[lane])
                rate = min(rate, leaving / machine.efficiency / pacing_s) if pacing_s else rate
            # Bytes that the network link could carry in the time that these take.
            sent_bytes = leaving / machine.efficiency if speed or rate < math.inf else 0.0
            # A ring has two segments under way at a time: of two places, one's bytes are sent while the other's travel.
            # With M delays of d seconds and bytes that take B, it takes max(B, B / 2 + M d).
            held_bytes = sent_bytes / 2 if ring and travel_s else 0.0
            yield _Item(
                cpu_s=handling_s(stage),
                latency_s=stage.rounds * machine.round_s * load.stretch + resending_s + (0.0 if ring else travel_s),
                sent_bytes=sent_bytes - held_bytes,
                most_bytes_per_s=rate,
                travel_s=travel_s if ring else 0.0,
                held_bytes=held_bytes,
                turn=number if pairs and not (stage.scope is not None and stage.scope.local) else None,
            )

    runners = [_Runner() for _ in range(lanes)]
    main = _Runner()
    busy_s = 0.0
    numbers = count()

    # The backend's threads share one connection to each rank, which matters where losses limit it.
    apart = connection == math.inf
    placed = [_placed(number, bucket, lanes, apart) for number, bucket in enumerate(exchange.buckets)]
    most_bytes = [0.0] * lanes
    for lane, listed in (job for jobs in placed for job in jobs):
        most_bytes[lane] = max([most_bytes[lane], *map(message, listed)])

    def submit(jobs: Sequence[tuple[int, Sequence[Stage]]], prepared: bool) -> None:
        first: _Job | None = None
        for lane, stages in jobs:
            number = next(numbers)
            job = _Job(deque(x for stage in stages for x in items(stage, number, lane)), first)
            runners[lane].jobs.append(job)
            first = job if prepared and first is None else first

    now_s = _advance([main, *runners], _compute(timeline.forward_s), flow, load)
    last_s = 0.0
    for number, (ready, bucket) in enumerate(zip(timeline.buckets, exchange.buckets)):
        inline_s = machine.bucket_s * factor
        if bucket.asynchronous:
            inline_s += sum(chunk[0].work_s for chunk in bucket.chunks if chunk) * factor
        busy_s += inline_s
        now_s += _advance([main, *runners], _compute(ready.ready_s - last_s + inline_s), flow, load)
        last_s = ready.ready_s
        submit(placed[number], len(placed[number]) > len(bucket.chunks))
    now_s += _advance([main, *runners], _compute(timeline.backward_s - last_s), flow, load)
    now_s += _drain(runners, flow, load)
    busy_s += sum(s.work_s * factor + handling_s(s) for jobs in placed for _, listed in jobs for s in listed)
    stages = [s for b in exchange.buckets for job in (b.prepare, *b.chunks) for s in job]
    leaving = (link.leaving(s.sent_bytes, s.kind == "ring", among(s)) for s in stages if s.kind)
    wire_s = sum(leaving) / flow if speed else 0.0
    return Steps(now_s + timeline.after_s, timeline.compute_s, busy_s, wire_s)


def _placed(number: int, bucket: BucketJobs, lanes: int, apart: bool) -> list[tuple[int, tuple[Stage, ...]]]:
    """Return the lanes and stages of a bucket's jobs: those of its chunks, after that of its preparation if it is one.

    Args:
        number: Number of the bucket.
        bucket: The bucket.
        lanes: Number of lanes.
        apart: Whether chunks of a bucket without lanes run beside one another.
    """
    if bucket.asynchronous:
        # The thread that brought the bucket has done the first work.
        rest = [tuple(replace(s, work_s=s.work_s if k else 0.0) for k, s in enumerate(c)) for c in bucket.chunks]
        return [(apart * (number + i) % lanes, stages) for i, stages in enumerate(rest)]
    if len(bucket.chunks) == 1:
        return [(number % lanes, (*bucket.prepare, *bucket.chunks[0]))]
    return [
        (number % lanes, bucket.prepare),
        *(((number + i) % lanes, tuple(chunk)) for i, chunk in enumerate(bucket.chunks)),
    ]


def _compute(seconds: float) -> _Job:
    return _Job(deque([_Item(cpu_s=max(0.0, seconds))]))


def _advance(runners: Sequence[_Runner], job: _Job, flow: float, load: Load) -> float:
    """Run everything until the computing thread, the first runner, has done a job; return the seconds."""
    main = runners[0]
    main.jobs.append(job)
    passed_s = 0.0
    while main.current() is not None:
        passed_s += _moment(runners, flow, load)
    return passed_s


def _drain(runners: Sequence[_Runner], flow: float, load: Load) -> float:
    """Run the lanes until all jobs are done; return the seconds."""
    passed_s = 0.0
    while _current(runners):
        passed_s += _moment(runners, flow, load)
    return passed_s


def _current(runners: Sequence[_Runner]) -> list[_Item]:
    """Return the current items of the runners; finished jobs end, which may let others begin."""
    while True:
        left = sum(len(r.jobs) for r in runners)
        items = [item for item in (r.current() for r in runners) if item is not None]
        if left == sum(len(r.jobs) for r in runners):
            return items


def _moment(runners: Sequence[_Runner], flow: float, load: Load) -> float:
    """Run until the first part of any current item ends; return the seconds."""
    items = _current(runners)
    working = [i for i in items if i.cpu_s > _DONE]
    sending = [i for i in items if i.sends and i.turn is None]
    in_turn = sorted((i for i in items if i.sends and i.turn is not None), key=lambda item: item.turn or 0)
    speed = min(1.0, load.runners / len(working)) if working else 1.0
    sending += in_turn[:1]
    rates = _shares(sending, flow)
    # The kernel takes rows before they have left: what the connections of one job cannot carry is for the next.
    for item in in_turn[1:]:
        rate = min(item.most_bytes_per_s, flow - sum(rates))
        if rate > _BYTE:
            sending.append(item)
            rates.append(rate)
    ends = [i.cpu_s / speed for i in working] + [i.latency_s for i in items if i.latency_s > _DONE]
    ends += [i.travel_s for i in items if i.travels]
    ends += [i.sent_bytes / rate for i, rate in zip(sending, rates)]
    passed_s = min(ends)
    rate_of = {id(i): rate for i, rate in zip(sending, rates)}
    for i in items:
        i.pass_time(passed_s, speed, rate_of.get(id(i), 0.0))
    return passed_s


def _shares(sending: list[_Item], flow: float) -> list[float]:
    """Return the rate of each item: equal shares of the link, of which the slow leave their rest to the others.

    The items are brought into the order of their fastest rates.
    """
    sending.sort(key=lambda item: item.most_bytes_per_s)
    rates: list[float] = []
    for done, item in enumerate(sending):
        share = flow if math.isinf(flow) else (flow - sum(rates)) / (len(sending) - done)
        rates.append(min(item.most_bytes_per_s, share))
    return rates
