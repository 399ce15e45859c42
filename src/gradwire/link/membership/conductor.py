"""The replay of a training whose workers came and went: all of them as threads of one process, by the real link.

Only the wire and the times are replaced: epochs come from a trace instead of a store, and what members send one another
lies in memory. Threads do not run at will. The program of one worker at a time runs, until it reaches its link; the
members enter an exchange together, and then go on one after the other, by rank. So programs that share random
generators, files or output do the same in every replay.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import getstate as python_state
from random import setstate as set_python_state
from typing import Any, TypeVar

import torch
from numpy.random import get_state as numpy_state
from numpy.random import set_state as set_numpy_state

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Meetings
from gradwire.link.membership.records import Epoch, Member
from gradwire.link.membership.replayed_link import (
    CHANGE,
    END,
    ENDED,
    ENTER,
    EXCHANGE,
    PROGRAM,
    RUN,
    Gone,
    MeetOrder,
    ReplayedMembership,
    RoundOrder,
    the_only_replay,
)
from gradwire.link.membership.trace import MembershipTrace, TracedEpoch

INTERRUPTED_S = 10.0
"""Time that programs have to end after an error, or after an interruption by the user."""
LOOKS_EVERY_S = 0.5
"""Time after which the thread that called :func:`replay` looks whether it was interrupted."""

T = TypeVar("T")


@dataclass(eq=False)
class _Worker:
    """A worker of a replay, and where it stands."""

    name: str
    membership: ReplayedMembership
    thread: threading.Thread
    generators: tuple[Any, ...]
    at: str | None = PROGRAM
    order: Any = None
    result: Any = None
    error: BaseException | None = None


@dataclass
class _Era:
    """An epoch in which all members met, after others at the same round in which they did not."""

    row: TracedEpoch
    rows: list[TracedEpoch] = field(default_factory=list)

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the members that left before it by their own word."""
        return tuple(name for row in self.rows for name in row.left)


def replay(trace: MembershipTrace, train: Callable[..., T], *arguments: Any) -> dict[str, T | None]:
    """Repeat a training whose workers came and went, with all of them in this process.

    ``train(membership, *arguments)`` is the program of a worker, the same that trains on what :func:`gradwire.join`
    returns. It is called once for each worker of the trace, in a thread of its own, of which one runs at a time.
    ``membership.name`` says which worker it is. The link is the real one, with the real lanes and state; epochs come
    from the trace, and messages lie in memory. Parameters have the bits of the real training after every round, if

    - the method has the property ``bit_stable``, or two workers exchange,
    - each program draws the same samples and random numbers; generators of torch, NumPy and Python are kept apart for
      each worker, and begin with the state that they have now,
    - measured values do not decide: pass ``link_cost=`` to the link of a method that uses it.

    Workers that the trace loses are ended where they next reach their link; those of the last epoch go on until their
    programs end. ``membership.leave()`` and signals have no effect. One replay runs at a time in a process.

    Args:
        trace: Who took part in which rounds.
        train: The program of a worker.
        arguments: Further arguments of the program.

    Returns:
        The return value of each program, by name of the worker; None for a worker that was ended.

    Raises:
        IncompatibleError: the trace does not begin with the training, a program ends too soon, or another replay runs.
        Exception: what a program raised.

    Example:
        >>> import torch, gradwire as gw
        >>> def train(membership):
        ...     x = torch.nn.Parameter(torch.zeros(2))
        ...     link = gw.Link([x], "terngrad", group=membership)
        ...     while not membership.left and link.round < 4:
        ...         x.grad = torch.ones(2)
        ...         link.reduce_()
        ...     return membership.world_size
        >>> gw.replay(gw.MembershipTrace.scripted("abc", (2, "is lost", "b")), train)
        {'a': 2, 'c': 2, 'b': None}
    """
    first = trace.epochs[0]
    if (first.epoch, first.round) != (1, 0):
        where = f"epoch {first.epoch} at round {first.round}"
        raise IncompatibleError(f"this trace begins with {where}: replay one from the beginning, as a member has it")
    with the_only_replay():
        return _Conductor(trace, train, arguments).run()


class _Conductor:
    """Lets the workers of a replay run, and the members of an epoch exchange."""

    def __init__(self, trace: MembershipTrace, train: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._eras = list(_eras(trace))
        self._train, self._arguments = train, arguments
        self._changed = threading.Condition()
        self._workers: dict[str, _Worker] = {}
        self._last = {name: number for number, era in enumerate(self._eras) for name in era.row.members}
        self._at = -1
        self._round = 0
        self._foreseen = -1
        self._meetings = Meetings(1)
        self._epoch: Epoch | None = None
        self._initial = _generators()

    def run(self) -> dict[str, Any]:
        """Run all workers to their ends, and return what their programs returned."""
        kept = _generators()
        try:
            self._begin_era()
            while members := self._members():
                for worker in members:
                    self._let_run(worker)
                if self._is_due():
                    self._begin_era()
                    continue
                going = [worker for worker in members if worker.at == EXCHANGE]
                if len(going) < len(members):
                    if going:
                        ended = next(worker.name for worker in members if worker.at != EXCHANGE)
                        raise IncompatibleError(
                            f"the program of {ended!r} ended at round {self._round}, where the trace has it take part "
                            f"with {going[0].name!r}"
                        )
                    break
                self._exchange(going)
            found = {name: worker.result for name, worker in self._ordered()}
        except BaseException:
            self._end_all(INTERRUPTED_S)
            raise
        else:
            self._end_all()
        finally:
            _set_generators(kept)
        return found

    # ------------------------------------------------------------------ the trace

    def _row(self) -> TracedEpoch:
        return self._eras[self._at].row

    def _following(self) -> _Era | None:
        return self._eras[self._at + 1] if self._at + 1 < len(self._eras) else None

    def _is_due(self) -> bool:
        following = self._following()
        return following is not None and following.row.round == self._round

    def _members(self) -> list[_Worker]:
        """Return the members whose programs have not ended."""
        found = [self._workers[name] for name in self._row().members]
        return [worker for worker in found if worker.at != ENDED]

    def _ordered(self) -> list[tuple[str, _Worker]]:
        """Return all workers, those of the last epoch first, by rank."""
        last = self._row().members
        return [(name, self._workers[name]) for name in (*last, *(n for n in self._workers if n not in last))]

    # ------------------------------------------------------------------ changes of the members

    def _begin_era(self) -> None:
        """Let the members of the next epoch meet."""
        before, following = self._members() if self._at >= 0 else [], self._eras[self._at + 1]
        row = following.row
        stays = [worker for worker in before if worker.name in row.members and worker.name not in row.new]
        self._foresee(stays, following)
        for worker in before:
            if worker not in stays:
                self._lose(worker)
        self._at += 1
        for name in row.new if self._at else row.members:
            self._call(name)
        members = [self._workers[name] for name in row.members]
        ended = [worker.name for worker in members if worker.at == ENDED]
        if ended:
            raise IncompatibleError(
                f"the program of {ended[0]!r} ended at round {self._round}, where the trace has it go on"
            )
        epoch = self._epoch_of(row, members)
        parted = tuple(self._workers[name].membership.seat.me.id for name in following.left if name in self._workers)
        self._meetings, self._epoch = Meetings(len(row.members)), epoch
        for worker in members:
            seat = worker.membership.seat
            if row.position is None or seat.me.id in epoch.new or not before:
                seat.adopted.append(epoch)
            seat.history.add(epoch, parted)
            seat.position = max(seat.position, epoch.position)
        self._let(members, MeetOrder(epoch, self._meetings, parted))
        self._look_ahead()

    def _lose(self, worker: _Worker) -> None:
        """End a worker that the trace has no longer, unless it comes again."""
        while worker.at in (CHANGE, PROGRAM):
            self._run_program(worker)
        if worker.at != ENDED and self._last[worker.name] <= self._at:
            self._let([worker], END)

    def _call(self, name: str) -> None:
        """Let a new worker come to its link, or one that was left out become another member."""
        worker = self._workers.get(name)
        if worker is not None and worker.at != ENDED:
            seat = worker.membership.seat
            seat.again(_id(name, self._at))
            return
        membership = ReplayedMembership(name, lambda point: self._stopped(name, point))
        membership.seat.me = Member(_id(name, self._at), name)
        thread = threading.Thread(target=self._work, args=(name,), name=f"gradwire replay of {name}", daemon=True)
        worker = self._workers[name] = _Worker(name, membership, thread, self._initial)
        thread.start()
        self._let_run(worker)
        if worker.at != ENTER:
            raise IncompatibleError(f"the program of {name!r} ended before it made its link")

    def _foresee(self, stays: Sequence[_Worker], following: _Era) -> None:
        """Let samplers know of the next epochs: they tell by the position which of them had drawn before."""
        if self._foreseen == self._at + 1 or following.row.position is None:
            return
        self._foreseen = self._at + 1
        for row in following.rows:
            ids = {name: self._workers[name].membership.seat.me.id for name in row.members if name in self._workers}
            for worker in stays:
                if worker.name in row.members and worker.name not in row.new:
                    worker.membership.seat.adopted.append(_epoch(row, ids, self._at + 1))

    def _look_ahead(self) -> None:
        """Foresee the next epoch where it begins with the round that samples are drawn for next."""
        following = self._following()
        if following is not None and following.row.round == self._round:
            new = following.row.new
            stays = [w for w in self._members() if w.name in following.row.members and w.name not in new]
            self._foresee(stays, following)

    def _epoch_of(self, row: TracedEpoch, members: Sequence[_Worker]) -> Epoch:
        ids = {worker.name: worker.membership.seat.me.id for worker in members}
        if row.position is not None:
            return _epoch(row, ids, self._at)
        old = [worker.membership.seat for worker in members if worker.name not in row.new]
        reserved = max((seat.reserve for seat in old), default=0) if row.new and self._at else 0
        position = max(seat.position for seat in old) + reserved * len(row.new)
        return _epoch(replace(row, position=position, reserved=reserved), ids, self._at)

    # ------------------------------------------------------------------ rounds

    def _exchange(self, members: Sequence[_Worker]) -> None:
        following, seats = self._following(), [worker.membership.seat for worker in members]
        leavers: tuple[str, ...] = ()
        if following is not None and following.row.round == self._round + 1:
            leavers = tuple(w.membership.seat.me.id for w in members if w.name in following.left)
        heir = next((seat.me.id for seat in seats if seat.me.id not in leavers), None)
        self._let(members, RoundOrder(leavers, heir))
        self._round += 1
        position = max(seat.position for seat in seats)
        for seat in seats:
            seat.position = position
        self._look_ahead()

    # ------------------------------------------------------------------ threads

    def _let_run(self, worker: _Worker) -> None:
        """Let one program run until it reaches its link or ends, unless it stands there already."""
        if worker.at in (PROGRAM, CHANGE) and not (worker.at == CHANGE and self._is_due_for(worker)):
            self._run_program(worker)

    def _run_program(self, worker: _Worker) -> None:
        _set_generators(worker.generators)
        self._let([worker], RUN)
        worker.generators = _generators()

    def _is_due_for(self, worker: _Worker) -> bool:
        following = self._following()
        return self._is_due() and following is not None and worker.name in following.row.members

    def _let(self, workers: Sequence[_Worker], order: Any) -> None:
        """Let workers follow an order at the same time, and wait until each stands somewhere again."""
        with self._changed:
            for worker in workers:
                worker.order, worker.at = order, None
            self._changed.notify_all()
            # A signal that comes just before a wait begins, or to another thread, does not end that wait.
            while not self._changed.wait_for(lambda: _stand(workers), LOOKS_EVERY_S):
                pass
        for worker in workers:
            if worker.error is not None:
                raise worker.error

    def _stopped(self, name: str, point: str) -> Any:
        """Stand somewhere, in the thread of a worker, until there is an order; return it."""
        worker = self._workers[name]
        with self._changed:
            worker.at = point
            # The order to end may have come while the program ran.
            worker.order = worker.order if worker.order == END else None
            self._changed.notify_all()
            self._changed.wait_for(lambda: worker.order is not None)
            if worker.order == END:
                raise Gone
            return worker.order

    def _work(self, name: str) -> None:
        worker = self._workers[name]
        with self._changed:
            self._changed.wait_for(lambda: worker.order is not None)
        try:
            if worker.order != END:
                with worker.membership:
                    worker.result = self._train(worker.membership, *self._arguments)
        except Gone:
            pass
        except BaseException as error:
            worker.error = error
        finally:
            with self._changed:
                worker.at = ENDED
                self._changed.notify_all()

    def _end_all(self, timeout_s: float | None = None) -> None:
        """End all threads; go on without those whose programs have not ended after a time."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._meetings.break_off()
        for worker in self._workers.values():
            with self._changed:
                if worker.at != ENDED:
                    worker.order = END
                self._changed.notify_all()
            worker.thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))


def _stand(workers: Sequence[_Worker]) -> bool:
    """Return whether each worker stands somewhere, or one of them failed."""
    return any(worker.error for worker in workers) or all(worker.at is not None for worker in workers)


def _eras(trace: MembershipTrace) -> Iterator[_Era]:
    rows: list[TracedEpoch] = []
    for row in trace.epochs:
        rows.append(row)
        if row.met:
            yield _Era(row, rows)
            rows = []


def _id(name: str, number: int) -> str:
    """Return the id of a member that came in with an epoch."""
    return f"{zlib.crc32(name.encode()):08x}{number:08x}"


def _epoch(row: TracedEpoch, ids: dict[str, str], number: int) -> Epoch:
    """Return the record of an epoch; members that never met have ids of their own."""
    members = tuple(Member(ids.get(name) or _id(name, number), name) for name in row.members)
    new = tuple(member.id for member in members if member.name in row.new)
    return Epoch(row.epoch, members, new, row.round, row.position or 0, row.reserved)


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators that programs draw from, which are no part of gradwire's own draws."""
    return torch.get_rng_state(), python_state(), numpy_state()  # noqa: NPY002


def _set_generators(states: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    set_python_state(of_python)
    set_numpy_state(of_numpy)  # noqa: NPY002
