"""Forecasts of steps by method and network, including cycles of methods with local steps, and advice."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import cast

import torch

from gradwire.errors import GradwireError
from gradwire.exchange.method import Method
from gradwire.exchange.pace import AtOwnPace
from gradwire.exchange.planning import FragmentPieces, Options, Planner, exchanged, own_buckets
from gradwire.exchange.steps_locally import VELOCITY, StepsLocally
from gradwire.methods.auto import not_comparable
from gradwire.methods.spec import method as read_method
from gradwire.model.exchange_profile import ExchangeProfile, exchange_of, jobs_of, nothing_but_the_sum
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.profile import Profile, ReadyBucket, Timeline
from gradwire.model.schedule import Load, Steps, step_time
from gradwire.model.server import ServerProfile, server_of, server_time

NOTHING = "ddp fp32"
"""The name of DDP without a hook."""

WORTH = 1.05
"""Least speed-up for which a method is recommended over a simpler one."""

SIGMAS = 1.2816
"""Standard deviations around the mean of a normal distribution that hold 80 %."""

LOSSLESS, CASTS = (NOTHING, "fp32"), ("bf16", "fp16")


@dataclass(frozen=True)
class Fragment:
    """A part of the parameters that is exchanged at once.

    Attributes:
        exchange: Exchange of its buckets.
        buckets: Its buckets, all of which are ready when the exchange begins.
        own_s: Seconds on a core of its own to compute differences before, and steps after the exchange.
    """

    exchange: ExchangeProfile
    buckets: tuple[ReadyBucket, ...]
    own_s: float


@dataclass(frozen=True)
class Cycle:
    """The steps from one exchange of a fragment to the next one of the same fragment.

    Attributes:
        spec: Spec of the method.
        every: Optimizer steps of a cycle.
        delay: Steps that go on during each exchange; 0: all ranks wait for it.
        fragments: Fragments, exchanged one after the other.
    """

    spec: str
    every: int
    delay: int
    fragments: tuple[Fragment, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step, on average."""
        return sum(f.exchange.sent_bytes for f in self.fragments) / self.every

    @property
    def delays(self) -> float:
        """One-way delays on the critical path of a step, on average."""
        return sum(f.exchange.delays.count for f in self.fragments) / self.every


def cycle_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    world_size: int,
    options: Options | None = None,
    repeats: int = 5,
) -> Cycle:
    """Plan and profile the exchanges of a method with local steps on this machine.

    For gossip they are the exchanges of rank 0: others may take longer on unequal network links, or if they have more
    neighbours. If payloads alternate from round to round, like PowerGossip's factors, they are means over the rounds.

    Args:
        parameters: Parameters by name; their values are not read, so ``meta`` tensors suffice.

    Raises:
        IncompatibleError: the method cannot serve that many ranks, or does not allow an option.
    """
    chosen, given = read_method(method), options or Options()
    pieces, its = exchanged(chosen, parameters, given)
    steps = None if chosen.traits.outcomes_differ else cast(StepsLocally, chosen)
    groups = pieces.fragments if isinstance(pieces, FragmentPieces) else [list(pieces)]
    planner = Planner(chosen, pieces, world_size, its)
    planner.compile()
    fragments = []
    for names in groups:
        part = {name: pieces[name] for name in names}
        buckets = tuple(
            ReadyBucket(names=tuple(names), numel=sum(part[name].numel() for name in names), ready_s=0.0)
            for names in own_buckets(part, 4 * given.chunk_numel)
        )
        delays = planner.delays([bucket.names for bucket in buckets])
        jobs = ExchangeProfile(repr(chosen), world_size, jobs_of(planner, buckets, world_size, repeats), delays)
        numel = sum(bucket.numel for bucket in buckets)
        fragments.append(Fragment(jobs, buckets, _own_work(steps, numel, world_size, repeats)))
    delay = steps.delay if steps is not None else 0
    return Cycle(repr(chosen), chosen.traits.local_steps, delay, tuple(fragments))


def cycle_time(timeline: Timeline, cycle: Cycle, *, machine: Machine, link: LinkModel, load: Load) -> Steps:
    """Predict the mean time of a step in a cycle.

    Let C be the seconds of a step without an exchange, H the steps and F the fragments of a cycle, d the delay, and T_f
    the seconds of d steps beside the exchange of fragment f (by :func:`~gradwire.model.schedule.step_time`, since both
    share cores). A step takes::

        ((H - F d) C + sum_f (T_f + own_f)) / H
    """
    beside_s = cycle.delay * timeline.compute_s
    own = load.stretch * machine.contention
    found = []
    for fragment in cycle.fragments:
        empty = Timeline(forward_s=0.0, buckets=fragment.buckets, backward_s=beside_s, after_s=own * fragment.own_s)
        found.append(step_time(empty, fragment.exchange, machine=machine, link=link, load=load))
    alone_s = (cycle.every - len(found) * cycle.delay) * timeline.compute_s
    return Steps(
        step_s=(alone_s + sum(part.step_s for part in found)) / cycle.every,
        compute_s=timeline.compute_s,
        busy_s=sum(part.busy_s + own * f.own_s for part, f in zip(found, cycle.fragments)) / cycle.every,
        wire_s=sum(part.wire_s for part in found) / cycle.every,
    )


def _own_work(method: StepsLocally | None, numel: int, workers: int, repeats: int) -> float:
    """Time the work on a fragment's parameters before and after their exchange."""
    own, held, mean, velocity = (torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(4))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        sent = own.clone() if method is None or method.exchanges_parameters else held - own
        if method is None:
            own.copy_(sent)
        else:
            kept = velocity if VELOCITY in method.remembers_beside else None
            method.step_(own, held, mean if method.exchanges_parameters else held - sent, kept, workers)
        times.append(time.perf_counter() - began)
    return median(times[1:])


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster on which a model is to be trained.

    Attributes:
        hosts: Number of computers.
        ranks_per_host: Workers on each, which share its network link and cores.
        cores: Cores of each host; None: a worker never waits for a core, as if it computed on a GPU of its own.
        link: Network link between hosts; its ``ranks_per_host`` is ignored in favour of the field above. On one host
            its delay and loss only count on the way to a server, which is on a host of its own.
        measured: Whether the link was measured among these workers, so that its delay also counts on one host.
    """

    hosts: int
    ranks_per_host: int = 1
    cores: int | None = None
    link: LinkModel = field(default_factory=LinkModel)
    measured: bool = False

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.hosts * self.ranks_per_host

    @property
    def load(self) -> Load:
        """Ranks and cores of a host."""
        return Load(ranks=self.ranks_per_host, cores=self.cores or 2 * self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted step.

    ``low_s`` to ``high_s`` holds 80 % of measured steps, by the calibration's residuals; ``extrapolated`` says why it
    may not, if the cluster lies far outside the calibrated range. ``apart`` says why the method should not be chosen by
    its time. ``delays`` counts the one-way delays on the critical path of the exchange, with all buckets ready at its
    beginning (:class:`~gradwire.exchange.network_cost.Delays`). If a method exchanges in one of ``exchange_every``
    steps, times, bytes and delays are means over these. ``sent_bytes`` are those of one rank, ``speedup`` is over DDP
    alone, and ``floor_s`` is the least time of a step with these bytes.
    """

    method: str
    world_size: int
    step_s: float
    low_s: float
    high_s: float
    floor_s: float
    speedup: float
    sent_bytes: int
    bottleneck: str
    worker_steps_per_s: float
    delays: float = 0.0
    exchange_every: int = 1
    extrapolated: str | None = None
    apart: str | None = None


def forecast(
    profile: Profile, methods: Sequence[str], setting: Scenario, machine: Machine, *, repeats: int = 3
) -> tuple[list[Forecast], dict[str, str]]:
    """Predict the step of DDP alone and of each method.

    Speed-ups are over DDP alone. The timeline is lengthened if workers share cores.

    Args:
        profile: Profile of the model.
        methods: Specs of methods.
        setting: The cluster.
        machine: Calibrated costs.
        repeats: Repetitions of the run that times each codec here.

    Returns:
        A forecast for DDP alone and for each method, and the reason for each method that cannot run there.
    """
    n, load = setting.world_size, setting.load
    timeline = profile.timeline.scaled(profile.timeline.compute_s * load.stretch)
    link = LinkModel(
        bandwidth_bytes_per_s=setting.link.bandwidth_bytes_per_s,
        latency_s=setting.link.latency_s,
        ranks_per_host=setting.ranks_per_host,
        loss=setting.link.loss,
        congestion=setting.link.congestion,
    )
    # No message between workers leaves a single host. A server is on a host of its own.
    near = replace(link, latency_s=0.0, loss=0.0) if setting.hosts == 1 and not setting.measured else link
    tensors = profile.tensors()
    exchanges: dict[str, ExchangeProfile | Cycle | ServerProfile] = {}
    refused: dict[str, str] = {}
    for spec in dict.fromkeys(methods):
        try:
            if read_method(spec).traits.at_own_pace:
                exchanges[spec] = server_of(spec, tensors, profile.timeline.buckets, n, repeats=repeats)
            elif read_method(spec).traits.local_steps:
                exchanges[spec] = cycle_of(spec, tensors, n, repeats=repeats)
            else:
                exchanges[spec] = exchange_of(spec, tensors, profile.timeline.buckets, n, repeats=repeats)
        except GradwireError as error:
            refused[spec] = str(error)
    # The time of its codec is set to 0, so it need not be measured well.
    bare = nothing_but_the_sum(exchange_of("fp32", tensors, profile.timeline.buckets, n, repeats=1, lanes=1))
    chosen = {NOTHING: bare, **exchanges}
    found: list[Forecast] = []
    spread = math.exp(SIGMAS * machine.residual)
    for spec, exchange in chosen.items():
        steps = _steps(timeline, exchange, machine, link if isinstance(exchange, ServerProfile) else near, load)
        first_s = found[0].step_s if found else steps.step_s
        found.append(
            Forecast(
                method=spec,
                world_size=n,
                step_s=steps.step_s,
                low_s=steps.step_s / spread,
                high_s=steps.step_s * spread,
                floor_s=steps.floor_s,
                speedup=first_s / steps.step_s,
                sent_bytes=round(exchange.sent_bytes),
                bottleneck=steps.bottleneck,
                worker_steps_per_s=n / steps.step_s,
                delays=float(exchange.delays.count) if isinstance(exchange, ExchangeProfile) else exchange.delays,
                exchange_every=exchange.every if isinstance(exchange, Cycle) else 1,
                extrapolated=machine.beyond(n, link),
                apart=None if spec == NOTHING else why_apart(spec),
            )
        )
    return found, refused


def _steps(
    timeline: Timeline, exchange: ExchangeProfile | Cycle | ServerProfile, machine: Machine, link: LinkModel, load: Load
) -> Steps:
    if isinstance(exchange, ServerProfile):
        return server_time(timeline, exchange, link=link, load=load)
    if isinstance(exchange, Cycle):
        return cycle_time(timeline, exchange, machine=machine, link=link, load=load)
    return step_time(timeline, exchange, machine=machine, link=link, load=load)


def why_apart(spec: str) -> str | None:
    """Return why a method should not be chosen by the time of a step; None if it can be."""
    chosen = read_method(spec)
    if chosen.traits.at_own_pace:
        stale = cast(AtOwnPace, chosen).staleness
        apart = "any number of steps" if stale is None else f"{stale} steps"
        return (
            "needs a server on a host of its own, through whose link all bytes pass, and lets workers be "
            f"{apart} apart, so that it may need more steps to the same loss; it is simulated, and does not run over a "
            "network (gradwire.SimulatedServer)"
        )
    if chosen.traits.local_steps:
        return (
            f"exchanges in one of {chosen.traits.local_steps} steps, and may need more steps to the same loss than a "
            "method that exchanges in all of them"
            if chosen.traits.local_steps > 1
            else "leaves every worker with parameters of its own, and may need more steps to the same loss"
        )
    return not_comparable(chosen)


def recommend(forecasts: Sequence[Forecast]) -> tuple[str, str]:
    """Return the method to use, or :data:`NOTHING`, and the reason in a sentence.

    A cast is chosen over DDP alone, and then a lossy method over that choice, only if it is at least :data:`WORTH`
    times as fast.
    Methods that are ``apart`` are left out. The forecasts must include the one of :data:`NOTHING`.
    """
    forecasts = [f for f in forecasts if f.apart is None]
    best = next(f for f in forecasts if f.method == NOTHING)
    for group in (CASTS, tuple(f.method for f in forecasts if f.method not in (*CASTS, *LOSSLESS))):
        fastest = min((f for f in forecasts if f.method in group), key=lambda f: f.step_s, default=None)
        if fastest is not None and best.step_s / fastest.step_s >= WORTH:
            best = fastest
    nothing = next(f for f in forecasts if f.method == NOTHING)
    if best is nothing:
        others = max((f.speedup for f in forecasts if f is not nothing), default=1.0)
        return NOTHING, (
            f"do nothing: DDP alone takes {_seconds(nothing.step_s)} a step, bounded by {nothing.bottleneck}, and no"
            f" method makes it {WORTH:g} times as fast (the best: {others:.2f})"
        )
    sure = "" if best.high_s < nothing.low_s else "; the intervals overlap, so measure before you rely on it"
    return best.method, (
        f"use {best.method}: {_seconds(best.step_s)} a step instead of {_seconds(nothing.step_s)}"
        f" ({best.speedup:.1f} times as fast), then bounded by {best.bottleneck}{sure}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
