"""Turns of large transfers: the order in which a link's lanes put many bytes on the wire."""

from __future__ import annotations

import threading

__all__ = ["TransferOrder"]


class TransferOrder:
    """Tickets in the order in which jobs were handed to lanes.

    A job with many bytes to send waits for the jobs before it, on whatever lane they run. So one bucket's transfer has
    the link for itself while the next one's codec and scalers go on: two transfers at once crowd the receivers, each
    lasts as long as both, and neither frees its bucket early.

    A job gives its turn back when it has no more to send, and at its end in any case.

    It cannot deadlock: a job waits for earlier ones only, the order is the same on every rank, and the earliest job
    waits for none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._open: set[int] = set()

    def take(self) -> int:
        """Return the next ticket."""
        with self._changed:
            self._next += 1
            self._open.add(self._next)
            return self._next

    def wait(self, ticket: int) -> None:
        """Wait until every earlier ticket was given back."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._open, default=ticket) >= ticket)

    def give_back(self, ticket: int) -> None:
        """End a job's turn."""
        with self._changed:
            self._open.discard(ticket)
            self._changed.notify_all()
