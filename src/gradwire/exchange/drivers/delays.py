"""A simulated clock that counts one-way delays: every message takes one, and everything else takes no time.

The clock follows the messages of Gloo's transport, as `gloo/transport/tcp/pair.cc`, `gloo/broadcast.cc` and
`gloo/allreduce.cc` describe them, in a round like the one before:

- A receive sends a *request* to the sender, and the sender sends a message when the request has arrived. Where both
  sides begin at the same time, a message so takes two delays: the request's and its own. An earlier receive hides the
  request.
- Rows to and from all ranks, and between two, were requested when those of the round before had been read: one delay.
  The length of a row travels beside it.
- A broadcast goes along a binomial tree whose receives are all posted at the beginning: 1 + floor(log2 N) delays.
- An all-reduce is a ring for any number of bytes, since torch leaves Gloo's choice of an algorithm open; Gloo also has
  recursive halving and doubling ("bcube", 4 log2 N delays), which torch never asks for. Each of the 2 (N - 1) hops is
  requested when the segment two places before has arrived: 4 (N - 1) delays up to 2 N MiB, and beyond that in
  proportion to the bytes, since no more than two segments of 1 MiB are under way at a time (:func:`ring_segments`).

Ranks that start together and take equal parts are at the same time after every operation, so that the generator of one
of them suffices. Broadcasts, messages between two ranks and operations with a scope are simulated on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gradwire.exchange.drivers.lane import LANES
from gradwire.exchange.drivers.simulation import in_lockstep
from gradwire.exchange.drivers.traffic import gathers
from gradwire.exchange.network_cost import Delays
from gradwire.exchange.ops import AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from gradwire.exchange.protocols import Context, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan

USUAL_ROUND = -1
"""A round without the exchanges that a schedule adds in some rounds only."""

GLOO_THREADS = 2
"""Threads of a Gloo backend, each of which runs a collective that was started without waiting."""

SEGMENT_BYTES = 1 << 20
"""Largest number of bytes of a segment in Gloo's ring."""

T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """A time in delays, with the delays of each phase on the longest path to it."""

    at: int = 0
    path: tuple[tuple[str, int], ...] = ()

    def later(self, phase: str, delays: int = 1) -> Moment:
        """Return the moment some delays later."""
        if not delays:
            return self
        spent = dict(self.path)
        spent[phase] = spent.get(phase, 0) + delays
        return Moment(self.at + delays, tuple(spent.items()))


def latest(*moments: Moment) -> Moment:
    """Return the latest moment; of equal ones the first."""
    return max(moments, key=lambda moment: moment.at)


def ring_segments(size: int, world_size: int) -> int:
    """Return the number of segments that Gloo's ring makes of each rank's part of ``size`` bytes.

    Example:
        >>> ring_segments(1 << 10, 4), ring_segments(25 << 20, 4)
        (2, 7)
    """
    return _ceil(max(_ceil(size, SEGMENT_BYTES), 2 * world_size), world_size)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def op_delays(op: Op, world_size: int) -> int:
    """Return the delays of one operation that all ranks begin at the same time."""
    size = world_size if op.scope is None else op.scope.place(0)[1]
    if isinstance(op, SendRecv):
        # Whether or not this rank has a peer: another one has, and the next operation waits for it.
        return 0 if _inside(op) else 1
    return latest(*_execute([op] * size, [Moment()] * size)).at


def count_delays(plan: BucketPlan, numel: int, world_size: int, round: int = USUAL_ROUND) -> Delays:
    """Count the one-way delays on the critical path of one bucket, by a dry run.

    The work at the end of a round (:meth:`BucketPlan.finish`) is left out: it goes on beside the training.

    Args:
        plan: A plan made with the ``meta`` kernels.
        numel: Elements of the bucket.
        world_size: Number of ranks.
        round: See :func:`gradwire.exchange.drivers.dry_run`.
    """
    return count_step_delays([(plan, numel)], world_size, round)


def count_step_delays(
    buckets: Sequence[tuple[BucketPlan, int]],
    world_size: int,
    round: int = USUAL_ROUND,
    *,
    lanes: int = LANES,
) -> Delays:
    """Count the one-way delays on the critical path of a step whose buckets are all ready at its beginning.

    Jobs go to lanes as in a link: bucket i to lane i mod ``lanes``, and its chunks to the lanes after it. A lane runs
    one job after the other. Large rows wait for those of other jobs to be sent, which takes no delay. Plans that use no
    lane's thread run two at a time on each lane.

    Args:
        buckets: A plan made with the ``meta`` kernels, and the number of elements, of each bucket.
        world_size: Number of ranks.
        round: See :func:`gradwire.exchange.drivers.dry_run`.
        lanes: Number of lanes.
    """
    try:
        return _Step(buckets, world_size, 1, round, lanes).run()
    except _Unequal:
        return _Step(buckets, world_size, world_size, round, lanes).run()


class _Unequal(Exception):
    """Ranks may take different times: simulate all of them."""


class _Step:
    """The moments of a step on the ranks that are simulated: one for all, or all."""

    def __init__(
        self, buckets: Sequence[tuple[BucketPlan, int]], world_size: int, simulated: int, round: int, lanes: int
    ) -> None:
        self._buckets, self._world_size, self._lanes = buckets, world_size, lanes
        self._round, self._ranks = round, range(simulated)
        self._start = [Moment()] * simulated
        # When each slot of a lane is free.
        self._free: dict[tuple[int, int], list[Moment]] = {}
        self._now = self._start

    def run(self) -> Delays:
        """Run all jobs in the order of their submission, which no job's wait breaks: it waits for earlier ones."""
        end = self._start
        for bucket, (plan, numel) in enumerate(self._buckets):
            flat = torch.empty(numel, dtype=plan.dtype, device="meta")
            own = [
                Context(rank, self._world_size, self._round, bucket, workspace=Workspace("meta"))
                for rank in self._ranks
            ]
            slots = GLOO_THREADS if plan.asynchronous else 1
            prepared = self._job([plan.prepare(c, flat) for c in own], bucket, self._start, slots)
            began = self._now
            ends = [began]
            for chunk in range(plan.chunks):
                jobs = [plan.run(replace(c, chunk=chunk), flat, before) for c, before in zip(own, prepared)]
                self._job(jobs, bucket + chunk, self._start if plan.asynchronous else began, slots)
                ends.append(self._now)
            end = [latest(*moments) for moments in zip(end, *ends)]
        return Delays(dict(latest(*end).path))

    def _job(self, generators: Sequence[Exchange[T]], lane: int, began: Sequence[Moment], slots: int) -> list[T]:
        """Run a job of all ranks in the slot of a lane that is free first; its end is in ``_now``."""
        free = {(lane % self._lanes, slot): self._start for slot in range(slots)} | self._free
        slot = min(((lane % self._lanes, slot) for slot in range(slots)), key=lambda key: latest(*free[key]).at)
        self._now = [latest(*pair) for pair in zip(began, free[slot])]
        results = in_lockstep(generators, self._execute) if len(generators) > 1 else self._alone(generators[0])
        self._free[slot] = self._now
        return results

    def _alone(self, generator: Exchange[T]) -> list[T]:
        try:
            op = next(generator)
            while True:
                if isinstance(op, Broadcast | SendRecv) or op.scope is not None:
                    raise _Unequal
                (reply,) = self._execute([0], [op])
                op = generator.send(reply)
        except StopIteration as stop:
            return [stop.value]
        finally:
            generator.close()

    def _execute(self, ranks: Sequence[int], ops: Sequence[Op]) -> list[torch.Tensor]:
        began = [self._now[rank] for rank in ranks]
        ended = _execute(list(ops) * (self._world_size if len(self._ranks) == 1 else 1), began)
        for rank, moment in zip(ranks, ended):
            self._now[rank] = moment
        return [_reply(op) for op in ops]


def _inside(op: Op) -> bool:
    """Return whether an operation stays within a machine, where a message takes no delay of the network."""
    return op.scope is not None and op.scope.local


def _reply(op: Op) -> torch.Tensor:
    if isinstance(op, Reduce | Broadcast):
        return op.value
    if op.arrived is not None and op.lengths is not None:
        op.arrived.copy_(op.lengths)
    return op.recv


def _execute(ops: Sequence[Op], began: Sequence[Moment]) -> list[Moment]:
    """Return when each rank of a group has ended an operation that they began at these moments.

    With fewer moments than operations the ranks have begun together, and so end together.
    """
    first = ops[0]
    if _inside(first) or len(ops) == 1:
        return [latest(*began)] * len(began)
    if isinstance(first, Reduce):
        if gathers(first):
            return _all_to_all(began, "agreement")
        phase = "sum" if first.op == "sum" else "agreement"
        return _ring(first.value.numel(), first.value.element_size(), len(ops), began, phase)
    if isinstance(first, Broadcast):
        now = began
        if first.length is not None:
            now = _broadcast(now, first.root, "lengths")
        return _broadcast(now, first.root, "broadcast")
    if isinstance(first, SendRecv):
        return _swap([op for op in ops if isinstance(op, SendRecv)], began, "neighbours")
    return _all_to_all(began, "rows to each" if isinstance(first, AllToAll) else "rows to all")


def _together(began: Sequence[Moment]) -> bool:
    return len({moment.at for moment in began}) == 1


def _all_to_all(began: Sequence[Moment], phase: str) -> list[Moment]:
    """All rows have been requested before, and leave at once."""
    if _together(began):
        return [moment.later(phase) for moment in began]
    arrived = [moment.later(phase) for moment in began]
    return [latest(own, *(a for rank, a in enumerate(arrived) if rank != to)) for to, own in enumerate(began)]


def _swap(ops: Sequence[SendRecv], began: Sequence[Moment], phase: str) -> list[Moment]:
    ended = list(began)
    for rank, op in enumerate(ops):
        if op.to is not None:
            ended[op.to] = latest(ended[op.to], began[rank].later(phase))
    return ended


def _broadcast(began: Sequence[Moment], root: int, phase: str) -> list[Moment]:
    """With ranks counted from the root on, v receives from v without its highest bit; it asks at the beginning."""
    n = len(began)
    ended = list(began)
    have = {0: began[root]}
    for place in range(1, n):
        parent, rank = place - (1 << place.bit_length() - 1), (root + place) % n
        left = latest(have[parent], began[rank].later(phase))
        have[place] = left.later(phase)
        sender = (root + parent) % n
        ended[sender] = latest(ended[sender], left)
        ended[rank] = latest(ended[rank], have[place])
    return ended


def _ring(numel: int, width: int, n: int, began: Sequence[Moment], phase: str) -> list[Moment]:
    """Both halves of Gloo's ring: in each, a segment is posted when the one two places before was sent and received."""
    size = numel * width
    per_rank = ring_segments(size, n)
    segments = per_rank * n
    segment = _ceil(_ceil(size, segments), width) * width
    full = (segments - 1) * segment < size
    if not full and len(began) < n:
        raise _Unequal
    if full and _together(began):
        # Every rank has a segment in every place, so that all stay together, and two places take a round trip.
        return [moment.later(phase, 4 * _ceil(segments - per_rank, 2)) for moment in began]
    starts = np.array([moment.at for moment in began])
    filled = _ceil(size, segment) if segment else 0
    if _together(began):
        at, source = _ring_from_rest(n, per_rank, filled)
        at = at + starts
    else:
        at, source = _ring_of_some(starts, per_rank, filled)
    return [began[s].later(phase, delays) for s, delays in zip(source.tolist(), (at - starts[source]).tolist())]


_Times: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Times of all ranks in delays, and the rank at whose start the longest path to each begins."""


@lru_cache(maxsize=64)
def _ring_from_rest(n: int, per_rank: int, filled: int) -> _Times:
    return _ring_of_some(np.zeros(n, np.int64), per_rank, filled)


def _ring_of_some(starts: npt.NDArray[np.int64], per_rank: int, filled: int) -> _Times:
    """Return when each rank has ended a ring of which only the first ``filled`` segments have bytes to send."""
    ended = starts, np.arange(len(starts))
    for first in (1, 0):
        ended = _half_ring(ended, first, per_rank, filled)
    return ended


def _half_ring(began: _Times, first: int, per_rank: int, filled: int) -> _Times:
    """Rank r sends its segments to rank r - 1, from that of rank r + ``first`` on.

    Each place is worked out for all ranks at once, since there are twice as many places as ranks.
    """
    n = len(began[0])
    start = (np.arange(n) + first) * per_rank
    last = np.arange(n) == n - 1
    now = began
    # When each rank's messages of two places before had been sent and received.
    before = [began, began]
    for place in range(per_rank * (n - 1)):
        now = _latest(now, before[place % 2])
        sends = (start + place) % (per_rank * n) < filled
        receives = np.roll(sends, -1)
        left = _latest(now, (np.roll(now[0], 1) + 1, np.roll(now[1], 1)))
        arrived = np.roll(left[0], -1) + 1, np.roll(left[1], -1)
        # Of equal times the first stays: the last rank receives before it sends, the others after.
        done = _latest(now, arrived, receives & last)
        done = _latest(done, left, sends)
        before[place % 2] = _latest(done, arrived, receives)
    return _latest(_latest(now, before[0]), before[1])


def _latest(one: _Times, other: _Times, where: npt.NDArray[np.bool_] | bool = True) -> _Times:
    """Return the later of two times of each rank, or the first where both are equal or ``where`` is false."""
    later = where & (other[0] > one[0])
    return np.where(later, other[0], one[0]), np.where(later, other[1], one[1])
