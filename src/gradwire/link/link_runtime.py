"""What the exchanges of one link share: lanes, memory, failures, measurements, and the count of rounds."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.errors import GradwireError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks, Flag, both
from gradwire.exchange.drivers import Device, Future, HostDevice, Lane, LateChecks, Traffic, Verdict, dense_bytes
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Gauges, Memory, RoundParts, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.link.diagnostics import Diagnostics, Judge
from gradwire.link.failures import Failures, WarnOnce
from gradwire.link.found_optimizers import scale_of
from gradwire.link.peers.circle import Circle


@dataclass(frozen=True)
class _EndedRound:
    """A round whose last bucket has been handed to the device, which has not ended it yet."""

    verdict: Verdict
    plan: BucketPlan
    round: int


class LinkRuntime:
    """Lanes, memory, failures, measurements and counts of one link.

    A :class:`~gradwire.link.link.Link` decides by which plan a bucket travels. Each
    :class:`~gradwire.link.bucket_exchange.BucketExchange` runs on what is here, and reports its end here. This class
    knows nothing of methods, options or frameworks.

    Args:
        lanes: Of the link; the order of jobs is the same on every rank.
        circle: The ranks of the link.
        diagnostics: Takes the errors of what is sent.
        grad_scaler: Whose scale is in the gradients; None or False for gradients that are not scaled.
        check: Whether to verify after each bucket that all ranks hold the same bits.
        passes: Of the ring that exchanges are compared with: 2 of an all-reduce, 1 of a reduce-scatter.
        device: That buckets lie on; main memory if None.
        staged: Whether they are copied from there to main memory, and exchanged there.
        warnings: Of the link; a rank's own by default.
        judge: Looks at the end of rounds that are measured; None: nobody does.
        checks: Told whether what arrives is as it was sent; where payloads lie on a device, a
            :class:`gradwire.exchange.drivers.LateChecks`.

    Attributes:
        ranks: Global numbers of the link's ranks, for people.
        round: Synchronised backward passes so far, also those before a checkpoint.
        rounds_here: Rounds that were exchanged in this process.
        skipped_rounds: Rounds with a non-finite value, where the method looks, or one out of its range.
        last_skipped: The last of them, of which nothing was committed; -1 before there is one.
        memory: What the method remembers on this rank.
        failures: The first failure, if there is one.
        warnings: Warnings that were given.
        gauges: What the method reports of its rounds.
        link_cost: What a message costs; None where the method need not know.
        learning_rates: Of the step that follows the current round, by name; None where the method need not know.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        circle: Circle,
        diagnostics: Diagnostics,
        *,
        grad_scaler: Any,
        check: bool,
        passes: int = 2,
        device: Device | None = None,
        staged: bool = False,
        checks: Checks = AT_ONCE,
        warnings: WarnOnce | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.lanes, self.check, self._passes = lanes, check, passes
        self.device, self.staged, self.checks = device or HostDevice(), staged, checks
        self._room = "cpu" if staged else self.device.name
        self.rank, self.world_size, self.ranks = circle.place, circle.world_size, circle.ranks
        self.round = self.rounds_here = self.skipped_rounds = 0
        self.memory, self.gauges, self._parts = Memory(self._room), Gauges(), RoundParts()
        self.link_cost: LinkCost | None = None
        self.learning_rates: Mapping[str, float] | None = None
        self.failures = Failures(circle, lanes)
        self.diagnostics, self.warnings = diagnostics, warnings or WarnOnce()
        self._judge, self._grad_scaler = judge, grad_scaler
        self._lock = threading.Lock()
        self.last_skipped, self._elements = -1, 0
        self._in_flight, self._is_last = 0, False
        self._unended = False
        self._latest: BucketPlan | None = None
        self._scaled_round, self._loss_scale = -1, 1.0
        self._finishing: Future[None] | None = None
        # On a device: whether the round's means are finite so far, and what is left of the last round that ended.
        self._finite: Flag | None = True
        self._pending: _EndedRound | None = None
        self._broke_late = False
        self._settling = threading.Lock()
        self._spaces: weakref.WeakKeyDictionary[BucketPlan, dict[int | None, Workspace]] = weakref.WeakKeyDictionary()

    def began(self, numel: int, last: bool) -> None:
        """Count a bucket of so many elements that is about to be exchanged; the ``last`` one ends the round."""
        with self._lock:
            self._in_flight += 1
            self._is_last = last
            self._elements += numel

    def kept(self, numel: int) -> None:
        """Count elements of a step that exchanged none of them."""
        with self._lock:
            self._elements += numel

    def next_round(self) -> None:
        """Count a round whose buckets have all been started."""
        self.round += 1
        self.rounds_here += 1

    def leave(self, flat: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Count a bucket of the only rank, and return a future of it: it is its own mean."""
        with self._lock:
            self._elements += flat.numel()
            self._unended = not last
        if last:
            self.next_round()
        return as_it_is(flat)

    def context(self, plan: BucketPlan, bucket: int, chunk: int | None, round: int, wants_sent: bool) -> Context:
        """Return what a protocol may know while it exchanges a chunk (None: prepares the whole bucket)."""
        if self._scaled_round != round:
            # Of a scaler on a device this is a value to wait for, and it stays as it is for a round. Where two lanes
            # ask at the same time, both get it.
            self._loss_scale = scale_of(self._grad_scaler)
            self._scaled_round = round
        with self._lock:
            spaces = self._spaces.get(plan)
            if spaces is None:
                spaces = self._spaces[plan] = {}
            space = spaces.get(chunk)
            if space is None:
                space = spaces[chunk] = Workspace(self._room)
        return Context(
            rank=self.rank,
            world_size=self.world_size,
            round=round,
            bucket=bucket,
            chunk=chunk or 0,
            workspace=space,
            wants_sent=wants_sent,
            memory=self.memory,
            loss_scale=self._loss_scale,
            warn=self.warnings.once,
            warn_here=self.warnings.here,
            gauge=self.gauges.add,
            parts=self._parts,
            learning_rates=self.learning_rates,
            link=self.link_cost,
            checks=self.checks,
        )

    def ended(self, plan: BucketPlan, round: int, finite: Flag | None) -> None:
        """Count a bucket that has been exchanged, and commit or discard what the method remembers of the round.

        Rounds do not overlap: backward waits for all its buckets, and the next one for what a plan does at the end.
        """
        with self._lock:
            if isinstance(finite, torch.Tensor):
                self._finite = both(self._finite, finite)
            elif finite is False:
                self._skip(round)
            self._in_flight -= 1
            self._latest = plan
            is_over = self._is_last and not self._in_flight
        if is_over:
            self._end(plan, round)

    def end_round(self) -> None:
        """End a round of which no bucket was said to be the last one; all of them have been exchanged."""
        with self._lock:
            plan, self._latest = self._latest, None
            unended, self._unended = self._unended or plan is not None, False
        if plan is not None:
            with self.device.stream():
                self._end(plan, self.round)
        if unended:
            self.next_round()

    def settle(self) -> None:
        """Wait until the last round has come to its end.

        To be called before the next one begins, and before what a round leaves is looked at.

        Raises:
            ExchangeError: what arrived in it on a device was not what was sent.
        """
        with self._settling:
            self._read_verdict()
            # It may have handed the round's end to a lane.
            self._wait_for_finish()
            if self._broke_late:
                self.failures.refuse()

    def _wait_for_finish(self) -> None:
        if self._finishing is not None:
            self._finishing.wait()

    def told(self) -> Exception | None:
        """Return the link's error, if it has one by now, to be raised or kept by others; waits for nothing."""
        if self._settling.acquire(blocking=False):
            try:
                if self._pending is not None and self._pending.verdict.reached():
                    self._read_verdict()
            except GradwireError:
                pass  # which is then the link's
            finally:
                self._settling.release()
        return self.failures.told()

    def _end(self, plan: BucketPlan, round: int) -> None:
        if isinstance(self.checks, LateChecks):
            with self._settling:
                finite, self._finite = self._finite, True
                self._pending = _EndedRound(Verdict(self.device, finite, self.checks), plan, round)
                if plan.finishes:
                    self._read_verdict()
        else:
            self._conclude(plan, round)

    def _read_verdict(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            finite = pending.verdict.read()
        except GradwireError as error:
            self._broke_late = True
            raise self.failures.record(error, f"the end of round {pending.round}") from None
        if not finite:
            with self._lock:
                self._skip(pending.round)
        self._conclude(pending.plan, pending.round)

    def _skip(self, round: int) -> None:
        if round != self.last_skipped:
            self.last_skipped = round
            self.skipped_rounds += 1
            self.diagnostics.discount(round)

    def _conclude(self, plan: BucketPlan, round: int) -> None:
        # What a round would remember holds only where all of the round was finite.
        is_skipped = self.last_skipped == round
        self.memory.discard() if is_skipped else self.memory.commit()
        self.gauges.end_round(skipped=is_skipped)
        if self._judge is not None and not is_skipped:
            self._judge.look(self.memory, round)
        if plan.finishes and not is_skipped:
            self._finish(plan, round)
        else:
            self._parts.take()

    def _finish(self, plan: BucketPlan, round: int) -> None:
        """Hand the end of a round to a lane.

        All jobs of the round have ended, and none of the next is submitted before this one has, see :meth:`settle`: so
        it has the same place among the lane's jobs on every rank, whichever thread brings it.
        """
        context = self.context(plan, 0, None, round, False)

        def finish() -> Exchange[None]:
            with self.device.stream():
                yield from plan.finish(context)

        def fail(error: Exception) -> None:
            self.failures.record(error, f"the end of round {round}")

        self._finishing = self.lanes[0].run(
            finish(), "end of the round", wait=self.failures.refuse, then=lambda _: self.memory.commit(), fail=fail
        )

    def failed_between_buckets(self, error: Exception, purpose: str) -> Exception:
        """Turn the failure of a small exchange between two buckets into the link's error."""
        return self.failures.record(error, f"{purpose}, round {self.round}")

    def forget(self, reason: str | None, keeps: Collection[str] = ()) -> None:
        """Drop all that the method remembers but vectors of some kinds, and warn of the reason, if there is one."""
        if reason is not None:
            self.warnings.once(reason, reason)
        self.memory.keep(keeps)

    def rewind(self, round: int) -> None:
        """Continue with another round, as a checkpoint says."""
        # A round that was skipped here may come again, with other gradients.
        self.settle()
        self.round, self.last_skipped, self._scaled_round = round, -1, -1
        self.diagnostics.forget()

    def traffic(self, buffer_bytes: int) -> Traffic:
        """Return the bytes that this rank sent and received so far."""
        self._wait_for_finish()
        meters = [lane.meter for lane in self.lanes]
        return Traffic(
            sent_bytes=sum(m.sent_bytes for m in meters),
            received_bytes=sum(m.received_bytes for m in meters),
            dense_bytes=dense_bytes(self._elements, self.world_size, self._passes),
            elements=self._elements,
            rounds=self.rounds_here,
            buffer_bytes=buffer_bytes,
            sent_to=dict(sum((m.sent_to for m in meters), Counter())),
            sent_within=dict(sum((m.sent_within for m in meters), Counter())),
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in encoders, on the wire and in decoders."""
        meters = [lane.meter for lane in self.lanes]
        return {part: sum(getattr(m, part) for m in meters) for part in ("encode_s", "wire_s", "decode_s")}


def as_it_is(flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future of a bucket that is not exchanged."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def close_threads(lanes: Sequence[Lane], circle: Circle, unbinders: Sequence[Callable[[], None] | None]) -> None:
    """End what a link has running, and take its hooks away."""
    for unbind in unbinders:
        if unbind is not None:
            unbind()
    # Before the others see that connections end.
    circle.close()
    for lane in lanes:
        lane.close()
