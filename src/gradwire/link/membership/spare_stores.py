"""Connections to the coordinator that are kept for later, each for one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradwire.errors import GradwireError

RUN = "run"
"""Key of the record that is there as long as the coordinator is."""

FRESH_S = 30.0
"""Time after its last use for which a connection is taken to reach the coordinator."""

KEEP_S = 15.0
"""Time after its last use after which a connection is used, only so that it lives on: routers forget idle ones."""

ADD_S = 1.0
"""Least time between two connections that are made for later."""

MOST_KEPT = 16
"""Largest number of connections that are kept."""


def answers(store: Any) -> bool:
    """Return whether a connection still reaches the coordinator."""
    try:
        return bool(store.check([RUN]))
    except (RuntimeError, dist.DistError):
        return False


class SpareStores:
    """Connections that nobody uses at the moment.

    All members need some at the same moment, when they meet, and those beyond what the coordinator's machine accepts at
    once would be made after seconds. To find out whether one still works takes a round trip, or, if a router has
    forgotten it, many minutes: torch's store waits for an answer without a limit. So each is used every few seconds,
    by a thread that nobody waits for.

    Args:
        make: Makes another connection.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._kept: list[tuple[Any, float]] = []
        """Connections, and when each was used for the last time."""
        self._is_closed = False
        self._added_s = time.monotonic()

    def lend(self) -> Any:
        """Return a connection for one thread."""
        found = self.at_hand(1)
        return found[0] if found else self._make()

    def at_hand(self, most: int) -> list[Any]:
        """Return connections that were used lately, each for one thread; drop those that were not, and make none."""
        now_s = time.monotonic()
        with self._lock:
            fresh = [one for one in self._kept if now_s - one[1] < FRESH_S]
            found, self._kept = fresh[:most], fresh[most:]
        return [store for store, _ in found]

    def take_back(self, store: Any) -> None:
        """Take back a connection that works, and in which nobody waits any more."""
        with self._lock:
            if not self._is_closed and len(self._kept) < MOST_KEPT:
                self._kept.append((store, time.monotonic()))

    def drop(self) -> None:
        """Drop the connections: the coordinator was started again, or the network has failed."""
        with self._lock:
            self._kept.clear()

    def freshen(self, least: int) -> None:
        """Let threads use connections that were idle, and make one more if there are fewer than a number.

        Call it again and again. A connection is not lent while a thread waits for its answer.
        """
        now_s = time.monotonic()
        with self._lock:
            idle = [one for one in self._kept if now_s - one[1] >= KEEP_S]
            self._kept = [one for one in self._kept if one not in idle]
            adds = len(self._kept) + len(idle) < min(least, MOST_KEPT) and now_s - self._added_s >= ADD_S
            self._added_s = now_s if adds else self._added_s
        with contextlib.suppress(RuntimeError):  # no more threads: those that were idle are dropped
            for store, _ in idle:
                threading.Thread(target=self._use, args=(store,), name="gradwire keeps", daemon=True).start()
            if adds:
                threading.Thread(target=self._add, name="gradwire connects", daemon=True).start()

    def _use(self, store: Any) -> None:
        if answers(store):
            self.take_back(store)

    def _add(self) -> None:
        # Whoever needs one makes it, and says what is wrong.
        with contextlib.suppress(RuntimeError, dist.DistError, GradwireError):
            self.take_back(self._make())

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
