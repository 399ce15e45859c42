"""Who is alive, and what failed where: told through the group's store.

Every rank writes a counter twice a second. A rank that fails writes what failed and where before it ends. A rank
whose collective breaks looks both up: it names the rank that reported a failure or, where none did, those whose
counter stands still.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Failure", "RollCall"]

BEAT_S = 0.5
SILENCE_S = 3.0
"""A rank whose counter stands still for this long is called silent."""


@dataclass(frozen=True)
class Failure:
    """What a rank reports of itself: ``place`` is "bucket 3, chunk 0, round 17" or the like."""

    rank: int
    place: str
    reason: str


class RollCall:
    """One rank's beat, and its view of the others'.

    Args:
        store: Shared by the ranks; keys are put under a prefix of their own.
        rank: This rank within its group.
        world_size: Ranks in the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gradwire roll call", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()

    def report(self, failure: Failure) -> None:
        """Tell the others what failed here; a store that is gone has nobody left to tell."""
        try:
            self._store.set(f"failure/{failure.rank}", json.dumps(asdict(failure)))
        except (RuntimeError, dist.DistError):
            return

    def explain(self) -> str:
        """Say why a collective broke: a reported failure, else the ranks that fell silent.

        Waits up to :data:`SILENCE_S` seconds.
        """
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

    def _counter(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S if count else 0):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
            except (RuntimeError, dist.DistError):
                return
