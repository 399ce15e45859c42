"""One bucket of one round on its way through the lanes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.drivers import Job, Lane, WireError
from gradwire.errors import ExchangeError
from gradwire.ops import AllGather, Exchange
from gradwire.protocols import Context, Outcome, Workspace
from gradwire.protocols.bucket_plan import BucketPlan
from gradwire.runtime.failures import place
from gradwire.runtime.link_runtime import LinkRuntime
from gradwire.segments import Segment

__all__ = ["BucketExchange"]


class BucketExchange:
    """Jobs of one bucket: prepare, then each chunk in a lane chosen by index, then an optional check.

    Args:
        runtime: Of the link; gives contexts, and is told of the end or a failure.
        plan: How the bucket is exchanged.
        segments: The parameters in ``flat``.
        flat: The bucket, in its own dtype; holds the mean when ``future`` is done.
        bucket: Index of the bucket in its round, which is the link's current one.

    Attributes:
        future: Of ``flat``.
        finite: Whether the mean is finite; None where nobody looked.
    """

    def __init__(
        self,
        runtime: LinkRuntime,
        plan: BucketPlan,
        segments: Sequence[Segment],
        flat: torch.Tensor,
        bucket: int,
    ) -> None:
        self.runtime, self.plan, self.segments = runtime, plan, segments
        self.flat, self.bucket, self.round = flat, bucket, runtime.round
        self.work = flat if plan.keeps_dtype or flat.dtype == torch.float32 else flat.float()
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.finite: bool | None = True
        self._lock = threading.Lock()
        self._left = plan.chunks
        self._prepared: Any = None
        # What starts at once has no jobs that wait for each other. Two events would be a quarter of its overhead.
        self._starts_at_once = plan.asynchronous and not runtime.check
        self._events: tuple[threading.Event, ...] = (
            () if self._starts_at_once else (threading.Event(), threading.Event())
        )
        self._measured = runtime.diagnostics.wanted(self.round)
        self._gradient = self.work.clone() if self._measured else None
        self._sent = torch.zeros_like(self.work) if self._measured else None

    def start(self, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Hand the jobs to the lanes, in the same order and to the same lanes on every rank; return the future.

        Args:
            last: Whether the round ends with this bucket.
        """
        self.runtime.began(self.flat.numel(), last)
        self._submit(self.runtime.lanes)
        return self.future

    def _submit(self, lanes: Sequence[Lane]) -> None:
        first = lanes[self.bucket % len(lanes)]
        if self._starts_at_once:
            self._begin(lanes)
            return
        if self.plan.chunks == 1:
            first.submit(self._job(self._run_whole, 0))
        else:
            first.submit(self._job(self._prepare, None))
            for chunk in range(self.plan.chunks):
                lane = lanes[(self.bucket + chunk) % len(lanes)]
                lane.submit(self._job(partial(self._run_chunk, chunk), chunk))
        if self.runtime.check or not self.plan.chunks:
            first.submit(self._job(self._verify, None))

    def _context(self, chunk: int | None) -> Context:
        return self.runtime.context(self.plan, self.bucket, chunk, self.round, self._measured)

    @property
    def _is_prepared(self) -> threading.Event:
        return self._events[0]

    @property
    def _all_run(self) -> threading.Event:
        return self._events[1]

    def _begin(self, lanes: Sequence[Lane]) -> None:
        for chunk in range(self.plan.chunks):
            lane = lanes[(self.bucket + chunk) % len(lanes)]
            fail = partial(self._fail, chunk)
            try:
                lane.begin(self.plan.run(self._context(chunk), self.work, None), self._finish_chunk, fail)
            except Exception as error:
                fail(WireError(str(error)) if isinstance(error, RuntimeError) else error)

    def _job(self, run: Callable[[Lane], None], chunk: int | None) -> Job:
        def guarded(lane: Lane) -> None:
            self.runtime.failures.refuse()
            run(lane)

        label = f"bucket {self.bucket}" if chunk is None else f"bucket {self.bucket}, chunk {chunk}"
        return Job(guarded, partial(self._fail, chunk), label)

    def _fail(self, chunk: int | None, error: Exception) -> None:
        where = place(self.bucket, chunk, self.round, [s.parameter.name for s in self.segments])
        told = self.runtime.failures.record(error, where)
        for event in self._events:
            event.set()
        with self._lock:
            if not self.future.done():
                self.future.set_exception(told)  # type: ignore[arg-type]

    def _run_whole(self, lane: Lane) -> None:
        self._prepared = lane.drive(self.plan.prepare(self._context(None), self.work))
        self._finish_chunk(lane.drive(self.plan.run(self._context(0), self.work, self._prepared)))

    def _prepare(self, lane: Lane) -> None:
        self._prepared = lane.drive(self.plan.prepare(self._context(None), self.work))
        self._is_prepared.set()

    def _run_chunk(self, chunk: int, lane: Lane) -> None:
        # Waits for a job that was submitted before this one, never the other way round: no deadlock.
        self._is_prepared.wait()
        self.runtime.failures.refuse()
        self._finish_chunk(lane.drive(self.plan.run(self._context(chunk), self.work, self._prepared)))

    def _finish_chunk(self, outcome: Outcome) -> None:
        if outcome.sent is None:
            self._sent = None  # nothing to compare the gradient with
        elif self._sent is not None:
            outcome.sent(self._sent, 1.0)
        with self._lock:
            self.finite = None if None in (self.finite, outcome.finite) else self.finite and outcome.finite
            self._left -= 1
            if self._left:
                return
        if self.runtime.check:
            self._all_run.set()
        else:
            self._complete()

    def _verify(self, lane: Lane) -> None:
        if self.plan.chunks:
            self._all_run.wait()
            self.runtime.failures.refuse()
            lane.drive(_same_bits(self._context(None), self.work))
        self._complete()

    def _complete(self) -> None:
        if self.work is not self.flat:
            self.flat.copy_(self.work)
        if self._gradient is not None and self._sent is not None:
            context = self._context(None)
            self.plan.target_(context, self._gradient)
            measure = self.runtime.diagnostics.measure
            measure(self._gradient, self._sent, self.segments, self.round, context.loss_scale)
        self.runtime.ended(self.plan, self.round, self.finite)
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
