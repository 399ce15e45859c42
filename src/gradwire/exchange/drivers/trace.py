"""What each lane did and when: spans of time for a timeline of a step, and ranges for ``torch.profiler``."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.autograd import profiler

__all__ = ["Span", "Trace", "profiled"]


def profiled(name: str, detail: str) -> AbstractContextManager[object]:
    """Return a range ``gradwire::name`` of this thread for ``torch.profiler``; while none runs, nothing.

    A profiler sees the threads of lanes if it was made with ``profile_all_threads=True``.
    """
    # Of the process: what torch.autograd offers in public is of the thread, and no profiler starts on a lane's.
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"gradwire::{name}", detail)
    return nullcontext()


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
