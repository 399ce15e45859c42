"""The seconds that compilers take, without those in which compiled code is loaded from a cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

__all__ = ["Spent", "compile_time", "compiling"]


@dataclass
class Spent:
    """Seconds, which grow while they are measured."""

    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count so many more."""
        self.seconds += seconds


_measured: list[Spent] = []


@contextmanager
def compile_time() -> Iterator[Spent]:
    """Measure the seconds in which Numba compiles in the body, and those of :func:`compiling`; complete at its end.

    Numba reports a compilation only where it found nothing in its cache.
    """
    spent = Spent()
    _measured.append(spent)
    try:
        with _numba_timer(spent):
            yield spent
    finally:
        # By identity: two that have measured nothing are equal.
        _measured[:] = [other for other in _measured if other is not spent]


def _numba_timer(spent: Spent) -> AbstractContextManager[object]:
    try:
        from numba.core import event
    except ImportError:
        # Whatever needs Numba says so.
        return nullcontext()
    return event.install_timer("numba:compile", spent.add)


@contextmanager
def compiling() -> Iterator[None]:
    """Count the seconds of the body as compilation, for compilers that do not tell it from loading."""
    began_s = time.perf_counter()
    try:
        yield
    finally:
        for spent in list(_measured):
            spent.add(time.perf_counter() - began_s)
