"""Lanes: threads with connections of their own that run generators."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.future import Future, ignore
from gradwire.exchange.drivers.traffic import Meter, Trace, large, profiled
from gradwire.exchange.drivers.transfer_order import TransferOrder
from gradwire.exchange.drivers.transports import Connect, GlooTransport, Transport
from gradwire.exchange.ops import Exchange, Op, Reduce, Scope

LANES = 2
"""Default number of lanes on CPU, where a lane's thread computes and sends in turn."""

T = TypeVar("T")

CLOSE_S = 2.0
"""Time that :meth:`Lane.close` waits for a job that is running."""

BROKEN_S = 0.2
"""Time that a job has to notice that its connections were broken."""


class WireError(Exception):
    """A collective broke, most likely because of another rank."""


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
        transport = connect(store, rank, world_size, timeout)
        self._transports: dict[Scope | None, Transport] | None = {None: transport}
        for scope in scopes:
            place, size = scope.place(rank)
            its_store = dist.PrefixStore(f"{scope.name}/{scope.ranks(rank)[0]}", store)
            self._transports[scope] = connect(its_store, place, size, timeout)
        self.rank, self.world_size = rank, world_size
        self._turns, self._ticket = turns or TransferOrder(), 0
        self._turn_s = 0.0
        self.meter, self._starts = Meter(rank, transport.keyed_bytes), transport.starts
        self.name, self._label = name, ""
        self.trace: Trace | None = None
        self._begun = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._was_stuck: list[object] = []
        self._given_up, self._ended, self._failure = False, False, ""
        self._on_failure: Callable[[], Callable[[Lane, Exception], object] | None] = _nobody
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
        then: Callable[[T], object] = ignore,
        fail: Callable[[Exception], object] = ignore,
        at_once: bool = False,
    ) -> Future[T]:
        """Run a generator on this lane's connections, after all jobs that were submitted before.

        If a generator raises, the lane closes its connections. After :meth:`close` the future ends with an error.

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
                bucket. The lane must be idle, or run only such generators. Some transports cannot start so.
        """
        at_once &= self._starts
        future = Future(then, fail, at_once, self._open.discard)
        self._open.add(future)
        if self._given_up:
            future.end(None, WireError("the connections of this lane were broken off"))
        elif at_once:
            self._start(generator, future)
        else:
            self._jobs.put((self._turns.take(), label, wait, [first, generator] if first else [generator], future))
            if self._ended:
                self._refuse_rest()
        return future

    def on_failure(self, tell: weakref.WeakMethod[Callable[[Lane, Exception], object]]) -> None:
        """Set the method that the lane's thread calls with the lane and an error that closes it between two jobs."""
        self._on_failure = tell

    def hang_up(self) -> None:
        """Close the connections once the lane is idle."""
        self.run(_nothing(), wait=self._hang_up)

    @property
    def busy(self) -> bool:
        """Whether an exchange has not ended."""
        return bool(self._open)

    def abort(self) -> None:
        """Break the connections now, from any thread: what waits for a message raises.

        A later call gives up what waits still for what it did at the earlier one: its future ends with an error, and
        the thread is left alone. Gloo forgets a message of which a part has been sent or received when its connection
        breaks, and who waits for it waits until the timeout.

        Raises:
            TypeError: the transport cannot do that.
        """
        for transport in (transports := list((self._transports or {}).values())):
            transport.abort()
        open_futures = list(self._open)
        stuck = [t.awaited for t in transports if t.awaited is not None] + [f for f in open_futures if f.at_once]
        if any(what is before for what in stuck for before in self._was_stuck):
            self._given_up = True
            self._turns.end()
            for future in open_futures:
                future.end(None, WireError("the connections were broken off while a message was on its way"))
        self._was_stuck = stuck

    def break_off(self, timeout_s: float) -> bool:
        """Break the connections, and end the thread or give it up; return False if it runs on after a time."""
        end_s = time.monotonic() + timeout_s
        self.abort()
        while not self.close(min(BROKEN_S, timeout_s)) and time.monotonic() < end_s:
            self.abort()
        return self.close(0.0)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End the thread and the connections once the queue is empty; return False if they have not after a time."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive() or self._given_up

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
        with self._begun:
            # Numbers gathered beside a round may end after it: their bytes are those of the round, whenever it is read.
            meter.count(op, self.world_size)

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
            except BaseException as error:
                future.end(None, _as_error(error))
                return
            else:
                future.end(None, TypeError("this exchange has a second collective: it needs the lane's thread"))
                return
            with self._begun:
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
            except BaseException as raised:
                error = _as_error(raised)
            future.end(value, error)
            if future.error is not None:
                _let_go(future.error)
                self._hang_up()
            else:
                self._end_job()
            # Release tensors now and not when the next job arrives.
            del job, wait, generators, future, value, error
        self._hang_up(broken=False)
        # A job that is submitted meanwhile sees the flag, or is in the queue before the last look at it.
        self._ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """End jobs that were submitted after the lane was closed: no thread runs them."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[-1].end(None, WireError("this lane was closed"))

    def _end_job(self) -> None:
        """Let the transports prepare for the next round.

        A connection that is broken raises again in the next operation. For anything else the lane is closed: its thread
        must not end, or whoever waits for the next operation would wait for ever. It is told at once, since the program
        may be waiting, outside the link, for ranks that wait for this one.
        """
        for transport in (self._transports or {}).values():
            try:
                with contextlib.suppress(RuntimeError):
                    transport.end_job()
            except Exception as error:
                self._failure = f" ({type(error).__name__}: {error})"
                self._hang_up()
                tell = self._on_failure()
                # Nor by an error of who is told.
                with contextlib.suppress(Exception):
                    if tell is not None:
                        tell(self, error)
                return

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
            sent_bytes, detail = self.meter.bytes_of(op, self.world_size)[0], f"{self._label}, {type(op).__name__}"
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
            raise RuntimeError("this lane was closed" + ("" if self._ended else f" after a failure{self._failure}"))
        return self._transports[op.scope]


def _as_error(raised: BaseException) -> Exception:
    """Return an exception to tell those who wait, also for one that would end this thread alone, such as SystemExit.

    They would wait for ever, and the other ranks until the group's timeout.
    """
    if isinstance(raised, Exception):
        return raised
    told = RuntimeError(f"{raised!r} was raised on a thread that exchanges")
    told.__cause__ = raised
    return told


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


def _nobody() -> None:
    """Return no method."""


_Job = tuple[int, str, Callable[[], object] | None, list[Exchange[Any]], Future[Any]]
