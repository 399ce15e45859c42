"""A round of a link, from its first bucket to the commit of the method's state."""

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
"""Future of a bucket, which is done when the bucket holds its mean over ranks."""


class Round:
    """One round of a link: one synchronised backward pass.

    A link makes one at the first bucket of a round, and drops it when the next one begins:

    1. Buckets are counted when they start and when they have been exchanged (:meth:`began`, :meth:`ended`).
    2. After the last one the round is over: the method's new state is committed, or discarded if a value was not
       finite. If payloads are on a device, their checks are read there later, when needed (:meth:`settle`,
       :meth:`look`).
    3. The work of a plan at the end of a round is done by a lane. The next round begins when that has ended.

    Rounds do not overlap: backward waits for all buckets of a round, and the first bucket of the next waits for its
    end.

    Args:
        runtime: The parts that all rounds of the link share.
        learning_rates: Learning rates of the following step, by name; None if the method does not use them.

    Attributes:
        number: Number of the round, counted from 0 over all rounds of the link.
        measured: True if errors of the vectors sent are measured.
        skipped: True if a value was not finite and the method checks for it, or out of its range: no state is
            committed.
    """

    def __init__(self, runtime: LinkRuntime, learning_rates: Mapping[str, float] | None = None) -> None:
        self.runtime, self.number = runtime, runtime.round
        runtime.memory.begin()
        self.measured, self.skipped = runtime.diagnostics.wanted(self.number), False
        self._learning_rates = learning_rates
        self._loss_scale: float | None = None
        self._parts = RoundParts()
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._in_flight, self._is_last = 0, False
        self._latest: BucketPlan | None = None
        # On a device: whether the means are finite so far, and, at the end of the round, the flags to read.
        self._finite: Flag | None = True
        self._verdict: Verdict | None = None
        self._broke_late = False
        self._finishing: Future[None] | None = None

    # ------------------------------------------------------------------ buckets

    def context(self, plan: BucketPlan, bucket: int, chunk: int | None, wants_sent: bool = False) -> Context:
        """Return the context of a protocol that exchanges a chunk (None: prepares the whole bucket)."""
        runtime = self.runtime
        if self._loss_scale is None:
            # Reading a scaler on a device waits. The value does not change within a round, so that two lanes that read
            # it at the same time get the same.
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
        """Count a bucket of ``numel`` elements that is about to be exchanged; the ``last`` one ends the round."""
        with self._lock:
            self._in_flight += 1
            self._is_last = last
        self.runtime.count(numel)

    def leave(self, flat: torch.Tensor, last: bool) -> Mean:
        """Count a bucket of a single rank, and return a future of it, since it is its own mean."""
        self._is_last = last
        self.runtime.count(flat.numel())
        return as_it_is(flat)

    def ended(self, plan: BucketPlan, finite: Flag | None) -> None:
        """Count a bucket that has been exchanged, and conclude the round if it was the last one in flight."""
        with self._lock:
            if isinstance(finite, torch.Tensor):
                self._finite = both(self._finite, finite)
            elif finite is False:
                self.skip()
            self._in_flight -= 1
            self._latest = plan
            is_over = self._is_last and not self._in_flight
        if is_over:
            self._end(plan)

    def end(self) -> None:
        """End a round after all of its buckets have been exchanged, if none was passed as the last one."""
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
        """Wait for the end of the round, if all of its buckets have been exchanged.

        Call it before the next round begins, and before the results of this one are read.

        Raises:
            ExchangeError: a payload on a device changed in transit.
        """
        with self._settling:
            self._read_verdict()
            # The end of the round may have been submitted to a lane.
            self.wait()
            if self._broke_late:
                self.runtime.failures.refuse()

    def wait(self) -> None:
        """Wait for the work of a lane at the round's end, which counts bytes."""
        if self._finishing is not None:
            self._finishing.wait()

    def look(self, *, wait: bool = False) -> None:
        """Read the checks of the round on a device, if it has finished them; with ``wait``, wait until it has."""
        # A link that is collected is closed on any thread, also on one that ends its round.
        if self._settling.acquire(blocking=False):
            try:
                if self._verdict is not None and (wait or self._verdict.reached()):
                    self._read_verdict()
            except GradwireError:
                pass  # it is recorded as the link's error
            finally:
                self._settling.release()

    def _end(self, plan: BucketPlan) -> None:
        checks = self.runtime.checks
        if not isinstance(checks, LateChecks):
            self._conclude(plan)
            return
        with self._settling:
            self._verdict = Verdict(self.runtime.device, self._finite, checks)
            self.runtime.unread = self
            if plan.finishes:
                self._read_verdict()

    def _read_verdict(self) -> None:
        verdict, self._verdict = self._verdict, None
        if verdict is None or self._latest is None:
            return
        self.runtime.unread = None
        try:
            finite = verdict.read()
        except GradwireError as error:
            self._broke_late = True
            raise self.runtime.failures.record(error, f"the end of round {self.number}") from None
        if not finite:
            with self._lock:
                self.skip()
        self._conclude(self._latest)

    def skip(self) -> None:
        """Count the round as skipped, unless it has been."""
        if not self.skipped:
            self.skipped = True
            self.runtime.skipped_rounds += 1
            self.runtime.diagnostics.discount(self.number)

    def _conclude(self, plan: BucketPlan) -> None:
        # The new state is valid only if all of the round was finite.
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
        """Submit the end of a round to a lane.

        All jobs of the round have ended, and no job of the next is submitted before this one has (:meth:`settle`). So
        it has the same place among the lane's jobs on every rank, whichever thread submits it.
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
