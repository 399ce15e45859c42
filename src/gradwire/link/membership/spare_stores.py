"""Connections to the coordinator that are kept for later, each for one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradwire.errors import ExchangeError

RUN = "run"
"""Key of the record that is there as long as the coordinator is."""

FRESH_S = 2.0
"""Time for which a connection that has answered is taken to reach the coordinator."""


def answers(store: Any) -> bool:
    """Return whether a connection still reaches the coordinator."""
    try:
        return bool(store.check([RUN]))
    except (RuntimeError, dist.DistError):
        return False


class SpareStores:
    """Connections that nobody uses at the moment.

    All members need some at the same moment, when they meet, and those beyond what the coordinator's machine accepts at
    once would be made after seconds. A connection that was not used for a while may have broken; to find out takes a
    round trip. :meth:`freshen` finds it out beforehand.

    Args:
        make: Makes another connection.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._kept: list[tuple[Any, float]] = []
        """Connections, and when each has answered for the last time."""

    def lend(self) -> Any:
        """Return a connection for one thread."""
        while True:
            with self._lock:
                store, answered_s = self._kept.pop() if self._kept else (None, 0.0)
            if store is None:
                return self._make()
            # Several threads ask at once: over a long link, no one waits for the answer that another gets.
            if time.monotonic() - answered_s < FRESH_S or answers(store):
                return store

    def take_back(self, store: Any) -> None:
        """Take back a connection that works, and in which nobody waits any more."""
        with self._lock:
            self._kept.append((store, time.monotonic()))

    def freshen(self, least: int) -> None:
        """Let threads look which connections still work, and make those that lack to a number; they are lent soon."""
        with self._lock:
            old = [store for store, answered_s in self._kept if time.monotonic() - answered_s >= FRESH_S / 2]
            missing = least - len(self._kept)
        for store in old:
            threading.Thread(target=self._look_at, args=(store,), name="gradwire looks", daemon=True).start()
        for _ in range(missing):
            threading.Thread(target=self._add, name="gradwire connects", daemon=True).start()

    def _add(self) -> None:
        # Who needs one makes it, and says what is wrong.
        with contextlib.suppress(RuntimeError, dist.DistError, ExchangeError):
            self.take_back(self._make())

    def _look_at(self, store: Any) -> None:
        works = answers(store)
        with self._lock:
            found = [place for place, (kept, _) in enumerate(self._kept) if kept is store]
            for place in found:
                if works:
                    self._kept[place] = store, time.monotonic()
                else:
                    del self._kept[place]

    def clear(self) -> None:
        """End all connections."""
        with self._lock:
            self._kept.clear()
