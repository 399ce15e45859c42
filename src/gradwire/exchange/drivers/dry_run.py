"""Runs of a plan without a group: a dry run that counts bytes, and a profiler of local work."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any, TypeVar

import torch

from gradwire.exchange.drivers.delays import USUAL_ROUND, op_delays
from gradwire.exchange.drivers.traffic import Meter, broadcast_sends, gathers, large, op_bytes
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.ops import AllToAll, Broadcast, Exchange, Op, Reduce, Scope, SendRecv
from gradwire.exchange.protocols import Context, Memory, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.wire import pretend_senders


def dry_run(
    plan: BucketPlan, numel: int, world_size: int, round: int = USUAL_ROUND, rank: int = 0, *, period: int = 1
) -> Meter:
    """Run a plan made with the ``meta`` kernels, and count its bytes for one rank and one round.

    The count is exact, except that rows whose length depends on data count with their largest length.

    Args:
        round: Number of the round. The default is one between a schedule's updates. A round of the schedule includes
            its exchanges and those at its end, as if the step were one bucket.
        rank: The rank whose bytes are counted. Ranks differ in broadcasts only: if the root changes with the round,
            rank 0 is the root in the default round, so that no other rank sends more.
        period: Number of rounds, of which ``round`` is the last. If there are several, the counts are means over them,
            rounded up.
    """
    meter = Meter(rank)
    flat = torch.empty(numel, dtype=plan.dtype, device="meta")
    for number in range(round + 1 - period, round + 1):
        context = Context(rank, world_size, number, workspace=Workspace("meta"))
        _drive(plan.whole(context, flat), world_size, meter)
        if plan.finishes:
            _drive(plan.finish(context), world_size, meter)
    return _mean_of_rounds(meter, period)


def _mean_of_rounds(meter: Meter, rounds: int) -> Meter:
    meter.sent_bytes, meter.received_bytes, meter.ring_bytes = (
        -(-total // rounds) for total in (meter.sent_bytes, meter.received_bytes, meter.ring_bytes)
    )
    meter.sent_to = Counter({rank: -(-total // rounds) for rank, total in meter.sent_to.items()})
    meter.sent_within = Counter({scope: -(-total // rounds) for scope, total in meter.sent_within.items()})
    return meter


def _drive(generator: Exchange[Any], world_size: int, meter: Meter) -> None:
    try:
        op = next(generator)
        while True:
            if not isinstance(op, Reduce | Broadcast) and op.arrived is not None and op.lengths is not None:
                op.arrived.copy_(op.lengths)
            meter.count(op, world_size)
            op = generator.send(op.value if isinstance(op, Reduce | Broadcast) else op.recv)
    except StopIteration:
        return


LATE_ROUND = 1 << 40
"""A round in the last stage of every schedule."""


T = TypeVar("T")

USUAL_LINK = LinkCost(message_s=5e-4, bytes_per_s=1e8)
"""Cost of a message for methods that depend on it, if none is given: about 1 Gbit/s."""


@dataclass(frozen=True)
class Stage:
    """Local work, then an operation of the group; the last stage of a job has no operation (``kind`` is "").

    Attributes:
        work_s: Seconds of the local work, in this process alone on its core.
        kind: "all_to_all", "all_gather", "gather" (a small reduction by a gather), "ring", "pairs" (large rows, one at
            a time, in turn between lanes), or "broadcast".
        sent_bytes: Bytes that one rank sends, or their mean over rounds that alternate; for a broadcast those that its
            root sends, since all others wait for it.
        rounds: Number of messages that depend on one another.
        messages: Number of messages that one rank sends.
        scope: Scope of the operation; None: all ranks.
        delays: One-way delays that the operation takes if all ranks begin it at the same time.
    """

    work_s: float
    kind: str = ""
    sent_bytes: float = 0
    rounds: int = 0
    messages: int = 0
    scope: Scope | None = None
    delays: int = 0


class LocalProfiler:
    """Runs rounds of rank 0 without a group, with its own payloads as replies where those of others have as many bytes.

    Control flow never depends on values, but lengths of rows may. A sum of N copies of one payload has fewer values
    than one of N payloads, so that a coder finds less in it, and a rank that sends nothing in an operation has no
    payload of its own to receive. In these cases the other ranks are run, too, one after the other, up to the rows that
    they send to this one. This is done once, not timed, and the timed rounds receive the same rows.

    Args:
        plan: A plan made with kernels that compute.
        flat: A bucket of gradients or similar values; not changed. Other ranks have the same values at other elements.
        sizes: Numbers of elements of its parameters, within which these elements are; empty: anywhere.
        link: Cost of a message, for methods whose payloads depend on it.
        period: See :class:`gradwire.Traits`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        flat: torch.Tensor,
        world_size: int,
        *,
        link: LinkCost | None = None,
        period: int = 1,
        sizes: Sequence[int] = (),
    ) -> None:
        self._link, self._sizes = link or USUAL_LINK, list(sizes) or [flat.numel()]
        self._plan, self._flat, self._world_size = plan, flat, world_size
        whole = Workspace()
        self._spaces, self._memory = [*(Workspace(bucket=whole) for _ in range(plan.chunks)), whole], Memory()
        # Rounds in which rank 0 is the root of all broadcasts whose root changes: only the root has a payload, which it
        # can also receive. Rounds that alternate have no such broadcasts, and follow one another.
        self._work, self._round = torch.empty_like(flat), LATE_ROUND - LATE_ROUND % world_size
        self._apart = world_size if period == 1 else 1
        self._period = period
        self._rows: dict[tuple[int, int, int | None, int], list[torch.Tensor]] = {}

    def play(self) -> list[list[Stage]]:
        """Run a round with one torch thread, as a worker does: with more threads, a cast waits for the pool.

        Returns:
            Stages of the whole bucket's preparation, then those of each chunk. The first round takes longer, since it
            allocates buffers and does work that is done once.
        """
        with _one_thread():
            self._work.copy_(self._flat)
            context = Context(
                0, self._world_size, self._round, workspace=self._spaces[-1], memory=self._memory, link=self._link
            )
            prepared, first = self._timed(self._plan.prepare(context, self._work), None)
            found = [first]
            for chunk in range(self._plan.chunks):
                own = replace(context, chunk=chunk, workspace=self._spaces[chunk])
                found.append(self._timed(self._plan.run(own, self._work, prepared), chunk)[1])
            self._memory.commit()
            if self._plan.finishes:
                # It runs in few rounds and beside the work after the step, which does not wait for it.
                _timed(self._plan.finish(context), self._world_size, lambda number, op: _echo(op, 0, self._world_size))
                self._memory.commit()
        self._round += self._apart
        return found

    def _timed(self, job: Exchange[T], chunk: int | None) -> tuple[T, list[Stage]]:
        return _timed(job, self._world_size, partial(self._reply, 0, chunk))

    def _reply(self, rank: int, chunk: int | None, number: int, op: Op) -> torch.Tensor:
        """Return the reply to a rank's operation, the one with that number in a chunk (None: in the preparation)."""
        if isinstance(op, SendRecv):
            foreign = op.to is None and op.source is not None
        else:
            # A rank to which the others send their rows, and that sends none, computes nothing of their values.
            foreign = rank == 0 and isinstance(op, AllToAll) and op.lengths is not None and bool(op.lengths.any())
        if foreign and isinstance(op, AllToAll | SendRecv):
            return self._received(rank, chunk, number, op)
        return _echo(op, rank, self._world_size)

    def _received(self, rank: int, chunk: int | None, number: int, op: AllToAll | SendRecv) -> torch.Tensor:
        place, ranks = _place(op, rank, self._world_size)
        senders = [op.source or 0] if isinstance(op, SendRecv) else [r for r in range(len(ranks)) if r != place]
        turn = self._round % self._period
        if (turn, rank, chunk, number) not in self._rows:
            for sender in senders:
                for part, asked in self._asked(ranks[sender], chunk, number):
                    self._rows.setdefault((turn, rank, part, number), []).append(_sent_row(asked, place))
        rows = op.recv.view(-1, op.recv.shape[-1])
        if isinstance(op, AllToAll):
            rows[place].copy_(op.send[place])
        for sender, row in zip(senders, self._rows[turn, rank, chunk, number]):
            at = 0 if isinstance(op, SendRecv) else sender
            rows[at, : len(row)].copy_(row)
            if op.arrived is not None:
                op.arrived[at] = len(row)
        # The rows are of an earlier round.
        pretend_senders(rows, senders[0] if isinstance(op, SendRecv) else 0, round=self._round)
        return op.recv

    def _asked(self, rank: int, chunk: int | None, number: int) -> Iterator[tuple[int | None, Op]]:
        """Yield another rank's operation with that number, of its preparation or of each of its chunks."""
        whole, n = Workspace(), self._world_size
        work = torch.cat([part.roll(rank * max(1, len(part) // n)) for part in self._flat.split(self._sizes)])
        context = Context(rank, self._world_size, self._round, workspace=whole, memory=Memory(), link=self._link)
        job = self._plan.prepare(context, work)
        if chunk is None:
            yield None, _run_to(job, number, partial(self._reply, rank, None))
            return
        prepared = _run_out(job, partial(self._reply, rank, None))
        for part in range(self._plan.chunks):
            own = replace(context, chunk=part, workspace=Workspace(bucket=whole))
            yield part, _run_to(self._plan.run(own, work, prepared), number, partial(self._reply, rank, part))


def profile_locally(
    plan: BucketPlan,
    flat: torch.Tensor,
    world_size: int,
    repeats: int = 5,
    *,
    link: LinkCost | None = None,
    period: int = 1,
    sizes: Sequence[int] = (),
) -> tuple[list[Stage], list[list[Stage]]]:
    """Run a plan's round several times, and time the work between operations.

    Args:
        plan: See :class:`LocalProfiler`, also for ``flat``, ``link``, ``period`` and ``sizes``.
        repeats: Number of timed rounds of each kind, after a first one that is not counted.

    Returns:
        Stages of the whole bucket's preparation, and those of each chunk; medians over repetitions. If rounds
        alternate, they are the means of these over a period.
    """
    rehearsal = LocalProfiler(plan, flat, world_size, link=link, period=period, sizes=sizes)
    runs = [rehearsal.play() for _ in range((repeats + 1) * period)]
    first, *parts = [
        [_mean([_middle(stages[turn::period]) for turn in range(period)]) for stages in zip(*same)]
        for same in zip(*runs[period:])
    ]
    return first, parts


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _middle(stages: Sequence[Stage]) -> Stage:
    return replace(stages[0], work_s=median(stage.work_s for stage in stages))


def _mean(stages: Sequence[Stage]) -> Stage:
    """Return the mean of the same stage in rounds that alternate; its messages are those of the largest."""
    largest = max(stages, key=lambda stage: stage.sent_bytes)
    # For whole numbers whose mean is whole, it is an int.
    return replace(
        largest, work_s=mean(s.work_s for s in stages), sent_bytes=mean(stage.sent_bytes for stage in stages)
    )


Replies = Callable[[int, Op], torch.Tensor]
"""Takes the number of an operation in its job, and the operation; returns the reply."""


def _run_to(job: Exchange[Any], number: int, replies: Replies) -> Op:
    """Run a job up to the operation with that number."""
    op = next(job)
    for before in range(number):
        op = job.send(replies(before, op))
    job.close()
    return op


def _run_out(job: Exchange[T], replies: Replies) -> T:
    """Run a job to its end, and return its result."""
    number = 0
    try:
        op = next(job)
        while True:
            op = job.send(replies(number, op))
            number += 1
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _timed(generator: Exchange[T], world_size: int, replies: Replies) -> tuple[T, list[Stage]]:
    stages: list[Stage] = []
    started = time.perf_counter()
    try:
        op = next(generator)
        while True:
            work_s = time.perf_counter() - started
            stages.append(Stage(work_s, *_shape(op, world_size), op.scope, op_delays(op, world_size)))
            reply = replies(len(stages) - 1, op)
            started = time.perf_counter()
            op = generator.send(reply)
    except StopIteration as stop:
        stages.append(Stage(time.perf_counter() - started))
        return stop.value, stages


def _shape(op: Op, world_size: int) -> tuple[str, int, int, int]:
    sent, _ = op_bytes(op, world_size)
    world_size = world_size if op.scope is None else op.scope.place(0)[1]
    others = world_size - 1
    if isinstance(op, Reduce) and not gathers(op):
        return "ring", sent, 2 * others, 2 * others
    if isinstance(op, Broadcast):
        hops = broadcast_sends(op.root, op.root, world_size) * (1 + (op.length is not None))
        return "pairs" if large(op) else "broadcast", op_bytes(op, world_size, op.root)[0], hops, hops
    # A message with its length goes beside a row whose length depends on data.
    told = int(not isinstance(op, Reduce) and op.lengths is not None)
    if isinstance(op, SendRecv):
        return "pairs" if large(op) else "all_to_all", sent, 1, (1 + told) * (op.to is not None)
    if large(op):
        return "pairs", sent, others, others * (1 + told)
    kind = "gather" if isinstance(op, Reduce) else "all_to_all" if isinstance(op, AllToAll) else "all_gather"
    return kind, sent, 1, others * (1 + told)


def _place(op: Op, rank: int, world_size: int) -> tuple[int, Sequence[int]]:
    """Return a rank's place among those that take part in its operation, and their numbers."""
    return (rank, range(world_size)) if op.scope is None else (op.scope.place(rank)[0], op.scope.ranks(rank))


def _sent_row(op: Op, to: int) -> torch.Tensor:
    """Return a copy of the row that a rank sends to the one at a place."""
    if not isinstance(op, AllToAll | SendRecv):
        raise TypeError(f"ranks yield different operations: {type(op).__name__} where another receives a row")
    row, at = (op.send[to], to) if isinstance(op, AllToAll) else (op.send, 0)
    return row[: len(row) if op.lengths is None else int(op.lengths[at])].clone()


def _echo(op: Op, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's own payload as if every rank had sent it."""
    if isinstance(op, Reduce | Broadcast):
        return op.value
    place, _ = _place(op, rank, world_size)
    own = op.send[place] if isinstance(op, AllToAll) else op.send
    reply = op.recv.copy_(own.expand_as(op.recv))
    if isinstance(op, SendRecv):
        pretend_senders(reply[None], first=op.source or 0, receiver=place)
    else:
        pretend_senders(reply)
    return reply
