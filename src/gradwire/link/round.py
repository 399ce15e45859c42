"""A round of a link, from its first bucket to the commit of what the method remembers of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from gradwire.errors import GradwireError
from gradwire.exchange.deferred_checks import Flag, both
from gradwire.exchange.drivers import Future, LateChecks, Verdict
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, RoundParts
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.link.found_optimizers import scale_of
from gradwire.link.link_runtime import LinkRuntime

Mean = torch.futures.Future[torch.Tensor]
"""Of a bucket, once it holds its mean over ranks."""


class Round:
    """One round of a link: one synchronised backward pass.

    A link makes one when a round's first bucket comes, and drops it when the next one begins:

    1. Buckets are counted when they start and when they have been exchanged (:meth:`began`, :meth:`ended`).
    2. With the last one the round is over: what the method remembers of it is committed, or discarded where a value was
       not finite. Payloads that lie on a device leave a verdict, which is read when somebody needs to know
       (:meth:`settle`, :meth:`look`).
    3. What a plan does at the end of a round goes to a lane. The next round begins when that has ended.

    Rounds do not overlap: backward waits for all buckets of one, and the first bucket of the next for its end.

    Args:
        runtime: What all rounds of the link share.
        learning_rates: Of the step that follows, by name; None where the method need not know.

    Attributes:
        number: Of the round: those of the link so far.
        measured: Whether errors of what is sent are measured.
        skipped: Whether a value was not finite, where the method looks, or out of its range: nothing is committed.
    """

    def __init__(self, runtime: LinkRuntime, learning_rates: Mapping[str, float] | None = None) -> None:
        self.runtime, self.number = runtime, runtime.round
        self.measured, self.skipped = runtime.diagnostics.wanted(self.number), False
        self._learning_rates = learning_rates
        self._loss_scale: float | None = None
        self._parts = RoundParts()
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._in_flight, self._is_last = 0, False
        self._latest: BucketPlan | None = None
        # On a device: whether the means are finite so far, and, once all of them are, what is left to read.
        self._finite: Flag | None = True
        self._verdict: Verdict | None = None
        self._broke_late = False
        self._finishing: Future[None] | None = None

    # ------------------------------------------------------------------ buckets

    def context(self, plan: BucketPlan, bucket: int, chunk: int | None, wants_sent: bool = False) -> Context:
        """Return what a protocol may know while it exchanges a chunk (None: prepares the whole bucket)."""
        runtime = self.runtime
        if self._loss_scale is None:
            # Of a scaler on a device this is a value to wait for, and it stays as it is for a round. Where two lanes
            # ask at the same time, both get it.
            self._loss_scale = scale_of(runtime.grad_scaler)
        return Context(
            rank=runtime.rank,
            world_size=runtime.world_size,
            round=self.number,
            bucket=bucket,
            chunk=chunk or 0,
            workspace=runtime.workspace(plan, chunk),
            wants_sent=wants_sent,
            memory=runtime.memory,
            loss_scale=self._loss_scale,
            warn=runtime.warnings.once,
            warn_here=runtime.warnings.here,
            gauge=runtime.gauges.add,
            parts=self._parts,
            learning_rates=self._learning_rates,
            link=runtime.link_cost,
            checks=runtime.checks,
        )

    def began(self, numel: int, last: bool) -> None:
        """Count a bucket of so many elements that is about to be exchanged; the ``last`` one ends the round."""
        with self._lock:
            self._in_flight += 1
            self._is_last = last
        self.runtime.count(numel)

    def leave(self, flat: torch.Tensor, last: bool) -> Mean:
        """Count a bucket of the only rank, and return a future of it: it is its own mean."""
        self._is_last = last
        self.runtime.count(flat.numel())
        return as_it_is(flat)

    def ended(self, plan: BucketPlan, finite: Flag | None) -> None:
        """Count a bucket that has been exchanged, and conclude the round if it was the last one in flight."""
        with self._lock:
            if isinstance(finite, torch.Tensor):
                self._finite = both(self._finite, finite)
            elif finite is False:
                self._skip()
            self._in_flight -= 1
            self._latest = plan
            is_over = self._is_last and not self._in_flight
        if is_over:
            self._end(plan)

    def end(self) -> None:
        """End a round of which no bucket was said to be the last one; all of them have been exchanged."""
        with self._lock:
            if self._is_last or (self._latest is None and self.runtime.world_size > 1):
                return
            self._is_last = True
        if self._latest is not None:
            with self.runtime.device.stream():
                self._end(self._latest)
        self.runtime.next_round()

    # ------------------------------------------------------------------ the end

    def settle(self) -> None:
        """Wait until the round has come to its end, if all of its buckets have been exchanged.

        To be called before the next one begins, and before what a round leaves is looked at.

        Raises:
            ExchangeError: what arrived in it on a device was not what was sent.
        """
        with self._settling:
            self._read_verdict()
            # It may have handed the round's end to a lane.
            self.wait()
            if self._broke_late:
                self.runtime.failures.refuse()

    def wait(self) -> None:
        """Wait for what a lane does at the round's end, which counts bytes."""
        if self._finishing is not None:
            self._finishing.wait()

    def look(self) -> None:
        """Read what a device has to say of the round, if it has ended it; waits for nothing."""
        if self._settling.acquire(blocking=False):
            try:
                if self._verdict is not None and self._verdict.reached():
                    self._read_verdict()
            except GradwireError:
                pass  # which is then the link's
            finally:
                self._settling.release()

    def _end(self, plan: BucketPlan) -> None:
        checks = self.runtime.checks
        if not isinstance(checks, LateChecks):
            self._conclude(plan)
            return
        with self._settling:
            self._verdict = Verdict(self.runtime.device, self._finite, checks)
            if plan.finishes:
                self._read_verdict()

    def _read_verdict(self) -> None:
        verdict, self._verdict = self._verdict, None
        if verdict is None or self._latest is None:
            return
        try:
            finite = verdict.read()
        except GradwireError as error:
            self._broke_late = True
            raise self.runtime.failures.record(error, f"the end of round {self.number}") from None
        if not finite:
            with self._lock:
                self._skip()
        self._conclude(self._latest)

    def _skip(self) -> None:
        if not self.skipped:
            self.skipped = True
            self.runtime.skipped_rounds += 1
            self.runtime.diagnostics.discount(self.number)

    def _conclude(self, plan: BucketPlan) -> None:
        # What a round would remember holds only where all of the round was finite.
        runtime = self.runtime
        runtime.memory.discard() if self.skipped else runtime.memory.commit()
        runtime.gauges.end_round(skipped=self.skipped)
        if not self.skipped:
            if runtime.judge is not None:
                runtime.judge.look(runtime.memory, self.number)
            if plan.finishes:
                self._finish(plan)
                return
        self._parts.take()

    def _finish(self, plan: BucketPlan) -> None:
        """Hand the end of a round to a lane.

        All jobs of the round have ended, and none of the next is submitted before this one has, see :meth:`settle`: so
        it has the same place among the lane's jobs on every rank, whichever thread brings it.
        """
        runtime, context = self.runtime, self.context(plan, 0, None)

        def finish() -> Exchange[None]:
            with runtime.device.stream():
                yield from plan.finish(context)

        def fail(error: Exception) -> None:
            runtime.failures.record(error, f"the end of round {self.number}")

        self._finishing = runtime.lanes[0].run(
            finish(),
            "end of the round",
            wait=runtime.failures.refuse,
            then=lambda _: runtime.memory.commit(),
            fail=fail,
        )


def as_it_is(flat: torch.Tensor) -> Mean:
    """Return a future of a bucket that is not exchanged."""
    future: Mean = torch.futures.Future()
    future.set_result(flat)
    return future
