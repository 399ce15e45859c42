"""Cycles of methods with local steps: the exchanges between two of the same fragment, and the mean time of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch

from gradwire.exchange.method import Method
from gradwire.exchange.planning import FragmentPieces, Options, Planner, exchanged, own_buckets
from gradwire.exchange.steps_locally import VELOCITY, StepsLocally
from gradwire.methods.spec import method as read_method
from gradwire.model.exchange_profile import ExchangeProfile, jobs_of
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load, Steps, step_time


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
    Values are standard normal: those of differences depend on the optimizer. With Adam they are about normal; with SGD
    they are less even, and an entropy coder sends fewer bytes than predicted.

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
