"""What a running protocol may know, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from gradwire.exchange.codecs import unread
from gradwire.exchange.deferred_checks import AT_ONCE, Checks, Flag
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.protocols.memory import Memory
from gradwire.exchange.protocols.round_parts import RoundParts

__all__ = ["Context", "Outcome", "Workspace"]


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
