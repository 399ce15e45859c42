"""Moments of a training at which a trial acts on it: between exchanges, or at one of the collectives of an exchange."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

BETWEEN, WITHIN, SAVE, ATTACH = MOMENTS = ("between exchanges", "in an exchange", "in gw.save", "in attach")

BEFORE = -1
"""Calls of a rank that acts before it calls anything."""

COLLECTIVES = (
    "allgather", "_allgather_base", "allreduce", "broadcast", "alltoall_base", "send", "recv", "_reduce_scatter_base",
    "reduce_scatter",
)  # fmt: skip
"""By which Python asks a process group, or a backend, for an exchange; FSDP2's own and gradwire's alike."""


class Moment:
    """Calls :meth:`act` in this process at a moment of the training.

    Args:
        moment: One of :data:`MOMENTS`.
        calls: Collectives that come before, from the moment on; or :data:`BEFORE`.
        begun: Whether the collective after them is begun before the call.
    """

    def __init__(self, moment: str, calls: int, begun: bool) -> None:
        self._moment, self._calls, self._begun = moment, calls, begun
        self._left: int | None = None
        self._lock = threading.Lock()

    def act(self) -> None:
        """Do what the trial is about."""
        raise NotImplementedError

    def comes(self, moment: str) -> None:
        """Act where this is the moment, or let one of the next collectives do so."""
        if moment != self._moment:
            return
        if moment == BETWEEN or self._calls == BEFORE:
            self.act()
            return
        self.watch(self._calls)

    def watch(self, calls: int) -> None:
        """Act at the collective after so many others."""
        self._left = calls
        for kind, name in itertools.product((dist.ProcessGroup, dist.ProcessGroupGloo), COLLECTIVES):
            if hasattr(kind, name):
                setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            # Lanes are threads.
            with self._lock:
                due = self._left == 0
                self._left = None if due or self._left is None else self._left - 1
            if due and not self._begun:
                self.act()
            found = collective(*arguments, **options)
            if due and self._begun:
                self.act()
            return found

        return counted
