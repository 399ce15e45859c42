"""One bucket of one round on its way through the lanes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradwire.drivers import Job, Lane, WireError
from gradwire.errors import ExchangeError
from gradwire.ops import AllGather, Exchange
from gradwire.protocols import Context, Outcome, Workspace
from gradwire.protocols.bucket_plan import BucketPlan
from gradwire.runtime.diagnostics import Diagnostics
from gradwire.runtime.failures import Breakage, place
from gradwire.segments import Segment

__all__ = ["BucketExchange"]


@dataclass(eq=False)
class BucketExchange:
    """Jobs of one bucket: prepare, then each chunk in a lane of its own choosing by index, then an optional check.

    Attributes:
        flat: The bucket, in its own dtype; holds the mean when ``future`` is done.
        work: ``flat``, or its float32 copy.
        context: Makes the context of a chunk (None: of the whole bucket).
        ended: Called once, before the future is set.
    """

    plan: BucketPlan
    segments: Sequence[Segment]
    flat: torch.Tensor
    work: torch.Tensor
    bucket: int
    round: int
    context: Callable[[int | None], Context]
    breakage: Breakage
    diagnostics: Diagnostics
    check: bool
    ended: Callable[[BucketExchange], None]
    future: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    finite: bool | None = True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._left = self.plan.chunks
        self._prepared: Any = None
        self._is_prepared = threading.Event()
        self._all_run = threading.Event()
        wanted = self.diagnostics.wanted(self.round)
        self._gradient = self.work.clone() if wanted else None
        self._sent = torch.zeros_like(self.work) if wanted else None

    def submit(self, lanes: Sequence[Lane]) -> None:
        """Hand the jobs to the lanes; the order and the choice of lanes are the same on every rank."""
        first = lanes[self.bucket % len(lanes)]
        if self.plan.asynchronous and not self.check:
            self._begin(lanes)
            return
        if self.plan.chunks == 1:
            first.submit(self._job(self._run_whole, 0))
        else:
            first.submit(self._job(self._prepare, None))
            for chunk in range(self.plan.chunks):
                lane = lanes[(self.bucket + chunk) % len(lanes)]
                lane.submit(self._job(partial(self._run_chunk, chunk), chunk))
        if self.check or not self.plan.chunks:
            first.submit(self._job(self._verify, None))

    def _begin(self, lanes: Sequence[Lane]) -> None:
        for chunk in range(self.plan.chunks):
            lane = lanes[(self.bucket + chunk) % len(lanes)]
            fail = partial(self._fail, chunk)
            try:
                lane.begin(self.plan.run(self.context(chunk), self.work, None), self._finish_chunk, fail)
            except Exception as error:
                fail(WireError(str(error)) if isinstance(error, RuntimeError) else error)

    def _job(self, run: Callable[[Lane], None], chunk: int | None) -> Job:
        def guarded(lane: Lane) -> None:
            self.breakage.refuse()
            run(lane)

        return Job(guarded, partial(self._fail, chunk))

    def _fail(self, chunk: int | None, error: Exception) -> None:
        where = place(self.bucket, chunk, self.round, [s.parameter.name for s in self.segments])
        told = self.breakage.record(error, where)
        self._is_prepared.set()
        self._all_run.set()
        with self._lock:
            if not self.future.done():
                self.future.set_exception(told)  # type: ignore[arg-type]

    def _run_whole(self, lane: Lane) -> None:
        self._prepared = lane.drive(self.plan.prepare(self.context(None), self.work))
        self._finish_chunk(lane.drive(self.plan.run(self.context(0), self.work, self._prepared)))

    def _prepare(self, lane: Lane) -> None:
        self._prepared = lane.drive(self.plan.prepare(self.context(None), self.work))
        self._is_prepared.set()

    def _run_chunk(self, chunk: int, lane: Lane) -> None:
        # Waits for a job that was submitted before this one, never the other way round: no deadlock.
        self._is_prepared.wait()
        self.breakage.refuse()
        self._finish_chunk(lane.drive(self.plan.run(self.context(chunk), self.work, self._prepared)))

    def _finish_chunk(self, outcome: Outcome) -> None:
        if outcome.sent is not None and self._sent is not None:
            outcome.sent(self._sent, 1.0)
        with self._lock:
            self.finite = None if None in (self.finite, outcome.finite) else self.finite and outcome.finite
            self._left -= 1
            if self._left:
                return
        if self.check:
            self._all_run.set()
        else:
            self._complete()

    def _verify(self, lane: Lane) -> None:
        if self.plan.chunks:
            self._all_run.wait()
            self.breakage.refuse()
            lane.drive(_same_bits(self.context(None), self.work))
        self._complete()

    def _complete(self) -> None:
        if self.work is not self.flat:
            self.flat.copy_(self.work)
        if self._gradient is not None and self._sent is not None:
            self.diagnostics.measure(self._gradient, self._sent, self.segments, self.round)
        self.ended(self)
        self.future.set_result(self.flat)


def _same_bits(context: Context, flat: torch.Tensor) -> Exchange[None]:
    """Compare a checksum of the mean over ranks.

    Raises:
        ExchangeError: naming the ranks whose bits differ from rank 0's.
    """
    digest = zlib.crc32(flat.view(torch.uint8).numpy().data)
    mine = torch.tensor([digest], dtype=torch.int64).view(torch.uint8)
    workspace = Workspace()
    rows = yield AllGather(mine, workspace.get("check", context.world_size, 8))
    found = rows.contiguous().view(torch.int64).flatten().tolist()
    wrong = [rank for rank, value in enumerate(found) if value != found[0]]
    if wrong:
        raise ExchangeError(f"check: the mean of ranks {wrong} differs in its bits from rank 0's")
