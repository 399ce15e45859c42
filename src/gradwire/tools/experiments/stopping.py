"""A training that is asked to stop: by a signal, at a moment on which all ranks agree."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

__all__ = ["stops_on"]


@contextlib.contextmanager
def stops_on(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Note the first of some signals instead of ending by it; the second one has the effect it had before.

    Outside of the main thread, where Python handles no signals, nothing changes.

    Args:
        numbers: The signals.

    Yields:
        A function that returns whether one of them has come.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        came.set()
        restore(list(before))

    def restore(which: Sequence[signal.Signals]) -> None:
        for one in which:
            signal.signal(one, before[one])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield came.is_set
    finally:
        restore([number for number in numbers if signal.getsignal(number) is note])
