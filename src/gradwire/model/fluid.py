"""A fluid simulation of threads that share cores and a network link.

Runners take jobs in order, and a job its items. Of all current items CPU work shares the cores, bytes share the link,
and times pass side by side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_DONE, _BYTE = 1e-12, 1e-6


@dataclass
class Item:
    """The remaining parts of a runner's current item: CPU work beside all others, and one after the other the rest.

    Attributes:
        latency_s: Time before the first byte.
        travel_s: Time after it in which no more than ``sent_bytes`` can be sent.
        held_bytes: Bytes that can be sent after that time.
        most_bytes_per_s: The fastest that bytes can be sent.
    """

    cpu_s: float = 0.0
    latency_s: float = 0.0
    sent_bytes: float = 0.0
    in_turn: bool = False
    most_bytes_per_s: float = math.inf
    travel_s: float = 0.0
    held_bytes: float = 0.0

    @property
    def sends(self) -> bool:
        """Whether bytes are being sent."""
        return self.latency_s <= _DONE and self.sent_bytes > _BYTE

    @property
    def travels(self) -> bool:
        """Whether messages are under way while bytes may be sent."""
        return self.latency_s <= _DONE and self.travel_s > _DONE

    @property
    def over(self) -> bool:
        """Whether nothing is left of it."""
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
class Job:
    """Items in order; a job starts after ``after``, and takes its turn after ``before`` and all before it."""

    items: deque[Item]
    after: Job | None = None
    before: Job | None = None
    done: bool = False

    def has_turn(self) -> bool:
        """Return whether all jobs submitted before are done; done ones are dropped."""
        while self.before is not None and self.before.done:
            self.before = self.before.before
        return self.before is None


@dataclass
class Runner:
    """The computing thread, or a lane."""

    jobs: deque[Job] = field(default_factory=deque)

    def current(self) -> Item | None:
        """Return the item that it works on; None if it has none, or waits."""
        while self.jobs:
            job = self.jobs[0]
            if job.after is not None and not job.after.done:
                return None
            while job.items and job.items[0].over:
                job.items.popleft()
            if job.items:
                return job.items[0] if not job.items[0].in_turn or job.has_turn() else None
            job.done = True
            self.jobs.popleft()
        return None


def compute(seconds: float) -> Job:
    """Return a job of the computing thread."""
    return Job(deque([Item(cpu_s=max(0.0, seconds))]))


def advance(runners: Sequence[Runner], job: Job, flow: float, cores: float) -> float:
    """Run everything until the computing thread, the first runner, has done a job; return the seconds."""
    main = runners[0]
    main.jobs.append(job)
    passed_s = 0.0
    while main.current() is not None:
        passed_s += _moment(runners, flow, cores)
    return passed_s


def drain(runners: Sequence[Runner], flow: float, cores: float) -> float:
    """Run the lanes until all jobs are done; return the seconds."""
    passed_s = 0.0
    while _current(runners):
        passed_s += _moment(runners, flow, cores)
    return passed_s


def _current(runners: Sequence[Runner]) -> list[Item]:
    """Return the current items of the runners; finished jobs end, which may let others begin."""
    while True:
        left = sum(len(r.jobs) for r in runners)
        items = [item for item in (r.current() for r in runners) if item is not None]
        if left == sum(len(r.jobs) for r in runners):
            return items


def _moment(runners: Sequence[Runner], flow: float, cores: float) -> float:
    """Run until the first part of any current item ends; return the seconds."""
    items = _current(runners)
    working = [i for i in items if i.cpu_s > _DONE]
    sending = [i for i in items if i.sends]
    speed = min(1.0, cores / len(working)) if working else 1.0
    rates = shares(sending, flow)
    ends = [i.cpu_s / speed for i in working] + [i.latency_s for i in items if i.latency_s > _DONE]
    ends += [i.travel_s for i in items if i.travels]
    ends += [i.sent_bytes / rate for i, rate in zip(sending, rates)]
    passed_s = min(ends)
    rate_of = {id(i): rate for i, rate in zip(sending, rates)}
    for i in items:
        i.pass_time(passed_s, speed, rate_of.get(id(i), 0.0))
    return passed_s


def shares(sending: list[Item], flow: float) -> list[float]:
    """Return the rate of each item: equal shares of the link, of which the slow leave their rest to the others.

    The items are brought into the order of their fastest rates.
    """
    sending.sort(key=lambda item: item.most_bytes_per_s)
    rates: list[float] = []
    for done, item in enumerate(sending):
        share = flow if math.isinf(flow) else (flow - sum(rates)) / (len(sending) - done)
        rates.append(min(item.most_bytes_per_s, share))
    return rates
