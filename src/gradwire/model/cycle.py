"""A method with local steps: what it exchanges in a cycle, and how long a step of the cycle takes on average."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch

from gradwire.exchange.local_steps import VELOCITY, StepsLocally
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Pieces, Planner, exchanged, own_buckets
from gradwire.methods.spec import method as read_method
from gradwire.model.exchange import ExchangeProfile, jobs_of
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.schedule import Load, Steps, step_time
from gradwire.model.timeline import ReadyBucket, Timeline

__all__ = ["Cycle", "Fragment", "cycle_of", "cycle_time"]


@dataclass(frozen=True)
class Fragment:
    """What is exchanged at a time.

    Attributes:
        exchange: Of its buckets.
        buckets: All there when the exchange begins.
        own_s: Seconds, alone on a core, of the differences that are sent and of the steps that the means make.
    """

    exchange: ExchangeProfile
    buckets: tuple[ReadyBucket, ...]
    own_s: float


@dataclass(frozen=True)
class Cycle:
    """The steps from one exchange of a fragment to its next.

    Attributes:
        spec: The method.
        every: Optimizer steps of a cycle.
        delay: Steps beside which each exchange goes on; with 0 all wait for it.
        fragments: One after the other, one exchange each.
    """

    spec: str
    every: int
    delay: int
    fragments: tuple[Fragment, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step, on average."""
        return sum(f.exchange.sent_bytes for f in self.fragments) / self.every


def cycle_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    world_size: int,
    options: Options | None = None,
    repeats: int = 5,
) -> Cycle:
    """Plan and profile the exchanges of a method with local steps on this machine.

    Of a method by which ranks exchange with neighbours, they are those of rank 0: on unequal links, or where ranks have
    unequal numbers of neighbours, others may take longer. Of a method whose payloads alternate from round to round, as
    PowerGossip's factors, they are those of the even rounds.

    Args:
        parameters: By name; their values are not read, so ``meta`` tensors do.

    Raises:
        IncompatibleError: the method cannot serve that many ranks, or an option does not fit it.
    """
    chosen, given = read_method(method), options or Options()
    pieces, its = exchanged(chosen, parameters, given)
    steps = None if chosen.outcomes_differ else cast(StepsLocally, chosen)
    groups = pieces.fragments if isinstance(pieces, Pieces) else [list(pieces)]
    planner = Planner(chosen, pieces, world_size, its)
    planner.compile()
    fragments = []
    for names in groups:
        part = {name: pieces[name] for name in names}
        buckets = tuple(
            ReadyBucket(names=tuple(names), numel=sum(part[name].numel() for name in names), ready_s=0.0)
            for names in own_buckets(part, 4 * given.chunk_numel)
        )
        jobs = ExchangeProfile(repr(chosen), world_size, jobs_of(planner, buckets, world_size, repeats))
        numel = sum(bucket.numel for bucket in buckets)
        fragments.append(Fragment(jobs, buckets, _own_work(steps, numel, world_size, repeats)))
    delay = steps.delay if steps is not None else 0
    return Cycle(repr(chosen), chosen.local_steps, delay, tuple(fragments))


def cycle_time(timeline: Timeline, cycle: Cycle, *, machine: Machine, link: LinkModel, load: Load) -> Steps:
    """Predict a step of a cycle, on average.

    With C seconds of a step that exchanges nothing, H steps and F fragments a cycle, delay d, and T_f the seconds in
    which the exchange of fragment f ends that goes on beside d such steps (by
    :func:`~gradwire.model.schedule.step_time`, so that the two share cores), a step takes::

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
    """Time what is done with a fragment's parameters before and after their exchange."""
    own, held, mean, velocity = (torch.zeros(numel) for _ in range(4))
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
