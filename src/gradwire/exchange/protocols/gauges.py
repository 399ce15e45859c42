"""Numbers that codecs report of a round, for people to see: what decides neither a byte nor a bit."""

from __future__ import annotations

import threading

__all__ = ["Gauges"]


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
