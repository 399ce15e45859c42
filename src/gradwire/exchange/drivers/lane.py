"""Lanes: threads with connections of their own that run generators, and the order of their transfers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.traffic import Meter, Trace, large, op_bytes, profiled
from gradwire.exchange.drivers.transports import Connect, GlooTransport, Transport
from gradwire.exchange.ops import Exchange, Op, Reduce, Scope

LANES = 2
"""Default number of lanes on CPU, where a lane's thread computes and sends in turn."""


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
        self._sending = False

    def take(self) -> int:
        """Return the next ticket; tickets are in the order in which jobs were submitted."""
        with self._changed:
            self._next += 1
            return self._next

    @contextlib.contextmanager
    def turn(self, ticket: int) -> Iterator[None]:
        """Wait until no other job sends and no earlier one waits, and let no other one send meanwhile."""
        with self._changed:
            self._waiting.add(ticket)
            self._changed.wait_for(lambda: not self._sending and min(self._waiting) == ticket)
            self._waiting.discard(ticket)
            self._sending = True
        try:
            yield
        finally:
            with self._changed:
                self._sending = False
                self._changed.notify_all()


T = TypeVar("T")

CLOSE_S = 2.0
"""Time that :meth:`Lane.close` waits for a job that is running."""


class WireError(Exception):
    """A collective broke, most likely because of another rank."""


def _ignore(_: object) -> None:
    """Ignore an outcome."""


class Future(Generic[T]):
    """The outcome of a generator that a lane runs.

    A thread that waits continues after the callbacks have returned, and can be interrupted. Waiting uses no event,
    which would cost a small cast more than all the rest of this class.

    Args:
        then: Called with the value that the generator returned.
        fail: Called with the exception that the generator or ``then`` raised.

    Attributes:
        error: The exception, once one was raised.
        done: True once the generator has ended.
    """

    def __init__(self, then: Callable[[T], object] = _ignore, fail: Callable[[Exception], object] = _ignore) -> None:
        self._then, self._fail = then, fail
        self._value: Any = None
        self.error: Exception | None = None
        self.done = False
        self._going = threading.Lock()
        self._going.acquire()

    def end(self, value: T | None, error: Exception | None = None) -> None:
        """Set the value that the generator returned, or the exception that it raised, once."""
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
            # The callbacks hold buckets, and a caller may keep this future.
            self._then = self._fail = _ignore
            self.done = True
            self._going.release()

    def wait(self) -> None:
        """Wait for the end, with a result or an error."""
        with self._going:
            pass

    def result(self) -> T:
        """Wait, and return the value that the generator returned.

        Raises:
            Exception: the exception of the generator or of ``then``.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        result: T = self._value
        return result


class Lane:
    """A thread with connections of its own.

    Args:
        store: Store for the lane alone; the same on all its ranks.
        rank: This rank.
        world_size: Number of ranks in the lane.
        timeout: Timeout of each collective.
        name: Name of the thread in debuggers and profilers.
        turns: Transfer order, shared by the lanes of one link; submit to them from one thread.
        scopes: Scopes of operations that are not among all ranks.
        connect: Makes the connections: one transport for all ranks, and one for each scope.

    Attributes:
        trace: Records the lane's work from now on; None: nothing is recorded.
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
        among_all = connect(store, rank, world_size, timeout)
        self._transports: dict[Scope | None, Transport] | None = {None: among_all}
        for scope in scopes:
            place, size = scope.place(rank)
            its_store = dist.PrefixStore(f"{scope.name}/{scope.ranks(rank)[0]}", store)
            self._transports[scope] = connect(its_store, place, size, timeout)
        self.rank, self.world_size = rank, world_size
        self._turns, self._ticket = turns or TransferOrder(), 0
        self._turn_s = 0.0
        self.meter, self._starts = Meter(rank, among_all.keyed_bytes), among_all.starts
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
        """Run a generator on this lane's connections, after all jobs that were submitted before.

        If a generator raises, the lane closes its connections.

        Args:
            generator: A generator that yields collectives, and receives their replies.
            label: Label in a trace.
            wait: Called first, on the lane's thread; its time is not counted. If it raises, the generator fails.
            first: A generator to run before. Its work before its first message counts as encoding, as does that of the
                generator before its own first message.
            then, fail: Callbacks of the future, called on the thread that ends the generator; ``fail`` is called before
                the connections are closed.
            at_once: Start on the calling thread, and end on the backend's, for a generator with one collective. The
                lane's thread and queue are not used, since switching threads costs more than the exchange of a small
                bucket. The lane must be idle, or run only such generators. Where the transport cannot start so, the
                generator waits in the queue as any other.
        """
        future = Future(then, fail)
        if at_once and self._starts:
            self._start(generator, future)
        else:
            self._jobs.put((self._turns.take(), label, wait, [first, generator] if first else [generator], future))
        return future

    def hang_up(self) -> None:
        """Close the connections once the lane is idle."""
        self.run(_nothing(), wait=self._hang_up)

    def abort(self) -> None:
        """Break the connections now, from any thread: what waits for a message raises.

        Raises:
            TypeError: the transport cannot do that.
        """
        for transport in (self._transports or {}).values():
            transport.abort()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End the thread and the connections once the queue is empty; return False if they have not after a time."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

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
                # A reduction of scalers precedes the encoder; work after any other reply is decoding.
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
            # Close it on this thread, whose context it may have changed.
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
            except Exception as raised:
                error = raised
            future.end(value, error)
            if future.error is not None:
                _let_go(future.error)
                self._hang_up()
            else:
                self._end_job()
            # Release tensors now and not when the next job arrives.
            del job, wait, generators, future, value, error
        self._hang_up(broken=False)

    def _end_job(self) -> None:
        """Let the transports prepare for the next round; what breaks in it is told by the next operation."""
        for transport in (self._transports or {}).values():
            with contextlib.suppress(RuntimeError):
                transport.end_job()

    def _hang_up(self, broken: bool = True) -> None:
        # Close this lane's connections, so that the other ranks notice the failure now and not after the group's
        # timeout, even if the user catches the error and the process continues.
        transports, self._transports = self._transports, None
        for transport in (transports or {}).values():
            transport.close(broken)

    def _wire(self, op: Op) -> torch.Tensor:
        began_s, self._turn_s = time.perf_counter(), 0.0
        try:
            turn = nullcontext if _stays_local(op) else self._turn
            reply = self._transport(op).execute(op, turn, self._label)
        except PayloadError as error:
            raise error if op.scope is None else error.numbered(op.scope.ranks(self.rank)) from None
        except RuntimeError as error:
            raise WireError(f"{type(op).__name__}: {error}") from error
        if self.trace is not None:
            # The wait for the turn comes first.
            began = began_s + self._turn_s
            if self._turn_s:
                self.trace.add(self.name, "wait for turn", began_s, began, self._label)
            kind = "send rows" if large(op) else "small message"
            sent_bytes = op_bytes(op, self.world_size, self.rank, self.meter.keyed_bytes)[0]
            detail = f"{self._label}, {type(op).__name__}"
            self.trace.add(self.name, kind, began, time.perf_counter(), detail, sent_bytes)
        return reply

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other job sends large rows over the network, and send while none does."""
        began_s = time.perf_counter()
        with self._turns.turn(self._ticket):
            self._turn_s = time.perf_counter() - began_s
            yield

    def _transport(self, op: Op) -> Transport:
        if self._transports is None:
            raise RuntimeError("this lane was closed after a failure")
        return self._transports[op.scope]


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an exception and of its causes.

    A future that keeps the exception would otherwise keep the connections open, and peers would wait.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _stays_local(op: Op) -> bool:
    return op.scope is not None and op.scope.local


def _nothing() -> Exchange[None]:
    yield from ()


_Job = tuple[int, str, Callable[[], object] | None, list[Exchange[Any]], Future[Any]]
