"""Warnings of a link, by the logger "gradwire": each once, and from one rank where all ranks know of it."""

from __future__ import annotations

import logging
import threading

__all__ = ["WarnOnce"]

LONG_S = 1.0
"""Seconds of compilation that are long enough to wonder about."""


class WarnOnce:
    """Warnings of one link: the first of each kind, since what goes wrong in one round does so in most.

    Args:
        rank: This rank, among all of the program.
        speaker: The rank that gives warnings of what all ranks know: the lowest of those that take part.
    """

    def __init__(self, rank: int = 0, speaker: int = 0) -> None:
        self.rank, self._speaks = rank, rank == speaker
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def once(self, kind: str, text: str) -> None:
        """Warn of what all ranks know, on one of them, unless it was warned of that kind before."""
        if self._first(kind) and self._speaks:
            logging.getLogger("gradwire").warning("%s", text)

    def here(self, kind: str, text: str) -> None:
        """Warn of what this rank alone knows, with its number, unless it was warned of that kind before."""
        if self._first(kind):
            logging.getLogger("gradwire").warning("rank %d: %s", self.rank, text)

    def compiled(self, seconds: float) -> None:
        """Tell of a wait for the compiler that is long enough to wonder about."""
        if seconds > LONG_S:
            self.once("compiled", f"compiled kernels in {seconds:.1f} s; they are kept on disk")

    def _first(self, kind: str) -> bool:
        with self._lock:
            is_first = kind not in self._given
            self._given.add(kind)
        return is_first
