"""The transport between ranks that are threads of one process: what one sends lies in the other's memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from gradwire.exchange.drivers.simulation import executed
from gradwire.exchange.drivers.transports.base import Transport, Turn
from gradwire.exchange.ops import AllGather, AllToAll, Op, Reduce

BROKEN = "the connections between the ranks of this process were broken"

LONG_S = 600.0
"""Time after which a message counts as lost: a rank that has ended breaks the connections long before."""


@dataclass
class _Together:
    """The operations of one place in the order of a lane's operations, and the futures of their replies."""

    ops: dict[int, Op] = field(default_factory=dict)
    replies: dict[int, torch.futures.Future[Any]] = field(default_factory=dict)


class Meetings:
    """Brings together what some ranks of one process send to one another, each from threads of its own.

    An operation is executed by the thread of the rank that comes last, as by a simulation.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._operations: dict[tuple[int, int], _Together] = {}
        self._messages: dict[tuple[Any, int], torch.Tensor] = {}
        self._broken = False

    def connect(self, lane: int) -> Callable[[Any, int, int, timedelta], Transport]:
        """Return a function that connects the ranks of a lane."""
        return partial(_connected, self, lane)

    def come(self, lane: int, number: int, rank: int, op: Op) -> torch.futures.Future[Any]:
        """Bring the operation of one rank; the future has its reply when all ranks have brought theirs."""
        reply: torch.futures.Future[Any] = torch.futures.Future()
        with self._changed:
            if self._broken:
                raise RuntimeError(BROKEN)
            together = self._operations.setdefault((lane, number), _Together())
            together.ops[rank], together.replies[rank] = op, reply
            if len(together.ops) < self.world_size:
                return reply
            del self._operations[lane, number]
        ranks = range(self.world_size)
        try:
            found = _own_replies([together.ops[rank] for rank in ranks])
        except Exception as error:
            for rank in ranks:
                together.replies[rank].set_exception(error)
            return reply
        for rank in ranks:
            together.replies[rank].set_result(found[rank])
        return reply

    def put(self, key: Any, number: int, tensor: torch.Tensor) -> None:
        """Bring a message from one rank to another."""
        with self._changed:
            self._messages[key, number] = tensor.clone()
            self._changed.notify_all()

    def take(self, key: Any, number: int, timeout_s: float) -> torch.Tensor:
        """Wait for a message, and return it.

        Raises:
            RuntimeError: it has not come in time, or the connections were broken.
        """
        with self._changed:
            come = self._changed.wait_for(lambda: self._broken or (key, number) in self._messages, timeout_s)
            if self._broken or not come:
                raise RuntimeError(BROKEN if self._broken else "a message has not come in time")
            return self._messages.pop((key, number))

    def has(self, key: Any, number: int) -> bool:
        """Return whether a message has come."""
        with self._changed:
            return (key, number) in self._messages

    def break_off(self) -> None:
        """Let everything that waits for another rank raise."""
        with self._changed:
            self._broken = True
            waiting = [reply for together in self._operations.values() for reply in together.replies.values()]
            self._operations.clear()
            self._changed.notify_all()
        for reply in waiting:
            reply.set_exception(RuntimeError(BROKEN))


class InProcessTransport(Transport):
    """Executes the operations of a lane between threads of one process. Sums are added in the order of ranks."""

    starts = True

    def __init__(self, meetings: Meetings, lane: int, rank: int) -> None:
        self._meetings, self._lane, self.rank = meetings, lane, rank
        self.world_size, self._number = meetings.world_size, 0

    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        found: torch.Tensor = self._come(op).wait()
        return found

    def start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        if isinstance(op, AllToAll | Reduce):
            return self._come(op), op.recv if isinstance(op, AllToAll) else op.value
        return super().start(op)

    def _come(self, op: Op) -> torch.futures.Future[Any]:
        self._number += 1
        return self._meetings.come(self._lane, self._number, self.rank, op)

    def end_job(self) -> None:
        """Do nothing: nothing is sent before it is asked for."""

    def abort(self) -> None:
        self._meetings.break_off()

    def close(self, broken: bool) -> None:
        if broken:
            self._meetings.break_off()


def _own_replies(ops: Sequence[Op]) -> list[torch.Tensor]:
    """Execute an operation; each reply is in memory of its rank, which goes on without waiting for the others."""
    kinds = {(type(op), op.scope) for op in ops}
    if len(kinds) > 1:
        raise RuntimeError(f"ranks asked for different operations: {sorted(kind.__name__ for kind, _ in kinds)}")
    found = executed(ops)
    for rank, op in enumerate(ops):
        if isinstance(op, Reduce):
            found[rank] = op.value.copy_(found[rank])
        elif isinstance(op, AllGather):
            found[rank] = op.recv if rank == 0 else op.recv.copy_(found[0])
    return found


def _connected(meetings: Meetings, lane: int, store: Any, rank: int, world_size: int, timeout: timedelta) -> Transport:
    return InProcessTransport(meetings, lane, rank)


class InProcessBackend:
    """Messages between threads of one process, by the calls of a backend of ``torch.distributed``.

    Args:
        meetings: Brings messages together.
        rank: This rank.
    """

    def __init__(self, meetings: Meetings, rank: int) -> None:
        self._meetings, self._rank = meetings, rank
        self._sent: Counter[tuple[Any, ...]] = Counter()
        self._asked: Counter[tuple[Any, ...]] = Counter()

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> _Arrivals:
        """Send a tensor to one rank."""
        for tensor in tensors:
            self._put((self._rank, to, tag), tensor)
        return _Arrivals(self._meetings, [])

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> _Arrivals:
        """Receive a tensor from one rank."""
        return _Arrivals(self._meetings, [(self._ask((source, self._rank, tag)), tensor) for tensor in tensors])

    def alltoall_base(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> _Arrivals:
        """Send an equal part of a tensor to each rank, and receive one from each; sizes are not looked at."""
        ranks = range(self._meetings.world_size)
        for to, part in zip(ranks, sent.chunk(len(ranks))):
            self._put((self._rank, to, "all to all"), part)
        parts = zip(ranks, received.chunk(len(ranks)))
        return _Arrivals(self._meetings, [(self._ask((s, self._rank, "all to all")), part) for s, part in parts])

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Arrivals:
        """Replace a tensor by that of one rank."""
        root, ranks = options.rootRank, range(self._meetings.world_size)
        if self._rank != root:
            return _Arrivals(self._meetings, [(self._ask((root, self._rank, "broadcast")), tensors[0])])
        for to in ranks:
            if to != root:
                self._put((root, to, "broadcast"), tensors[0])
        return _Arrivals(self._meetings, [])

    def _put(self, key: tuple[Any, ...], tensor: torch.Tensor) -> None:
        self._sent[key] += 1
        self._meetings.put(key, self._sent[key], tensor)

    def _ask(self, key: tuple[Any, ...]) -> tuple[Any, int]:
        self._asked[key] += 1
        return key, self._asked[key]


class _Arrivals:
    """Messages that were asked for, and the tensors that they fill; has the calls of a ``torch.distributed.Work``."""

    def __init__(self, meetings: Meetings, asked: list[tuple[tuple[Any, int], torch.Tensor]]) -> None:
        self._meetings, self._asked = meetings, asked

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all messages.

        Raises:
            RuntimeError: one has not come in time, or the connections were broken.
        """
        limit_s = LONG_S if timeout is None else timeout.total_seconds()
        while self._asked:
            (key, number), tensor = self._asked[0]
            found = self._meetings.take(key, number, limit_s)
            if found.numel() > tensor.numel():
                raise RuntimeError(f"a message of {found.numel()} elements came, and at most {tensor.numel()} fit")
            tensor.view(-1)[: found.numel()].copy_(found.view(-1))
            self._asked.pop(0)

    def is_completed(self) -> bool:
        """Return whether all messages have come."""
        return all(self._meetings.has(key, number) for (key, number), _ in self._asked)
