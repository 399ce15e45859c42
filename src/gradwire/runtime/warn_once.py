"""What a link tells people while it runs, by the logger "gradwire"."""

from __future__ import annotations

import logging
import threading

__all__ = ["WarnOnce", "say_compiled"]


class WarnOnce:
    """Warnings of one link: the first of each kind, since what goes wrong in one round does so in most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def once(self, kind: str, text: str) -> None:
        """Warn, unless it was warned of that kind before."""
        with self._lock:
            if kind in self._given:
                return
            self._given.add(kind)
        logging.getLogger("gradwire").warning("%s", text)


def say_compiled(seconds: float) -> None:
    """Tell of a wait for the compiler that is long enough to wonder about."""
    if seconds > 1:
        logging.getLogger("gradwire").warning("compiled kernels in %.1f s; they are kept on disk", seconds)
