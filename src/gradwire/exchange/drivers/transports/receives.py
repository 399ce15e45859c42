"""Receives that a transport posts before the operation that needs them.

Gloo sends a message when its receiver's request has arrived. Where both sides begin an operation at the same time, a
message so takes two one-way delays of the network: the request's and its own. Jobs recur in every round, with messages
of the same sizes at the same places, so that the request for the next round's message can leave as soon as this round's
has been read, and be there long before the sender begins: one delay.

A posted receive holds its rows and cannot be taken back. Rounds change, though: after a warm-up, with another candidate
of ``auto``, when DDP arranges its buckets anew. So the senders end the receives of messages that have not come for a
while, each with a message of one byte that nobody reads.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch

MOST_TAGS = 1 << 31
"""Number of tags of Gloo, which are 32-bit integers that are not negative; the last one is never sent."""

RECURS = 2
"""Number of times that a message must have come before its next receive is posted early."""

LOOKS = 64
"""Number of jobs between two looks for slots that are no longer used."""

MISSES = 8
"""A slot is given up if it is not used for this many times the jobs between its last two uses."""

MOST_JOBS = 1 << 12
"""A slot that was used once, which holds no rows, is forgotten after this many jobs, more than a round has."""


class Receives:
    """The receives of one backend.

    Args:
        backend: A ``torch.distributed.ProcessGroupGloo``.
        world_size: Number of its ranks.
    """

    def __init__(self, backend: Any, world_size: int) -> None:
        self._backend, self._world_size = backend, world_size
        self._slots: dict[tuple[Hashable, str, int], Slot] = {}
        self._tags: set[int] = set()
        self._used: list[Slot] = []
        self._given_up: list[Slot] = []
        self._jobs = 0

    def slot(self, place: Hashable, size: int, kind: str) -> Slot:
        """Return the slot of a kind of messages of at most ``size`` bytes at a place; None: of all that do not recur.

        Every rank must ask for the same slots in the same order. Messages of one slot and one sender are received in
        the order in which they were sent. The size is part of a slot's tag: a message that is longer than its receive
        would end the process, while one of another slot waits, and an error of what came beside it ends the job.
        """
        slot = self._slots.get((place, kind, size))
        if slot is None:
            tag = zlib.crc32(repr((place, kind, size)).encode()) % (MOST_TAGS - 1)
            while tag in self._tags:
                tag = (tag + 1) % (MOST_TAGS - 1)
            self._tags.add(tag)
            slot = self._slots[place, kind, size] = Slot(self._backend, tag, self._world_size, size)
        if place is not None:
            self._used.append(slot)
        return slot

    def end_job(self) -> list[Any]:
        """Post the next receives of the slots that were used; call it when their messages have been read.

        Every rank must call it after the same jobs, whether they had operations here or not: it is by their number that
        ranks agree on the slots to give up.

        Returns:
            Operations to wait for before the next job.
        """
        self._jobs += 1
        used, self._used = self._used, []
        for slot in used:
            slot.post_next(self._jobs)
        # Their rows must stay until the operations have ended, which is before the next call.
        self._given_up = [] if self._jobs % LOOKS else self._take_unused()
        return [work for slot in self._given_up for work in slot.give_up()]

    def _take_unused(self) -> list[Slot]:
        unused = {key: slot for key, slot in self._slots.items() if key[0] is not None and slot.unused(self._jobs)}
        for key, slot in unused.items():
            del self._slots[key]
            self._tags.discard(slot.tag)
        return list(unused.values())


class Slot:
    """Messages of one place, one from each sender at a time.

    Attributes:
        tag: Number by which senders and receivers match messages.
    """

    def __init__(self, backend: Any, tag: int, world_size: int, size: int) -> None:
        self.tag = tag
        self._backend, self._shape = backend, (world_size, size)
        self._rows: torch.Tensor | None = None
        self._works: dict[int, Any] = {}
        self._came: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._now: list[int] = []
        self._uses, self._job, self._interval = 0, 0, 0

    def post(self, sources: Iterable[int], room: torch.Tensor) -> torch.Tensor:
        """Post the receives of messages from some ranks, unless they have been; return the rows that they fill.

        Args:
            sources: Ranks that send a message. It may be shorter than a row.
            room: Rows for the messages, uint8 ``[world_size, size]``, until the slot has rows of its own.

        Returns:
            ``[world_size, size]``, valid until :meth:`Receives.end_job`. Only rows of ``sources`` change.
        """
        rows = room if self._rows is None else self._rows
        self._now = list(sources)
        self._request([source for source in self._now if source not in self._works], rows)
        return rows

    def _request(self, sources: Iterable[int], rows: torch.Tensor) -> None:
        for source in sources:
            self._works[source] = self._backend.recv([rows[source]], source, self.tag)

    def _own_rows(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = torch.empty(self._shape, dtype=torch.uint8, device="cpu")
        return self._rows

    def send(self, row: torch.Tensor, to: int) -> Any:
        """Send a message to a rank, for its slot of this place; return the operation."""
        self._left[to] += 1
        return self._backend.send([row], to, self.tag)

    def arrival(self, source: int) -> Any:
        """Return the operation that ends when the message of one of the ranks has come; call it once a message."""
        return self._works.pop(source)

    def post_next(self, job: int) -> None:
        """Post the receives of the next messages from the same ranks, into rows of this slot.

        Args:
            job: Number of the job that has ended.
        """
        self._uses, self._job, self._interval = self._uses + 1, job, job - (self._job or job)
        self._came.update(self._now)
        sources = [source for source in self._now if self._came[source] >= RECURS and source not in self._works]
        self._now = []
        if sources:
            self._request(sources, self._own_rows())

    def unused(self, job: int) -> bool:
        """Return True if no job up to this one has used this slot for a long time, by its own measure."""
        most = MOST_JOBS if self._uses < RECURS else max(LOOKS, MISSES * self._interval)
        return job - self._job >= most

    def give_up(self) -> list[Any]:
        """End the receives that are posted here and at other ranks, with one byte each; return the operations.

        A rank has posted one for the next message of every rank that has sent it at least :data:`RECURS`.
        """
        octet = torch.zeros(min(1, self._shape[1]), dtype=torch.uint8, device="cpu")
        told = [self.send(octet, to) for to, messages in self._left.items() if messages >= RECURS]
        came, self._works = list(self._works.values()), {}
        return [*told, *came]
