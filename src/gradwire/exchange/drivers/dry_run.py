"""Sizes only: what a plan would send, without data, kernels or a group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch

from gradwire.exchange.drivers.traffic import Meter, broadcast_sends, gathers, large, op_bytes
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.ops import AllToAll, Broadcast, Exchange, Op, Reduce, Scope, SendRecv
from gradwire.exchange.protocols import Context, Memory, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.wire import pretend_senders

USUAL_ROUND = -1
"""A round in which nothing is exchanged that a schedule asks for in some rounds alone."""


def dry_run(plan: BucketPlan, numel: int, world_size: int, round: int = USUAL_ROUND, rank: int = 0) -> Meter:
    """Walk a plan made with the ``meta`` kernels and count its bytes for one rank and one round.

    Exact, but for rows whose length depends on what they hold: those count with the most that they may take.

    Args:
        round: By default one of those between a schedule's updates; a round of the schedule counts with all that is
            exchanged in it, and at its end, as if the step were one bucket.
        rank: Whose bytes. Ranks differ in what they send of a broadcast: of those whose root changes with the round,
            rank 0 is the root of a usual round, which no other rank exceeds.
    """
    meter = Meter(rank)
    flat = torch.empty(numel, dtype=torch.float32, device="meta")
    context = Context(rank, world_size, round, workspace=Workspace("meta"))
    _drive(plan.whole(context, flat), world_size, meter)
    if plan.finishes:
        _drive(plan.finish(context), world_size, meter)
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
"""In the last stage of every schedule."""


T = TypeVar("T")

USUAL_LINK = LinkCost(message_s=5e-4, bytes_per_s=1e8)
"""Of a method that takes its choices by the link, where nobody says which: about 1 Gbit/s."""


@dataclass(frozen=True)
class Stage:
    """Local work, then an operation of the group; the last stage of a job has none (``kind`` is "").

    Attributes:
        work_s: Of this process alone on its core.
        kind: "all_to_all", "all_gather", "gather" (a small reduction that goes by one), "ring", "pairs" (large rows,
            one at a time, in turn between lanes), or "broadcast".
        sent_bytes: By one rank; of a broadcast by its root, for whose time all others wait.
        rounds: Messages that depend on one another.
        messages: That one rank sends.
        scope: Of the operation; None: it is among all ranks.
    """

    work_s: float
    kind: str = ""
    sent_bytes: int = 0
    rounds: int = 0
    messages: int = 0
    scope: Scope | None = None


class LocalProfiler:
    """One rank's rounds without a group, its replies made of its own payloads.

    Control flow never depends on values, so the operations are those of a real group, byte for byte.

    Args:
        plan: Made with kernels that compute.
        flat: A bucket of gradients, or anything like them; left as it is.
        link: What a message costs, for methods whose payloads depend on it.
    """

    def __init__(self, plan: BucketPlan, flat: torch.Tensor, world_size: int, *, link: LinkCost | None = None) -> None:
        self._link = link or USUAL_LINK
        self._plan, self._flat, self._world_size = plan, flat, world_size
        self._spaces, self._memory = [Workspace() for _ in range(plan.chunks + 1)], Memory()
        # Rounds so far apart that rank 0 is the root of all broadcasts whose root goes round: only a root has something
        # to send that it could receive.
        self._work, self._round = torch.empty_like(flat), LATE_ROUND - LATE_ROUND % world_size

    def play(self) -> list[list[Stage]]:
        """Run a round with one torch thread, as a worker does: with more, a cast waits for the pool.

        Returns:
            Stages of the whole bucket's preparation, then those of each chunk. In the first round, local work touches
            buffers that later ones find warm, and does what is done once.
        """
        with _one_thread():
            self._work.copy_(self._flat)
            context = Context(
                0, self._world_size, self._round, workspace=self._spaces[-1], memory=self._memory, link=self._link
            )
            prepared, first = _timed(self._plan.prepare(context, self._work), self._world_size)
            found = [first]
            for chunk in range(self._plan.chunks):
                own = replace(context, chunk=chunk, workspace=self._spaces[chunk])
                found.append(_timed(self._plan.run(own, self._work, prepared), self._world_size)[1])
            self._memory.commit()
            if self._plan.finishes:
                # Beside what follows the step, and in few rounds: nobody waits for it.
                _timed(self._plan.finish(context), self._world_size)
                self._memory.commit()
        self._round += self._world_size
        return found


def profile_locally(
    plan: BucketPlan, flat: torch.Tensor, world_size: int, repeats: int = 5, *, link: LinkCost | None = None
) -> tuple[list[Stage], list[list[Stage]]]:
    """Play a plan's round several times, and time what lies between operations.

    Args:
        plan: As for :class:`LocalProfiler`, with ``flat`` and ``link``.
        repeats: Beside a first, which does not count.

    Returns:
        Stages of the whole bucket's preparation, and those of each chunk; medians over repetitions.
    """
    rehearsal = LocalProfiler(plan, flat, world_size, link=link)
    runs = [rehearsal.play() for _ in range(repeats + 1)]
    first, *parts = [[_middle(stages) for stages in zip(*same)] for same in zip(*runs[1:])]
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


def _timed(generator: Exchange[T], world_size: int) -> tuple[T, list[Stage]]:
    stages: list[Stage] = []
    started = time.perf_counter()
    try:
        op = next(generator)
        while True:
            work_s = time.perf_counter() - started
            stages.append(Stage(work_s, *_shape(op, world_size), op.scope))
            reply = _echo(op)
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
    # Rows of different lengths are preceded by a message that tells them.
    told = int(not isinstance(op, Reduce) and op.lengths is not None)
    if isinstance(op, SendRecv):
        return "pairs" if large(op) else "all_to_all", sent, 1 + told, (1 + told) * (op.to is not None)
    if large(op):
        return "pairs", sent, others + told, others * (1 + told)
    kind = "gather" if isinstance(op, Reduce) else "all_to_all" if isinstance(op, AllToAll) else "all_gather"
    return kind, sent, 1 + told, others * (1 + told)


def _echo(op: Op) -> torch.Tensor:
    if isinstance(op, Reduce | Broadcast):
        return op.value
    own = op.send[0] if isinstance(op, AllToAll) else op.send
    reply = op.recv.copy_(own.expand_as(op.recv))
    if isinstance(op, SendRecv):
        pretend_senders(reply[None], first=op.source or 0, receiver=0)
    else:
        pretend_senders(reply)
    return reply
