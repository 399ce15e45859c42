"""What the buckets of a round leave for its end."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["RoundParts"]


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
