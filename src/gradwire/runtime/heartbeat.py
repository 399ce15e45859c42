"""Who is alive, and what failed where: told through the group's store.

Every rank writes a counter twice a second. While an exchange lasts long, each looks at the others' and warns of one
that stands still: a rank that is stopped closes no connection, so nothing breaks before the group's timeout. A rank
that fails writes what failed and where before it ends. A rank whose collective breaks looks both up: it names the rank
that reported a failure or, where none did, those whose counter stands still.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Failure", "Heartbeat"]

BEAT_S = 0.5
SILENCE_S = 3.0
"""A rank whose counter stands still for this long is called silent."""

PATIENCE_S = 20.0
"""An exchange in which nothing ended for this long makes a rank look at the others' counters."""


@dataclass(frozen=True)
class Failure:
    """What a rank reports of itself: ``place`` is "bucket 3, chunk 0, round 17" or the like."""

    rank: int
    place: str
    reason: str


class Heartbeat:
    """One rank's beat, and its view of the others'.

    Args:
        store: Shared by the ranks; keys are put under a prefix of their own.
        rank: This rank within its group.
        world_size: Ranks in the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._in_flight, self._moved_s = 0, time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._warned: set[int] = set()
        self._broken = False
        self._thread = threading.Thread(target=self._beat, name="gradwire heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()

    def began(self) -> None:
        """An exchange began here."""
        with self._lock:
            self._in_flight += 1
            if self._in_flight == 1:
                self._moved_s = time.monotonic()

    def ended(self) -> None:
        """An exchange ended here."""
        with self._lock:
            self._in_flight -= 1
            self._moved_s = time.monotonic()

    def report(self, failure: Failure) -> None:
        """Tell the others what failed here; a store that is gone has nobody left to tell."""
        self._broken = True
        try:
            self._store.set(f"failure/{failure.rank}", json.dumps(asdict(failure)))
        except (RuntimeError, dist.DistError):
            return

    def explain(self) -> str:
        """Explain why a collective broke: a reported failure, else the ranks that fell silent.

        Waits up to :data:`SILENCE_S` seconds.
        """
        self._broken = True
        others = [r for r in range(self.world_size) if r != self.rank]
        try:
            return self._look(others)
        except (RuntimeError, dist.DistError):
            return "the store of the group is gone too: the process that hosts it (rank 0, or the launcher) ended"

    def _look(self, others: Sequence[int]) -> str:
        before = {r: self._counter(r) for r in others}
        until = time.monotonic() + SILENCE_S
        while time.monotonic() < until:
            for rank in others:
                if self._store.check([f"failure/{rank}"]):
                    failure = Failure(**json.loads(self._store.get(f"failure/{rank}")))
                    return f"rank {failure.rank} failed at {failure.place}: {failure.reason}"
            time.sleep(BEAT_S / 2)
        silent = [r for r in others if self._counter(r) == before[r]]
        if not silent:
            return "all ranks are alive; the network between them broke, or the timeout of the group is too short"
        ranks = ", ".join(map(str, silent))
        return f"rank{'s' * (len(silent) > 1)} {ranks} ended or hangs without a report (killed?)"

    def look_around(self, now_s: float) -> list[int]:
        """Warn, once a rank, of those that stand still while an exchange waits; gives the ranks warned of now.

        Args:
            now_s: By ``time.monotonic``.
        """
        with self._lock:
            waited_s = now_s - self._moved_s if self._in_flight and not self._broken else 0.0
        if waited_s < PATIENCE_S - SILENCE_S:
            self._seen.clear()
            return []
        still = []
        for rank in range(self.world_size):
            count = self._counter(rank)
            before, since_s = self._seen.setdefault(rank, (count, now_s))
            if count != before:
                self._seen[rank] = count, now_s
            elif waited_s >= PATIENCE_S and now_s - since_s >= SILENCE_S and rank not in {self.rank, *self._warned}:
                still.append(rank)
        for rank in still:
            self._warned.add(rank)
            logging.getLogger("gradwire").warning(
                "rank %d has waited %.0f s in an exchange, and rank %d's heartbeat stands still: it is stopped, or its"
                " machine is gone; look at it, or end the run",
                self.rank,
                waited_s,
                rank,
            )
        return still

    def _counter(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S if count else 0):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
                self.look_around(time.monotonic())
            except (RuntimeError, dist.DistError):
                return
