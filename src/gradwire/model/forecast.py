"""Forecasts of steps by method and network, and advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, cast

import torch

from gradwire.errors import GradwireError
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.pace import AtOwnPace
from gradwire.exchange.planning import Options
from gradwire.methods.auto import not_comparable
from gradwire.methods.spec import method as read_method
from gradwire.model.cycle import Cycle, cycle_of, cycle_time
from gradwire.model.exchange_profile import ExchangeProfile, exchange_of, nothing_but_the_sum
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.profile import Profile, Timeline
from gradwire.model.schedule import Load, Steps, step_time
from gradwire.model.server import ServerProfile, server_of, server_time

NOTHING = "ddp fp32"
"""The name of DDP without a hook."""

WORTH = 1.05
"""Least speed-up for which a method is recommended over a simpler one."""

SIGMAS = 1.2816
"""Standard deviations around the mean of a normal distribution that hold 80 %."""


FAST_BYTES_PER_S = 1e12
"""Bytes per second of a message where neither a network nor the calibrated machine limits them."""


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


Rehearsed: TypeAlias = dict[tuple[str, int, LinkCost | None], ExchangeProfile | Cycle | ServerProfile | str]
"""Exchanges by spec, number of workers and cost of a message (None: it does not matter), or why there is none."""


def forecast(
    profile: Profile,
    methods: Sequence[str],
    setting: Scenario,
    machine: Machine,
    options: Options | None = None,
    *,
    repeats: int = 3,
    rehearsed: Rehearsed | None = None,
) -> tuple[list[Forecast], dict[str, str]]:
    """Predict the step of DDP alone and of each method.

    Speed-ups are over DDP alone. The timeline is lengthened if workers share cores.

    Args:
        profile: Profile of the model.
        methods: Specs of methods.
        setting: The cluster.
        machine: Calibrated costs.
        options: Options of the link with each method. For methods whose payloads depend on the cost of a message, it is
            that of the setting unless they state one. DDP alone has none.
        repeats: Repetitions of the run that times each codec here.
        rehearsed: Exchanges of earlier forecasts with the same profile, options and repetitions, to which those of this
            one are added, since most depend on the number of workers alone.

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
    known = {} if rehearsed is None else rehearsed
    if (NOTHING, n, None) not in known:
        # The time of its codec is set to 0, so it need not be measured well.
        bare = exchange_of("fp32", tensors, profile.timeline.buckets, n, repeats=1, lanes=1)
        known[NOTHING, n, None] = nothing_but_the_sum(bare)
    exchanges: dict[str, ExchangeProfile | Cycle | ServerProfile] = {}
    refused: dict[str, str] = {}
    for spec in dict.fromkeys((NOTHING, *methods)):
        its, cost = options or Options(), None
        if spec != NOTHING and read_method(spec).traits.needs_link_cost:
            cost = its.link_cost or _message_cost(near, n, machine, load)
            its = replace(its, link_cost=cost)
        if (spec, n, cost) not in known:
            try:
                known[spec, n, cost] = _rehearse(spec, profile, n, its, repeats)
            except GradwireError as error:
                known[spec, n, cost] = str(error)
        one = known[spec, n, cost]
        if isinstance(one, str):
            refused[spec] = one
        else:
            exchanges[spec] = one
    found: list[Forecast] = []
    spread = math.exp(SIGMAS * machine.residual)
    for spec, exchange in exchanges.items():
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


def _rehearse(
    spec: str, profile: Profile, workers: int, options: Options, repeats: int
) -> ExchangeProfile | Cycle | ServerProfile:
    traits, tensors, buckets = read_method(spec).traits, profile.tensors(), profile.timeline.buckets
    if traits.at_own_pace:
        return server_of(spec, tensors, buckets, workers, options, repeats, profile.gradients)
    if traits.local_steps:
        return cycle_of(spec, tensors, workers, options, repeats=repeats)
    return exchange_of(spec, tensors, buckets, workers, options, repeats=repeats, gradients=profile.gradients)


def _message_cost(link: LinkModel, world_size: int, machine: Machine, load: Load) -> LinkCost:
    """Return the cost that a link would measure when it is made; see :attr:`gradwire.model.probing.Probed.cost`."""
    here = link.ranks_per_host
    copies = here * (world_size - here)
    rates = [1.0 / machine.byte_s if machine.byte_s else FAST_BYTES_PER_S]
    if copies and link.bandwidth_bytes_per_s is not None:
        rates.append(link.bandwidth_bytes_per_s / copies)
    return LinkCost(message_s=link.latency_s + machine.round_s * load.stretch, bytes_per_s=min(rates))


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


class Loss(Enum):
    """What a method does to the values of gradients."""

    NONE, CAST, LOSSY = "none", "cast", "lossy"


def loss_of(spec: str) -> Loss:
    """Return what the method of a spec, or :data:`NOTHING`, does to the values of gradients."""
    dtype = torch.float32 if spec == NOTHING else read_method(spec).cast_dtype
    return Loss.LOSSY if dtype is None else Loss.NONE if dtype == torch.float32 else Loss.CAST


def recommend(forecasts: Sequence[Forecast]) -> tuple[str, str]:
    """Return the method to use, or :data:`NOTHING`, and the reason in a sentence.

    A cast is chosen over DDP alone, and then a lossy method over that choice, only if it is at least :data:`WORTH`
    times as fast.
    Methods that are ``apart`` are left out. The forecasts must include the one of :data:`NOTHING`.
    """
    forecasts = [f for f in forecasts if f.apart is None]
    best = next(f for f in forecasts if f.method == NOTHING)
    for loss in Loss.CAST, Loss.LOSSY:
        fastest = min((f for f in forecasts if loss_of(f.method) is loss), key=lambda f: f.step_s, default=None)
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
