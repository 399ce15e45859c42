"""Numbers that codecs report of a round, for people to see: what decides neither a byte nor a bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.exchange.codecs import unread
from gradwire.exchange.deferred_checks import AT_ONCE, Checks, Flag
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.protocols.memory import Memory


class Gauges:
    """One rank's gauges: each is a ratio whose parts the codecs of a round's buckets and chunks add up, in any thread.

    Parts are integers, or multiples of a power of two, so that their sums do not depend on the order.

    Attributes:
        latest: The ratios of the last round that was not skipped, by name; empty before there is one.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add to both parts of the gauge ``name``, which is the sum of totals over the sum of counts."""
        with self._lock:
            before, counted = self._parts.get(name, (0.0, 0.0))
            self._parts[name] = (before + total, counted + count)

    def end_round(self, *, skipped: bool) -> None:
        """Make what was added the latest values, but for a round that was skipped, and begin anew."""
        with self._lock:
            parts, self._parts = self._parts, {}
            if not skipped:
                self.latest = {name: total / count for name, (total, count) in parts.items() if count}


class RoundParts:
    """One rank's notes of one round, by parameter; the buckets of a round fill them in, in any thread.

    They are taken in the order of names, so that neither buckets nor lanes decide what is made of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, Any] = {}

    def put(self, parameter: str, part: Any) -> None:
        """Note something of a parameter."""
        with self._lock:
            self._parts[parameter] = part

    def take(self) -> list[Any]:
        """Return all that was noted, by the names of the parameters, and forget it."""
        with self._lock:
            parts, self._parts = self._parts, {}
        return [parts[name] for name in sorted(parts)]


class Workspace:
    """Byte buffers that live from round to round, so that no step pays for fresh pages.

    One workspace serves one job at a time.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Workspace] = {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Return the uint8 buffer of that name and shape; zeros the first time, whatever was left there later."""
        have = self._buffers.get(name)
        if have is None or have.shape != shape:
            have = self._buffers[name] = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return have

    def part(self, name: str) -> Workspace:
        """Return the workspace of that name for an exchange beside the job's main one; the same every round."""
        if name not in self._parts:
            self._parts[name] = Workspace(self.device)
        return self._parts[name]


def _nobody(kind: str, text: str) -> None:
    """Take a warning where nobody is to be told."""


@dataclass(frozen=True)
class Context:
    """One rank's place in one job of one round.

    Attributes:
        rank: This rank within the group.
        world_size: Ranks in the group.
        round: Synchronised backwards so far.
        bucket: Index of the bucket in its step.
        chunk: Index of the chunk in its bucket.
        workspace: Buffers of this job.
        wants_sent: Whether :attr:`Outcome.sent` is to be filled.
        memory: What this rank remembers; a memory of its own, empty, where nobody keeps one.
        loss_scale: By which automatic mixed precision has multiplied the gradients. What is remembered is unscaled.
        warn: ``warn(kind, text)`` tells people, on one rank, of something that all ranks know, if it is the first of
            its kind.
        warn_here: The same for what this rank knows and others may not.
        gauge: ``gauge(name, total, count)`` adds to a number that is reported of the round; see
            :class:`gradwire.exchange.protocols.Gauges`.
        parts: What the round's buckets leave for its end; notes of its own, empty, where nobody keeps any.
        learning_rates: Of the optimizer's step that follows the round, by the name of the parameter; None where the
            method need not know them, or no optimizer is known.
        link: What a message costs, the same on all ranks; None where nobody knows.
        exchange: Number of the job's next exchange of payloads, which tells those of one chunk apart: a protocol uses
            it, and the next one for a second phase.
        checks: Told whether what arrives on a device is as it was sent.
    """

    rank: int
    world_size: int
    round: int
    bucket: int = 0
    chunk: int = 0
    workspace: Workspace = field(default_factory=Workspace)
    wants_sent: bool = False
    memory: Memory = field(default_factory=Memory)
    loss_scale: float = 1.0
    warn: Callable[[str, str], None] = _nobody
    warn_here: Callable[[str, str], None] = _nobody
    gauge: Callable[[str, float, float], None] = unread
    parts: RoundParts = field(default_factory=RoundParts)
    learning_rates: Mapping[str, float] | None = None
    link: LinkCost | None = None
    exchange: int = 0
    checks: Checks = AT_ONCE


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one job did; the mean itself was written into the flat vector.

    Attributes:
        sent: ``sent(out, weight)`` adds ``weight`` times what this rank really contributed, decoded, to ``out``, a
            vector of the flat vector's shape; None unless the context asked for it.
        finite: Whether every value of the mean is finite; the same on every rank. None where nobody looked.
    """

    finite: Flag | None = None
    sent: Callable[[torch.Tensor, float], None] | None = None
