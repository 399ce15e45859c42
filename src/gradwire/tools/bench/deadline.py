"""A bound on how long a measurement may take."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradwire.tools.experiments.errors import RunError

__all__ = ["Deadline", "OutOfTimeError"]


class OutOfTimeError(RunError):
    """A measurement did not end in the time that it may take."""


class Deadline:
    """A number of seconds from now on.

    Args:
        seconds: That may pass.
        clock: Returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(0.0, self._until - self._clock())

    @property
    def passed(self) -> bool:
        """Whether none is left."""
        return self.left_s == 0.0
