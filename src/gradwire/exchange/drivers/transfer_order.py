"""The order in which the lanes of a link send large rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class TransferOrder:
    """The order in which jobs send large rows, on any lane: one at a time, and of those that wait the earliest.

    So a bucket's rows have the network for themselves while other buckets compute, or wait for messages: two transfers
    at once congest the receivers, each takes as long as both, and neither bucket is done early. While a bucket's rows
    travel, or its mean is computed, the next bucket's may leave.

    There is no deadlock if a job that has its turn waits for nothing but that its rows are sent, and posts its own
    receives before it asks for a turn: the other ranks then post theirs without a turn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._waiting: set[int] = set()
        self._sending = self._ended = False

    def take(self) -> int:
        """Return the next ticket; tickets are in the order in which jobs were submitted."""
        with self._changed:
            self._next += 1
            return self._next

    @contextlib.contextmanager
    def turn(self, ticket: int) -> Iterator[None]:
        """Wait until no other job sends and no earlier one waits, and let no other one send meanwhile.

        Raises:
            RuntimeError: a job that had its turn was given up.
        """
        with self._changed:
            self._waiting.add(ticket)
            self._changed.wait_for(lambda: self._ended or (not self._sending and min(self._waiting) == ticket))
            self._waiting.discard(ticket)
            if self._ended:
                raise RuntimeError("a transfer before this one was given up")
            self._sending = True
        try:
            yield
        finally:
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def end(self) -> None:
        """Let nobody have a turn any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
