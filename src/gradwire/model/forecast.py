"""Step times by method on a cluster, what bounds them, and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire.errors import GradwireError
from gradwire.methods.auto import not_comparable
from gradwire.methods.spec import method as read_method
from gradwire.model.cycle import Cycle, cycle_of, cycle_time
from gradwire.model.exchange import ExchangeProfile, exchange_of, nothing_but_the_sum
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.profile import Profile
from gradwire.model.schedule import Load, Steps, step_time
from gradwire.model.timeline import Timeline

__all__ = ["NOTHING", "Forecast", "Scenario", "forecast", "recommend", "why_apart"]

NOTHING = "ddp fp32"
"""DDP without a hook."""

WORTH = 1.05
"""Speed-up below which doing less is recommended."""

SIGMAS = 1.2816
"""Of a normal distribution: 80 % lie within."""

LOSSLESS, CASTS = (NOTHING, "fp32"), ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Where a model is to be trained.

    Attributes:
        hosts: Computers.
        ranks_per_host: Workers on each, sharing its link and cores.
        cores: Of each host; None: a worker never waits for a core, as with a GPU of its own.
        link: Between hosts; its ``ranks_per_host`` is set from here.
    """

    hosts: int
    ranks_per_host: int = 1
    cores: int | None = None
    link: LinkModel = field(default_factory=LinkModel)

    @property
    def world_size(self) -> int:
        """Workers."""
        return self.hosts * self.ranks_per_host

    @property
    def load(self) -> Load:
        """Ranks and cores of a host."""
        return Load(ranks=self.ranks_per_host, cores=self.cores or 2 * self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted step.

    ``low_s`` to ``high_s`` holds 80 % of measured steps, by the calibration's residuals; ``extrapolated`` says why it
    may not, where the setting lies far outside of the calibration. ``apart`` says why the method is not to be chosen by
    its time. Of a method that exchanges in one of ``exchange_every`` steps, times and bytes are means over these.
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
    exchange_every: int = 1
    extrapolated: str | None = None
    apart: str | None = None


def forecast(
    profile: Profile, methods: Sequence[str], setting: Scenario, machine: Machine, *, repeats: int = 3
) -> tuple[list[Forecast], dict[str, str]]:
    """Predict the step of each method, and of DDP alone.

    Speed-ups are over DDP alone. The timeline is stretched where workers share cores.

    Args:
        methods: Specs.
        repeats: Of the rehearsal that times each codec here.

    Returns:
        One forecast for DDP alone and each method, and the reasons of methods that cannot run there.
    """
    n, load = setting.world_size, setting.load
    timeline = profile.timeline.scaled(profile.timeline.compute_s * load.stretch)
    link = LinkModel(
        bandwidth_bytes_per_s=setting.link.bandwidth_bytes_per_s,
        latency_s=setting.link.latency_s,
        ranks_per_host=setting.ranks_per_host,
    )
    tensors = profile.tensors()
    exchanges: dict[str, ExchangeProfile | Cycle] = {}
    refused: dict[str, str] = {}
    for spec in dict.fromkeys(methods):
        try:
            if read_method(spec).local_steps:
                exchanges[spec] = cycle_of(spec, tensors, n, repeats=repeats)
            else:
                exchanges[spec] = exchange_of(spec, tensors, profile.timeline.buckets, n, repeats=repeats)
        except GradwireError as error:
            refused[spec] = str(error)
    # Its codec is not counted, so that it need not be timed well.
    bare = nothing_but_the_sum(exchange_of("fp32", tensors, profile.timeline.buckets, n, repeats=1))
    chosen = {NOTHING: bare, **exchanges}
    found: list[Forecast] = []
    spread = math.exp(SIGMAS * machine.residual)
    for spec, exchange in chosen.items():
        steps = _steps(timeline, exchange, machine, link, load)
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
                exchange_every=exchange.every if isinstance(exchange, Cycle) else 1,
                extrapolated=machine.beyond(n, link),
                apart=None if spec == NOTHING else why_apart(spec),
            )
        )
    return found, refused


def _steps(
    timeline: Timeline, exchange: ExchangeProfile | Cycle, machine: Machine, link: LinkModel, load: Load
) -> Steps:
    if isinstance(exchange, Cycle):
        return cycle_time(timeline, exchange, machine=machine, link=link, load=load)
    return step_time(timeline, exchange, machine=machine, link=link, load=load)


def why_apart(spec: str) -> str | None:
    """Explain why the time of a step alone does not tell whether to use a method; None where it does."""
    chosen = read_method(spec)
    if chosen.local_steps:
        return (
            f"exchanges in one of {chosen.local_steps} steps, and may need more steps to the same loss than a method "
            "that exchanges in all of them"
            if chosen.local_steps > 1
            else "leaves every worker with parameters of its own, and may need more steps to the same loss"
        )
    return not_comparable(chosen)


def recommend(forecasts: Sequence[Forecast]) -> tuple[str, str]:
    """Return the method to use, or :data:`NOTHING`, and the reason in a sentence.

    Nothing before a cast, a cast before a lossy method, unless the next brings five per cent. Methods apart from the
    others are left out.
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
