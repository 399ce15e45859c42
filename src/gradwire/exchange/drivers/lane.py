"""Lanes: threads with connections of their own that carry out generators, and the turns that they take."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.traffic import Meter, Trace, large, op_bytes, profiled
from gradwire.exchange.drivers.transports import Connect, GlooTransport, Transport
from gradwire.exchange.ops import Exchange, Op, Reduce, Scope


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


T = TypeVar("T")

CLOSE_S = 2.0
"""How long closing waits for a lane that is in the middle of a job."""


class WireError(Exception):
    """A collective broke: the cause is most likely on another rank."""


def _ignore(_: object) -> None:
    """Do nothing with an outcome."""


class Future(Generic[T]):
    """The outcome of a generator that a lane carries out.

    Whoever waits goes on after the callbacks have returned, and can be interrupted. An event to wait for would cost a
    small cast more than all else that this does.

    Args:
        then: Called with what the generator returned.
        fail: Called with what the generator or ``then`` raised.

    Attributes:
        error: Why there is no result, once that is known.
        done: Whether it has come to its end.
    """

    def __init__(self, then: Callable[[T], object] = _ignore, fail: Callable[[Exception], object] = _ignore) -> None:
        self._then, self._fail = then, fail
        self._value: Any = None
        self.error: Exception | None = None
        self.done = False
        self._going = threading.Lock()
        self._going.acquire()

    def end(self, value: T | None, error: Exception | None = None) -> None:
        """Set what the generator returned or raised, once."""
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
            # They hold buckets, and whoever waits may keep this.
            self._then = self._fail = _ignore
            self.done = True
            self._going.release()

    def wait(self) -> None:
        """Wait for the end, whichever it is."""
        with self._going:
            pass

    def result(self) -> T:
        """Wait, and return what the generator returned.

        Raises:
            Exception: what it raised, or what ``then`` did.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        result: T = self._value
        return result


class Lane:
    """A thread with connections of its own.

    Args:
        store: Of the lane alone; all its ranks give the same.
        rank: This rank.
        world_size: Ranks in the lane.
        timeout: Of each collective.
        name: For the thread, as debuggers and profilers show it.
        turns: Shared by the lanes of one link; submit to them from one thread.
        scopes: Of the operations beside those among all ranks.
        connect: Makes the connections: one transport for all ranks, and one for each scope.

    Attributes:
        trace: Takes what the lane does from now on; None: nothing is recorded.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        name: str,
        turns: TransferOrder | None = None,
        scopes: Sequence[Scope] = (),
        connect: Connect = GlooTransport,
    ) -> None:
        self._transports: dict[Scope | None, Transport] | None = {None: connect(store, rank, world_size, timeout)}
        for scope in scopes:
            place, size = scope.place(rank)
            its_store = dist.PrefixStore(f"{scope.name}/{scope.ranks(rank)[0]}", store)
            self._transports[scope] = connect(its_store, place, size, timeout)
        self.rank, self.world_size = rank, world_size
        self._turns, self._ticket = turns or TransferOrder(), 0
        self._turn_s = 0.0
        self.meter = Meter(rank)
        self.name, self._label = name, ""
        self.trace: Trace | None = None
        self._begun = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        generator: Exchange[T],
        label: str = "",
        *,
        wait: Callable[[], object] | None = None,
        first: Exchange[object] | None = None,
        then: Callable[[T], object] = _ignore,
        fail: Callable[[Exception], object] = _ignore,
        at_once: bool = False,
    ) -> Future[T]:
        """Run a generator on this lane's connections, behind all that was submitted to it before.

        Where a generator fails, the lane closes its connections.

        Args:
            generator: Yields collectives, and is sent their replies.
            label: For a trace.
            wait: Called before anything else, on the lane's thread; its time is not counted. What it raises is the
                generator's failure.
            first: Carried out before the generator. What it does before its first message counts as encoding, and so
                does what the generator does before its own.
            then, fail: The future's callbacks, called on the thread that ends the generator. A failure is told before
                the connections are closed.
            at_once: Start here and now, and end on the backend's thread, which is for one collective: neither the
                lane's thread nor its queue takes part. It saves their hand-overs, which cost more than a small
                bucket's exchange. The lane is to be idle, or to carry nothing but such generators.
        """
        future = Future(then, fail)
        if at_once:
            self._start(generator, future)
        else:
            self._jobs.put((self._turns.take(), label, wait, [first, generator] if first else [generator], future))
        return future

    def hang_up(self) -> None:
        """Close the connections once the lane is idle."""
        self.run(_nothing(), wait=self._hang_up)

    def close(self) -> None:
        """End the thread, and with it the connections, once its queue is empty."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_S)

    def _drive(self, generator: Exchange[T]) -> T:
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
        finally:
            # Here and now, on the thread whose context it may have changed.
            generator.close()

    def _worked(self, before_wire: bool, began_s: float, ended_s: float) -> None:
        if before_wire:
            self.meter.encode_s += ended_s - began_s
        else:
            self.meter.decode_s += ended_s - began_s
        if self.trace is not None:
            self.trace.add(self.name, "encode" if before_wire else "decode", began_s, ended_s, self._label)

    def _start(self, generator: Exchange[T], future: Future[T]) -> None:
        meter, clock = self.meter, time.perf_counter
        started = clock()
        try:
            with profiled("encode", ""):
                op = next(generator)
            asked = clock()
            replied, reply = self._transport(op).start(op)
        except Exception as error:
            future.end(None, WireError(str(error)) if isinstance(error, RuntimeError) else error)
            return

        def finish(ended: torch.futures.Future[Any]) -> None:
            arrived = clock()
            try:
                ended.value()
            except RuntimeError as error:
                future.end(None, WireError(f"{type(op).__name__}: {error}"))
                return
            try:
                with profiled("decode", ""):
                    generator.send(reply)
            except StopIteration as stop:
                value: T = stop.value
            except Exception as error:
                future.end(None, error)
                return
            else:
                future.end(None, TypeError("this exchange has a second collective: it needs the lane's thread"))
                return
            with self._begun:
                meter.count(op, self.world_size)
                meter.encode_s += asked - started
                meter.wire_s += arrived - asked
                meter.decode_s += clock() - arrived
            future.end(value)

        replied.add_done_callback(finish)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._ticket, self._label, wait, generators, future = job
            value, error = None, None
            try:
                if wait is not None:
                    wait()
                value = [self._drive(generator) for generator in generators][-1]
                self._turns.give_back(self._ticket)
            except Exception as raised:
                error = raised
            future.end(value, error)
            if future.error is not None:
                _let_go(future.error)
                self._hang_up()
                self._turns.give_back(self._ticket)
            # Let go of tensors now, not when the next job arrives.
            del job, wait, generators, future, value, error
        self._hang_up(broken=False)

    def _hang_up(self, broken: bool = True) -> None:
        # Closes this lane's connections, so that the other ranks learn of the failure now rather than after the
        # group's timeout, also where the user catches the error and the process lives on.
        transports, self._transports = self._transports, None
        for transport in (transports or {}).values():
            transport.close(broken)

    def _wire(self, op: Op) -> torch.Tensor:
        began_s, self._turn_s = time.perf_counter(), 0.0
        try:
            reply = self._transport(op).execute(op, _no_wait if _stays_local(op) else self._wait_for_turn)
        except PayloadError as error:
            raise error if op.scope is None else error.numbered(op.scope.ranks(self.rank)) from None
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
        if not isinstance(op, Reduce) and op.last and not _stays_local(op):
            self._turns.give_back(self._ticket)
        return reply

    def _wait_for_turn(self) -> None:
        """Wait until no earlier job has rows to send over the network."""
        began_s = time.perf_counter()
        self._turns.wait(self._ticket)
        self._turn_s = time.perf_counter() - began_s

    def _transport(self, op: Op) -> Transport:
        if self._transports is None:
            raise RuntimeError("this lane was closed after a failure")
        return self._transports[op.scope]


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of an exception, and of what caused it.

    Whoever keeps it, as a future does, would keep the connections open, and ranks at their other ends would wait.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _stays_local(op: Op) -> bool:
    return op.scope is not None and op.scope.local


def _no_wait() -> None:
    """Take no turn: what stays within a machine is in nobody's way."""


def _nothing() -> Exchange[None]:
    yield from ()


_Job = tuple[int, str, Callable[[], object] | None, list[Exchange[Any]], Future[Any]]
