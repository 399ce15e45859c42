"""The transport over Gloo, for tensors in main memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange.drivers.tables import announce, announced
from gradwire.exchange.drivers.traffic import gathers, large
from gradwire.exchange.drivers.transports.base import Transport, Turn, reduce_by_gather
from gradwire.exchange.drivers.transports.notes import TO_ALL, Notes
from gradwire.exchange.drivers.transports.receives import MOST_TAGS, Receives, Slot
from gradwire.exchange.drivers.transports.ring import ring_combined, ring_shares
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv

NEVER_SENT = MOST_TAGS - 1
"""Tag of a message that no rank sends."""

MOST_GREETINGS = 64
"""Largest number of ranks that greet one another directly when they are connected."""

BROADCAST = MOST_TAGS
"""Tag in the digest of a broadcast, which Gloo sends under tags of its own."""


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
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
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
        key: See :class:`gradwire.exchange.drivers.transports.notes.Notes`. With a key, reductions are made of messages
            that carry digests, in the order and with the bits of Gloo's own.
        connected: Called with the store, the rank and the number of ranks, returns their connections; by default they
            are made here.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        key: bytes = b"",
        connected: Callable[[Any, int, int], Any] | None = None,
    ) -> None:
        self._backend: Any = (
            dist.ProcessGroupGloo(store, rank, world_size, timeout)
            if connected is None
            else connected(store, rank, world_size)
        )
        self.rank, self.world_size = rank, world_size
        self._notes = Notes(rank, key)
        self.keyed_bytes = self._notes.keyed_bytes
        # A digest is checked on the thread that waits for the message.
        self.starts = not key
        self._rooms: dict[str, torch.Tensor] = {}
        self._receives: Receives | None = Receives(self._backend, world_size)
        self._reductions = self._operations = 0
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks are connected: one that closes its connections fails those that still make theirs."""
        if self.world_size > MOST_GREETINGS:
            self._wait_for(self._backend.barrier())
            return
        # A barrier takes several rounds of messages: over a long link, several times its delay.
        heard, said = (torch.zeros(self.world_size, dtype=torch.uint8, device="cpu") for _ in range(2))
        self._wait_for(self._backend.alltoall_base(heard, said, [], []))

    def abort(self) -> None:
        break_off(self._backend)

    def close(self, broken: bool) -> None:
        self._backend = self._receives = None

    def start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        if not self.starts:
            return super().start(op)
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
        if self.keyed_bytes:
            return self._reduce(op, turn, job)
        self._wait_for(self._start_reduce(op))
        return op.value

    def _reduce(self, op: Reduce, turn: Turn, job: str | None) -> torch.Tensor:
        """Reduce by an all-to-all of shares and an all-gather of what was combined, with the bits of Gloo's ring."""
        n, flat = self.world_size, op.value.view(-1)
        share = ring_shares(flat.numel(), flat.element_size(), n)
        send, recv, combined = (self._room(name, n * share * flat.element_size()) for name in ("up", "in", "down"))
        whole = send.view(flat.dtype)
        whole[: flat.numel()].copy_(flat)
        whole[flat.numel() :].zero_()
        rows = self._exchange(send.view(n, -1), AllToAll(send.view(n, -1), recv.view(n, -1)), turn, job)
        mine = ring_combined(rows.view(flat.dtype), self.rank, op.op).view(torch.uint8)
        reply = self._exchange([mine] * n, AllGather(mine, combined.view(n, -1)), turn, job)
        flat.copy_(reply.reshape(-1).view(flat.dtype)[: flat.numel()])
        return op.value

    def _room(self, name: str, size: int) -> torch.Tensor:
        """Return a buffer that is kept: fresh pages would cost more than the sum."""
        found = self._rooms.get(name)
        if found is None or len(found) < size:
            found = self._rooms[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return found[:size]

    def end_job(self) -> None:
        self._operations = 0
        if self._receives is not None:
            for work in self._receives.end_job():
                self._wait_for(work)

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

        Lengths, which are needed to read rows, and digests travel beside them. A digest is computed while its row
        leaves, and checked while other rows are still on their way.
        """
        n, rank, in_turn = self.world_size, self.rank, large(op)
        others = [(rank + places) % n for places in range(1, n)]
        sources = others[::-1]
        room = op.recv.view(n, -1)
        place = self._place(job)
        slot = self._slot(place, room.shape[1])
        rows = slot.post(sources, room)
        told, came = self._posted_notes(place, op.lengths is not None, sources)
        rows[rank].copy_(leaving[rank])
        sent, notes = [], self._notes.begin(op.lengths, n)
        with turn() if in_turn else nullcontext():
            for to in others:
                row = leaving[to] if op.lengths is None else leaving[to][: int(op.lengths[to])]
                work = self._send(row, to, slot)
                if told is not None:
                    sent.append(self._send(self._notes.seal(notes[to], row, to, slot.tag), to, told))
                if in_turn:
                    self._wait_for(work)
                else:
                    sent.append(work)
        self._come(slot, rows, told, came, sources, op.arrived)
        for work in sent:
            self._wait_for(work)
        return rows.view(op.recv.shape)

    def _posted_notes(self, place: Hashable, varies: bool, sources: Sequence[int]) -> tuple[Slot | None, torch.Tensor]:
        """Post the receives of the notes beside rows, if there are any; return their slot, and the notes to come."""
        size = self._notes.size(varies)
        notes = torch.empty((self.world_size, size), dtype=torch.uint8, device="cpu")
        told = self._slot(place, size, "notes") if size else None
        return told, notes if told is None else told.post(sources, notes)

    def _come(
        self,
        slot: Slot,
        rows: torch.Tensor,
        told: Slot | None,
        notes: torch.Tensor,
        sources: Sequence[int],
        arrived: torch.Tensor | None,
    ) -> None:
        """Wait for rows and the notes beside them; check each row as soon as it is here.

        Args:
            arrived: Takes the lengths of rows, by the position of the sender among all ranks; None: they do not vary.
        """
        if arrived is not None:
            arrived.zero_()
        for source in sources:
            # A length that is wrong is told at once, where the row may never come.
            if told is not None:
                self._wait_for(told.arrival(source))
            size = rows.shape[-1]
            if arrived is not None:
                size = self._notes.length(notes[source], size, source)
                arrived[source] = size
            self._wait_for(slot.arrival(source))
            self._notes.check(notes[source], rows[source][:size], source, slot.tag)

    def _swap(self, op: SendRecv, turn: Turn, job: str | None) -> torch.Tensor:
        """Send to one rank and receive from one: the row, and beside it its note if there is one."""
        sources = [] if op.source is None else [op.source]
        place, varies = self._place(job), op.lengths is not None
        slot, row = self._slot(place, op.recv.numel()), op.send
        reply = slot.post(sources, op.recv.expand(self.world_size, -1))
        told, came = self._posted_notes(place, varies, sources)
        if op.lengths is not None:
            row = op.send[: int(op.lengths)]
        if large(op):
            _pass_by(turn)
        sent = []
        if op.to is not None:
            sent.append(self._send(row, op.to, slot))
            if told is not None:
                note = self._notes.begin(op.lengths, 1)[0]
                sent.append(self._send(self._notes.seal(note, row, op.to, slot.tag), op.to, told))
        arrived = torch.zeros(self.world_size, dtype=torch.int64, device="cpu") if varies else None
        self._come(slot, reply, told, came, sources, arrived)
        if op.source is not None and op.arrived is not None and arrived is not None:
            op.arrived.copy_(arrived[op.source])
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

    def _send(self, row: torch.Tensor, to: int, slot: Slot) -> Any:
        """Send a message to a rank's slot; trials stand here, on the way of all that is sent."""
        return slot.send(row, to)

    def _wait_for(self, pending: Any) -> None:
        """Wait for an operation of Gloo."""
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
        works = [self._backend.broadcast([row], options)]
        note = self._notes.begin(None, 1)[0]
        if len(note):
            if self.rank == op.root:
                self._notes.seal(note, row, TO_ALL, BROADCAST)
            works.append(self._backend.broadcast([note], options))
        for work in works:
            self._wait_for(work)
        if self.rank != op.root:
            self._notes.check(note, row, op.root, BROADCAST, TO_ALL)
        return op.value
