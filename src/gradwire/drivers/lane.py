"""Jobs on a torch.distributed group: lanes, each one process group and one thread.

Order is safe by construction. Jobs are handed to lanes in an order that is the same on every rank (the order of
DDP's hook calls), each lane runs its jobs one after the other, and a job waits only for jobs submitted before it. So
the earliest unfinished job can always proceed on every rank, and no two collectives of a group can change places.
A collective is never started from a future's callback: on Gloo those run in completion order, which differs by rank.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.drivers.lengths import announce, announced
from gradwire.drivers.trace import Trace, profiled
from gradwire.drivers.traffic import LENGTH_BYTES, Meter, gathers, large, op_bytes
from gradwire.drivers.transfer_order import TransferOrder
from gradwire.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from gradwire.wire import open_sealed, sealed

__all__ = ["Job", "Lane", "WireError"]

T = TypeVar("T")

CLOSE_S = 2.0
"""How long closing waits for a lane that is in the middle of a job."""

MOST_TAGS = 1 << 20


def _options(op: Any) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = op
    return made


_REDUCES: dict[str, Any] = {
    "sum": _options(dist.ReduceOp.SUM),
    "max": _options(dist.ReduceOp.MAX),
    "min": _options(dist.ReduceOp.MIN),
}


class WireError(Exception):
    """A collective broke: the cause is most likely on another rank."""


@dataclass(frozen=True)
class Job:
    """Something for a lane to do: ``run`` does it, ``fail`` is told why it could not; a trace shows ``label``."""

    run: Callable[[Lane], None]
    fail: Callable[[Exception], None]
    label: str = ""


class Lane:
    """A thread with connections of its own.

    They are made from a backend object rather than by ``torch.distributed.new_group``, whose names for groups depend
    on how many groups a rank has made before: two ranks with different histories would wait for each other for ever.

    Args:
        store: Of the lane alone; all its ranks give the same.
        rank: This rank.
        world_size: Ranks in the lane.
        timeout: Of each collective.
        name: For the thread, as debuggers and profilers show it.
        turns: Shared by the lanes of one link; submit to them from one thread.

    Attributes:
        trace: Takes what the lane does from now on; None: nothing is recorded.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta, name: str, turns: TransferOrder | None = None
    ) -> None:
        self._backend: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank, self.world_size = rank, world_size
        self._turns, self._ticket = turns or TransferOrder(), 0
        self._exchanges = self._reductions = 0
        self._turn_s = 0.0
        self.meter = Meter(rank)
        self.name, self._label = name, ""
        self.trace: Trace | None = None
        self._outbox = torch.empty(0, dtype=torch.uint8)
        self._begun = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job behind those submitted before."""
        self._jobs.put((self._turns.take(), job))

    def hang_up(self) -> None:
        """Close the connections once the lane is idle."""
        self.submit(Job(Lane._hang_up, lambda error: None))

    def close(self) -> None:
        """End the thread, and with it the connections, once its queue is empty."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_S)

    def drive(self, generator: Exchange[T]) -> T:
        """Run a generator to its end on this lane's group; to be called by the lane's own thread."""
        meter, clock = self.meter, time.perf_counter
        before_wire = True
        started = clock()
        try:
            with profiled("encode", self._label):
                op = next(generator)
            while True:
                asked = clock()
                self._worked(before_wire, started, asked)
                with profiled("wire", f"{self._label}, {type(op).__name__}"):
                    reply = self._wire(op)
                meter.count(op, self.world_size)
                # A reduction of scalers precedes the encoder; what follows any other reply decodes.
                before_wire = before_wire and isinstance(op, Reduce) and op.op != "sum"
                started = clock()
                meter.wire_s += started - asked
                with profiled("encode" if before_wire else "decode", self._label):
                    op = generator.send(reply)
        except StopIteration as stop:
            self._worked(before_wire, started, clock())
            result: T = stop.value
            return result

    def _worked(self, before_wire: bool, began_s: float, ended_s: float) -> None:
        if before_wire:
            self.meter.encode_s += ended_s - began_s
        else:
            self.meter.decode_s += ended_s - began_s
        if self.trace is not None:
            self.trace.add(self.name, "encode" if before_wire else "decode", began_s, ended_s, self._label)

    def begin(self, generator: Exchange[T], done: Callable[[T], None], fail: Callable[[Exception], None]) -> None:
        """Start a generator of one collective without waiting; ``done`` or ``fail`` is called on the backend's thread.

        ``fail`` is told what ``done`` raises, too.

        Neither the lane's thread nor its queue takes part. It saves their hand-overs, which cost more than a small
        bucket's exchange.
        """
        meter, clock = self.meter, time.perf_counter
        started = clock()
        with profiled("encode", ""):
            op = next(generator)
        asked = clock()
        future, reply = self._start(op)

        def finish(ended: torch.futures.Future[Any]) -> None:
            arrived = clock()
            try:
                ended.value()
            except RuntimeError as error:
                fail(WireError(f"{type(op).__name__}: {error}"))
                return
            try:
                with profiled("decode", ""):
                    generator.send(reply)
            except StopIteration as stop:
                value: T = stop.value
            except Exception as error:
                fail(error)
                return
            else:
                fail(TypeError("this exchange has a second collective: it needs the lane's thread"))
                return
            with self._begun:
                meter.count(op, self.world_size)
                meter.encode_s += asked - started
                meter.wire_s += arrived - asked
                meter.decode_s += clock() - arrived
            try:
                done(value)
            except Exception as error:
                # The backend would only print it, and whoever waits would wait for ever.
                fail(error)

        future.add_done_callback(finish)

    def _start(self, op: Op) -> tuple[torch.futures.Future[Any], torch.Tensor]:
        if isinstance(op, AllToAll):
            return self._live().alltoall_base(op.recv, op.send, [], []).get_future(), op.recv
        if isinstance(op, Reduce) and not gathers(op):
            return self._start_reduce(op), op.value
        raise TypeError(f"{type(op).__name__}: this operation needs buffers of the lane, and so its thread")

    def _start_reduce(self, op: Reduce) -> torch.futures.Future[Any]:
        return self._live().allreduce([op.value], _REDUCES[op.op]).get_future()  # type: ignore[no-any-return]

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._ticket, job = item
            self._label = job.label
            try:
                job.run(self)
            except Exception as error:
                job.fail(error)
                self._hang_up()
            finally:
                self._turns.give_back(self._ticket)
            # Let go of tensors now, not when the next job arrives.
            del item, job
        self._hang_up()

    def _hang_up(self) -> None:
        # Closes this lane's connections, so that the other ranks learn of the failure now rather than after the
        # group's timeout, also where the user catches the error and the process lives on.
        self._backend = None

    def _wire(self, op: Op) -> torch.Tensor:
        began_s, self._turn_s = time.perf_counter(), 0.0
        try:
            reply = self._execute(op)
        except RuntimeError as error:
            raise WireError(f"{type(op).__name__}: {error}") from error
        if self.trace is not None:
            # A wait for the turn comes first.
            began = began_s + self._turn_s
            if self._turn_s:
                self.trace.add(self.name, "wait for turn", began_s, began, self._label)
            kind = "send rows" if large(op) else "small message"
            sent_bytes, detail = op_bytes(op, self.world_size, self.rank)[0], f"{self._label}, {type(op).__name__}"
            self.trace.add(self.name, kind, began, time.perf_counter(), detail, sent_bytes)
        if not isinstance(op, Reduce) and op.last:
            self._turns.give_back(self._ticket)
        return reply

    def _execute(self, op: Op) -> torch.Tensor:
        if isinstance(op, SendRecv):
            return self._swap(op)
        if isinstance(op, Broadcast):
            return self._broadcast(op)
        if isinstance(op, Reduce):
            if gathers(op):
                return self._reduce_by_gather(op)
            self._start_reduce(op).wait()
            return op.value
        if op.lengths is not None:
            return self._of_lengths(op, op.lengths)
        if large(op):
            return self._in_turn(op.send if isinstance(op, AllToAll) else [op.send] * self.world_size, op.recv)
        return self._all_to_all(op.send, op.recv) if isinstance(op, AllToAll) else self._gather(op.send, op.recv)

    def _reduce_by_gather(self, op: Reduce) -> torch.Tensor:
        # All ranks run the same jobs on a lane in the same order, so the number of the reduction says which one it is.
        self._reductions += 1
        mine = sealed(op.value, self.rank, self._reductions)
        received = self._gather(mine, mine.new_empty((self.world_size, mine.numel())))
        rows = open_sealed(received, op.value.dtype, f"values for a {op.op}imum", self._reductions)
        return (rows.amax(0) if op.op == "max" else rows.amin(0)).view(op.value.shape)

    def _gather(self, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        # As an all-to-all of equal rows: the same bytes as a ring, in one step instead of N - 1. On Gloo with four
        # ranks on two cores, 1 MB a rank: all_gather_into_tensor 6.9 ms, this 2.0 ms.
        # The copies go to a buffer that is kept: fresh pages for them took four times as long as all the rest.
        size = send.numel() * send.element_size() * self.world_size
        if self._outbox.numel() < size:
            self._outbox = torch.empty(size, dtype=torch.uint8)
        rows = self._outbox[:size].view(send.dtype).view(self.world_size, -1)
        return self._all_to_all(rows.copy_(send.expand_as(rows)), recv)

    def _all_to_all(self, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        self._live().alltoall_base(recv, send, [], []).wait()
        return recv

    def _of_lengths(self, op: AllToAll | AllGather, lengths: torch.Tensor) -> torch.Tensor:
        """Tell lengths, then send rows of these lengths: one at a time where the room is large, else all at once."""
        n, rank = self.world_size, self.rank
        received = torch.empty((n, LENGTH_BYTES), dtype=torch.uint8)
        if large(op):
            self._wait_for_turn()
        self._all_to_all(announce(lengths), received)
        slots = op.recv.view(n, -1)
        told = announced(received, rank, slots.shape[1])
        if op.arrived is not None:
            op.arrived.copy_(told)
        rows = op.send if isinstance(op, AllToAll) else [op.send] * n
        leaving = [rows[to] if to == rank else rows[to][: int(lengths[to])] for to in range(n)]
        arriving = [slots[source] if source == rank else slots[source, : int(told[source])] for source in range(n)]
        self._send_rows(leaving, arriving, in_turn=large(op))
        return op.recv

    def _in_turn(self, rows: Sequence[torch.Tensor] | torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
        """Send row i to rank i, one row at a time, when the lane has its turn."""
        self._wait_for_turn()
        slots = recv.view(self.world_size, -1)
        self._send_rows(rows, slots, in_turn=True)
        return recv

    def _wait_for_turn(self) -> None:
        began_s = time.perf_counter()
        self._turns.wait(self._ticket)
        self._turn_s = time.perf_counter() - began_s

    def _send_rows(
        self,
        leaving: Sequence[torch.Tensor] | torch.Tensor,
        arriving: Sequence[torch.Tensor] | torch.Tensor,
        in_turn: bool,
    ) -> None:
        """Send row i to rank i, and receive row i from it; this rank's own row is copied.

        In turn: in N - 1 rounds, to the rank ``round`` places on, from the one as many places back. A row leaves when
        the one before has left. So each link carries about one row at a time, where an all-to-all has N - 1 senders
        crowd every receiver. Every row is asked for at the beginning: Gloo sends none before it is asked for, and a
        request that leaves later waits behind the rows in this rank's own queue. Four hosts at 100 Mbit/s, 400 kB a
        row, on a machine with other work to do: 1.19 times the bytes over the bandwidth, 1.27 where each row is asked
        for in its round, an all-to-all 1.4 to 1.7; at 1 Gbit/s 1.5 and 1.9.
        """
        backend, n, rank = self._live(), self.world_size, self.rank
        self._exchanges = (self._exchanges + 1) % MOST_TAGS
        sources = [(rank - places) % n for places in range(1, n)]
        asked = [backend.recv([arriving[source]], source, self._exchanges) for source in sources]
        sent = []
        for places in range(1, n):
            to = (rank + places) % n
            work = backend.send([leaving[to]], to, self._exchanges)
            if places == 1:
                arriving[rank].copy_(leaving[rank])
            if in_turn:
                work.wait()
            else:
                sent.append(work)
        for work in (*sent, *asked):
            work.wait()

    def _swap(self, op: SendRecv) -> torch.Tensor:
        """Send to one rank and receive from one: lengths first, where they are told, then the rows."""
        if large(op):
            self._wait_for_turn()
        backend = self._live()
        self._exchanges = (self._exchanges + 1) % MOST_TAGS

        def both(leaving: torch.Tensor, arriving: torch.Tensor) -> None:
            asked = None if op.source is None else backend.recv([arriving], op.source, self._exchanges)
            sent = None if op.to is None else backend.send([leaving], op.to, self._exchanges)
            for work in (sent, asked):
                if work is not None:
                    work.wait()

        if op.lengths is None or op.arrived is None:
            both(op.send, op.recv)
            return op.recv
        received = torch.zeros((1, LENGTH_BYTES), dtype=torch.uint8)
        both(announce(op.lengths), received)
        if op.source is not None:
            op.arrived.copy_(announced(received, -1, op.recv.numel(), op.source))
        both(op.send[: int(op.lengths)], op.recv[: int(op.arrived)])
        return op.recv

    def _broadcast(self, op: Broadcast) -> torch.Tensor:
        """Send a value down Gloo's binomial tree: its length first, where that is told."""
        if large(op):
            self._wait_for_turn()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = op.root, 0
        row = op.value
        if op.length is not None:
            told = announce(op.length)
            self._live().broadcast([told], options).wait()
            if self.rank != op.root:
                op.length.copy_(announced(told, -1, row.numel(), op.root))
            row = row[: int(op.length)]
        self._live().broadcast([row], options).wait()
        return op.value

    def _live(self) -> Any:
        if self._backend is None:
            raise RuntimeError("this lane was closed after a failure")
        return self._backend
