"""The context of a job: a rank's place in a round, its buffers and state, and the gauges that it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.exchange.codecs import unread
from gradwire.exchange.deferred_checks import AT_ONCE, Checks, Flag
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.protocols.memory import Memory


class Gauges:
    """One rank's gauges, each a ratio of two sums over the codecs of a round's buckets and chunks, in any thread.

    Summands are integers or multiples of a power of two, so that sums do not depend on the order.

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
        """Set the latest values from the sums, unless the round was skipped, and reset the sums."""
        with self._lock:
            parts, self._parts = self._parts, {}
            if not skipped:
                self.latest = {name: total / count for name, (total, count) in parts.items() if count}


class RoundParts:
    """One rank's data of one round for its end, by parameter; the buckets of the round add it, in any thread.

    It is returned in the order of names, so that results depend on neither buckets nor lanes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, Any] = {}

    def put(self, parameter: str, part: Any) -> None:
        """Set the data of a parameter."""
        with self._lock:
            self._parts[parameter] = part

    def take(self) -> list[Any]:
        """Return all data in the order of the parameters' names, and drop it."""
        with self._lock:
            parts, self._parts = self._parts, {}
        return [parts[name] for name in sorted(parts)]


class Workspace:
    """Byte buffers that are kept between rounds, so that no step pays for new pages.

    One job at a time uses a workspace.

    Args:
        device: Device of the buffers.
        bucket: Workspace of the bucket of which this is a chunk's; None: there is one chunk.

    Attributes:
        bucket: The bucket's workspace, for buffers as long as the bucket, of which each chunk uses its own elements.
    """

    def __init__(self, device: str = "cpu", bucket: Workspace | None = None) -> None:
        self.device, self.bucket = device, bucket or self
        self._buffers: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Workspace] = {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Return the uint8 buffer of a name and shape: zeros at first, its previous content later."""
        have = self._buffers.get(name)
        if have is None or have.shape != shape:
            have = self._buffers[name] = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return have

    def part(self, name: str) -> Workspace:
        """Return the workspace of a name, for an exchange besides the job's main one; the same in every round."""
        if name not in self._parts:
            whole = None if self.bucket is self else self.bucket.part(name)
            self._parts[name] = Workspace(self.device, whole)
        return self._parts[name]

    def chunk(self, number: int) -> Workspace:
        """Return the workspace of a chunk that a plan within this job's plan exchanges; all share one bucket's."""
        return self._parts.setdefault(f"chunk {number}", Workspace(self.device, self.part("chunks")))


def _nobody(kind: str, text: str) -> None:
    """Ignore a warning."""


@dataclass(frozen=True)
class Context:
    """One rank's place in one job of one round.

    Attributes:
        rank: This rank within the group.
        world_size: Number of ranks in the group.
        round: Number of synchronised backward passes before this one.
        bucket: Index of the bucket in its step.
        chunk: Index of the chunk in its bucket.
        workspace: Buffers of this job.
        wants_sent: True if :attr:`Outcome.sent` must be set.
        memory: State of the method on this rank; by default a new, empty one.
        loss_scale: Factor by which automatic mixed precision has multiplied the gradients. State is unscaled.
        warn: ``warn(kind, text)`` logs a warning that concerns all ranks, on one rank, if it is the first of its kind.
        warn_here: The same for a warning that concerns this rank alone.
        gauge: ``gauge(name, total, count)`` adds to a number that is reported for the round; see
            :class:`gradwire.exchange.protocols.Gauges`.
        parts: Data of the round's buckets for its end; by default a new, empty one.
        learning_rates: Learning rates of the optimizer's step after the round, by name of the parameter; None if the
            method does not use them, or no optimizer is known.
        link: Cost of a message on the network, the same on all ranks; None if unknown.
        exchange: Number of the job's next exchange of payloads, which distinguishes the exchanges of one chunk; a
            second phase uses the number after it.
        checks: Takes the results of checks of payloads on a device.
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
    """The result of one job, besides the mean, which was written into the flat vector.

    Attributes:
        sent: ``sent(out, weight)`` adds ``weight`` times this rank's decoded contribution to ``out``, a vector of the
            flat vector's shape; None unless the context has ``wants_sent``.
        finite: True if every value of the mean is finite; the same on every rank. None if it was not checked.
        unchecked: The parts of the flat vector with the mean, also of what is not compressed, if it was not checked.
    """

    finite: Flag | None = None
    sent: Callable[[torch.Tensor, float], None] | None = None
    unchecked: Sequence[torch.Tensor] = ()
