"""What each lane did and when: spans of time, for a timeline of a step."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Span", "Trace"]


@dataclass(frozen=True)
class Span:
    """A part of one lane's time.

    Attributes:
        track: The lane, or "compute".
        name: "encode", "wait for turn", "send rows", "small message" or "decode"; on "compute" a part of the step.
        began_s: By ``time.perf_counter``, which on Linux is the same clock for all processes of a machine.
        ended_s: By the same clock.
        detail: Which bucket and operation.
        sent_bytes: That were sent in it.
    """

    track: str
    name: str
    began_s: float
    ended_s: float
    detail: str = ""
    sent_bytes: int = 0


class Trace:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, track: str, name: str, began_s: float, ended_s: float, detail: str = "", sent_bytes: int = 0) -> None:
        """Add a span."""
        span = Span(track, name, began_s, ended_s, detail, sent_bytes)
        with self._lock:
            self._spans.append(span)

    def spans(self) -> list[Span]:
        """Return what was added so far, by the time of its begin."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.began_s)
