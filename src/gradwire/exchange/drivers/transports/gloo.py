"""The transport over Gloo, for tensors in main memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.drivers.tables import announce, announced
from gradwire.exchange.drivers.traffic import LENGTH_BYTES, gathers, large
from gradwire.exchange.drivers.transports.base import Transport, Turn, reduce_by_gather
from gradwire.exchange.drivers.transports.receives import MOST_TAGS, Receives, Slot
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv

NEVER_SENT = MOST_TAGS - 1
"""Tag of a message that no rank sends."""


def _options(op: Any) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = op
    return made


_REDUCES: dict[str, Any] = {
    "sum": _options(dist.ReduceOp.SUM),
    "max": _options(dist.ReduceOp.MAX),
    "min": _options(dist.ReduceOp.MIN),
}


def _pass_by(turn: Turn) -> None:
    """Wait for a turn and give it back: a rank may have to read other rows before it posts the receive of this one."""
    with turn():
        pass


def break_off(backend: Any) -> None:
    """Close all connections of a Gloo backend, from any thread: operations that wait for a message raise.

    Those do not of which a part has been sent or received: Gloo forgets them. :meth:`Lane.abort` gives them up.

    Gloo has no call for that, but closes them when a message has not come within its timeout: such a one is awaited.
    From a rank whose connection has ended it is refused at once, and other connections stay: each rank is asked.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    others = [] if backend is None else [r for r in range(backend.size()) if r != backend.rank()]
    for other in others:
        with contextlib.suppress(RuntimeError):
            backend.recv([nothing], other, NEVER_SENT).wait(timedelta(milliseconds=1))


class GlooTransport(Transport):
    """Executes operations over Gloo, on a backend object and not a group of ``torch.distributed.new_group``.

    The names of such groups depend on the number of groups that a rank has made before: two ranks with different
    histories would wait for each other forever.

    Args:
        store: Store for these connections alone; the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        timeout: Timeout of each collective.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._backend: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank, self.world_size = rank, world_size
        self._receives: Receives | None = Receives(self._backend, world_size)
        self._reductions = self._operations = 0
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks are connected: one that closes its connections fails those that still make theirs."""
        self._wait_for(self._backend.barrier())

    def abort(self) -> None:
        break_off(self._backend)

    def close(self, broken: bool) -> None:
        self._backend = self._receives = None

    def start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        if isinstance(op, AllToAll):
            return self._backend.alltoall_base(op.recv, op.send, [], []).get_future(), op.recv
        if isinstance(op, Reduce) and not gathers(op):
            return self._start_reduce(op), op.value
        return super().start(op)

    def _start_reduce(self, op: Reduce) -> torch.futures.Future[Any]:
        return self._backend.allreduce([op.value], _REDUCES[op.op]).get_future()  # type: ignore[no-any-return]

    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        if isinstance(op, SendRecv):
            return self._swap(op, turn, job)
        if isinstance(op, Broadcast):
            return self._broadcast(op, turn)
        if isinstance(op, AllToAll):
            return self._exchange(op.send, op, turn, job)
        if isinstance(op, AllGather):
            return self._exchange([op.send] * self.world_size, op, turn, job)
        if gathers(op):
            self._reductions += 1
            gather = partial(self._gather, job=job)
            return reduce_by_gather(op, self.rank, self.world_size, self._reductions, gather)
        self._wait_for(self._start_reduce(op))
        return op.value

    def end_job(self) -> None:
        self._operations = 0
        if self._receives is not None:
            self._receives.end_job()

    def _gather(self, send: torch.Tensor, recv: torch.Tensor, job: str | None) -> torch.Tensor:
        return self.execute(AllGather(send, recv), nullcontext, job)

    def _exchange(
        self,
        leaving: Sequence[torch.Tensor] | torch.Tensor,
        op: AllToAll | AllGather,
        turn: Turn,
        job: str | None,
    ) -> torch.Tensor:
        """Send row i to rank i, and receive row i from it; this rank's own row is copied.

        Large rows leave in turn: in N - 1 rounds, to the rank ``round`` places after this one, and from the one as many
        places before. A row is sent when the one before has been sent. So each network link carries about one row at a
        time, while in an all-to-all N - 1 senders congest every receiver. Every receive is posted at the beginning or
        before, with the full length of a row, since a shorter message may fill it: Gloo sends no row before its
        receiver has requested it, and a later request waits behind the rows in this rank's own queue. Four hosts at 100
        Mbit/s, 400 kB a row, on a machine with other work to do: 1.19 times the bytes over the bandwidth, 1.27 if each
        receive is posted in its round, an all-to-all 1.4 to 1.7; at 1 Gbit/s 1.5 and 1.9.

        Lengths, which are needed to read rows, travel beside them.
        """
        n, rank, in_turn = self.world_size, self.rank, large(op)
        others = [(rank + places) % n for places in range(1, n)]
        room = op.recv.view(n, -1)
        place = self._place(job)
        slot, told = self._slot(place, room.shape[1]), None
        rows = slot.post(reversed(others), room)
        if op.lengths is not None:
            told = self._slot(place, LENGTH_BYTES, "lengths")
            words = told.post(reversed(others), torch.empty((n, LENGTH_BYTES), dtype=torch.uint8))
        rows[rank].copy_(leaving[rank])
        sent = []
        if op.lengths is not None and told is not None:
            notes = announce(op.lengths)
            sent = [self._send(notes[to], to, told.tag) for to in others]
        with turn() if in_turn else nullcontext():
            for to in others:
                row = leaving[to] if op.lengths is None else leaving[to][: int(op.lengths[to])]
                work = self._send(row, to, slot.tag)
                if in_turn:
                    self._wait_for(work)
                else:
                    sent.append(work)
        if told is not None:
            self._wait_for(told)
            lengths = announced(words, rank, room.shape[1])
            if op.arrived is not None:
                op.arrived.copy_(lengths)
        self._wait_for(slot)
        for work in sent:
            self._wait_for(work)
        return rows.view(op.recv.shape)

    def _swap(self, op: SendRecv, turn: Turn, job: str | None) -> torch.Tensor:
        """Send to one rank and receive from one: the row, and beside it its length if the operation has one."""
        sources = [] if op.source is None else [op.source]
        place = self._place(job)
        slot, told, row = self._slot(place, op.recv.numel()), None, op.send
        room = op.recv.expand(self.world_size, -1)
        reply = slot.post(sources, room)
        sent = []
        if op.lengths is not None:
            told = self._slot(place, LENGTH_BYTES, "lengths")
            words = told.post(sources, torch.empty((self.world_size, LENGTH_BYTES), dtype=torch.uint8))
            row = op.send[: int(op.lengths)]
        if large(op):
            _pass_by(turn)
        if op.to is not None:
            if op.lengths is not None and told is not None:
                sent.append(self._send(announce(op.lengths)[0], op.to, told.tag))
            sent.append(self._send(row, op.to, slot.tag))
        if told is not None:
            self._wait_for(told)
            if op.source is not None and op.arrived is not None:
                op.arrived.copy_(announced(words[op.source : op.source + 1], -1, op.recv.numel(), op.source))
        self._wait_for(slot)
        for work in sent:
            self._wait_for(work)
        return op.recv if op.source is None else reply[op.source]

    def _place(self, job: str | None) -> Hashable:
        """Return the place of the next operation: others than these ranks may run operations between them."""
        self._operations += 1
        return None if job is None else (job, self._operations)

    def _slot(self, place: Hashable, size: int, kind: str = "rows") -> Slot:
        if self._receives is None:
            raise RuntimeError("these connections were closed")
        return self._receives.slot(place, size, kind)

    def _send(self, row: torch.Tensor, to: int, tag: int) -> Any:
        return self._backend.send([row], to, tag)

    def _wait_for(self, pending: Any) -> None:
        """Wait for an operation of Gloo, or for a slot's messages."""
        self.awaited = pending
        pending.wait()
        self.awaited = None

    def _broadcast(self, op: Broadcast, turn: Turn) -> torch.Tensor:
        """Send a value along Gloo's binomial tree: first its length, if the operation has one."""
        if large(op):
            _pass_by(turn)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = op.root, 0
        row = op.value
        if op.length is not None:
            told = announce(op.length)
            self._wait_for(self._backend.broadcast([told], options))
            if self.rank != op.root:
                op.length.copy_(announced(told, -1, row.numel(), op.root))
            row = row[: int(op.length)]
        self._wait_for(self._backend.broadcast([row], options))
        return op.value
