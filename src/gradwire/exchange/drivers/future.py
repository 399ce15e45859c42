"""The outcome of a generator that a lane runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def ignore(_: object) -> None:
    """Ignore an outcome."""


class Future(Generic[T]):
    """The outcome of a generator that a lane runs.

    A thread that waits continues after the callbacks have returned, and can be interrupted. Waiting uses no event,
    which would cost a small cast more than all the rest of this class.

    Args:
        then: Called with the value that the generator returned.
        fail: Called with the exception that the generator or ``then`` raised.
        ended: Called with this future after that.

    Attributes:
        at_once: True if the thread of the lane takes no part in it.
        error: The exception, once one was raised.
        done: True once the generator has ended.
    """

    def __init__(
        self,
        then: Callable[[T], object] = ignore,
        fail: Callable[[Exception], object] = ignore,
        at_once: bool = False,
        ended: Callable[[Future[Any]], object] = ignore,
    ) -> None:
        self._then, self._fail, self._ended, self.at_once = then, fail, ended, at_once
        self._value: Any = None
        self.error: Exception | None = None
        self.done = False
        self._going, self._first = threading.Lock(), threading.Lock()
        self._going.acquire()

    def end(self, value: T | None, error: Exception | None = None) -> None:
        """Set the value that the generator returned, or the exception that it raised; the first call counts."""
        if not self._first.acquire(blocking=False):
            return
        if error is None:
            try:
                self._then(value)  # type: ignore[arg-type]
            except Exception as raised:
                error = raised
        self._value, self.error = value, error
        try:
            if error is not None:
                self._fail(error)
        finally:
            # The callbacks hold buckets, and a caller may keep this future.
            self._then = self._fail = ignore
            self.done = True
            self._ended(self)
            self._going.release()

    def wait(self) -> None:
        """Wait for the end, with a result or an error."""
        with self._going:
            pass

    def result(self) -> T:
        """Wait, and return the value that the generator returned.

        Raises:
            Exception: the exception of the generator or of ``then``.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        result: T = self._value
        return result
