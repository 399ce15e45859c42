"""The exchange of one bucket as jobs of lanes, and the buffer that joins a step's buckets to one vector."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.exchange.deferred_checks import Flag, both
from gradwire.exchange.drivers import Device, Lane, LateChecks, Verdict
from gradwire.exchange.ops import AllGather, Exchange
from gradwire.exchange.protocols import REDUCE_SCATTER, Context, Outcome, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, Segment
from gradwire.link.failures import place
from gradwire.link.round import Mean, Round

T = TypeVar("T")

SMALL_BYTES = 1 << 22
"""Buckets up to this size that start at once share a lane.

Threads of a second connection cost small buckets more than they save; see ``gradwire bench step --model resnet``.
Larger ones use all lanes, since a connection that loses packets does not fill its link.
"""


class StepBuffer:
    """Joins the buckets of a step, and returns their parts of the outcome.

    Args:
        order: Names of all parameters, in the order of the step's vector, which is that of one planner.
        parameters: Parameters by name.
        device: Device of the buckets.
    """

    def __init__(self, order: Sequence[str], parameters: Mapping[str, Parameter], device: Device) -> None:
        self._device, self.order, self._parameters = device, list(order), parameters
        self._parts: dict[str, torch.Tensor] = {}
        self._buckets: list[tuple[Sequence[str], torch.Tensor, Mean]] = []
        self._whole: torch.Tensor | None = None
        self._vector = torch.empty(0, dtype=torch.float32, device="cpu")

    def add(self, index: int, names: Sequence[str], flat: torch.Tensor) -> Mean:
        """Add a bucket; its future is done after :meth:`give_back`. Bucket 0 begins a step."""
        if index == 0:
            # A backward pass that failed may have left some.
            self._buckets = []
        future = self._device.future()
        self._buckets.append((names, flat, future))
        return future

    def joined(self, *, needs_all: bool) -> tuple[list[str], torch.Tensor]:
        """Join the buckets into one float32 vector, a buffer that all steps use; return its parameters, too.

        Args:
            needs_all: True if the method needs all parameters.

        Raises:
            IncompatibleError: the step left out a parameter that is needed.
        """
        here = {name for names, _, _ in self._buckets for name in names}
        missing = set(self.order) - here
        if missing and needs_all:
            raise IncompatibleError(
                f"this step has no gradient for {sorted(missing)[0]!r}, and the method needs the whole step: use a "
                "method that goes bucket by bucket, or freeze the parameter before attaching"
            )
        names = [name for name in self.order if name in here] if missing else self.order
        self._lay_out(names)
        flats, parts = self._pairs()
        torch._foreach_copy_(parts, flats)
        return names, self._vector

    def _lay_out(self, names: Sequence[str]) -> None:
        """Divide the buffer among the parameters of a step; in most steps they are those of the step before."""
        if self._parts.keys() == set(names):
            return
        if self._whole is None:
            numel = sum(p.numel for p in self._parameters.values())
            self._whole = torch.empty(numel, dtype=torch.float32, device=self._device.name)
        sizes = [self._parameters[name].numel for name in names]
        self._vector = self._whole[: sum(sizes)]
        self._parts = dict(zip(names, self._vector.split(sizes)))

    def give_back(self, ended: Mean) -> None:
        """Set the mean, which the vector holds once ``ended`` is done, or the error on every bucket's future."""
        buckets = self._buckets
        try:
            ended.value()
            flats, parts = self._pairs()
            torch._foreach_copy_(flats, parts)
        except Exception as error:
            self._buckets = []
            for _, _, future in buckets:
                future.set_exception(error)  # type: ignore[arg-type]
            return
        self._buckets = []
        for _, flat, future in buckets:
            future.set_result(flat)

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return each parameter's part of its bucket and, at the same index, of the vector, for one call of copies."""
        flats: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for names, flat, _ in self._buckets:
            flats += flat.split([self._parameters[name].numel for name in names])
            parts += [self._parts[name] for name in names]
        return flats, parts


class BucketExchange:
    """The jobs of one bucket: prepare it, then exchange each chunk in a lane chosen by index, then an optional check.

    Args:
        round: The link's current round.
        plan: The bucket's exchange plan.
        segments: The parameters in ``flat``.
        flat: The bucket, in its own dtype; holds the mean when ``future`` is done. On a device, all work on it is
            enqueued on the link's stream, after the stream of the calling thread and before that of the thread that
            waits for ``future``.
        bucket: Index of the bucket in its round.

    Attributes:
        future: Future of ``flat``.
        finite: True if the mean is finite; None if it was not checked.
    """

    def __init__(
        self,
        round: Round,
        plan: BucketPlan,
        segments: Sequence[Segment],
        flat: torch.Tensor,
        bucket: int,
    ) -> None:
        self.round, self.plan, self.segments = round, plan, segments
        self.outer, self.bucket = flat, bucket
        self.runtime = runtime = round.runtime
        self.device = runtime.device
        self.future = self.device.future()
        self.finite: Flag | None = True
        self._lock = threading.Lock()
        self._left = plan.chunks
        self._prepared: Any = None
        # A bucket that starts at once has no jobs that wait for each other: two events would be a quarter of its
        # overhead.
        self._starts_at_once = plan.asynchronous and not runtime.check and self.device.is_host
        self._events: tuple[threading.Event, ...] = (
            () if self._starts_at_once else (threading.Event(), threading.Event())
        )
        # This also waits for earlier copies to the device.
        self.device.wait_for_current()
        with self.device.stream():
            self.flat = self.device.pinned(flat) if runtime.staged else flat
            if runtime.staged:
                self.device.copy_async(self.flat, flat)
            self.device.use(flat)
            self._fetched = self.device.mark()
        self.work = self.flat
        self._gradient: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        if not runtime.staged:
            self._take()

    def _take(self) -> None:
        """Set the vector to work on, in float32 unless the plan keeps the dtype, and copies to measure errors with."""
        with self.device.stream():
            keeps = self.plan.keeps_dtype or self.flat.dtype == torch.float32
            self.work = self.flat if keeps else self.flat.float()
            if self.round.measured:
                self._gradient, self._sent = self.work.clone(), torch.zeros_like(self.work)

    def start(self, last: bool) -> Mean:
        """Submit the jobs to the lanes, in the same order and to the same lanes on every rank; return the future.

        Args:
            last: True for the last bucket of the round.
        """
        self.round.began(self.flat.numel(), last)
        lanes, chunks = self.runtime.lanes, range(self.plan.chunks)
        if self._starts_at_once and self.flat.numel() * self.flat.element_size() <= SMALL_BYTES:
            lanes = lanes[:1]
        first = lanes[self.bucket % len(lanes)]
        in_turn = [lanes[(self.bucket + chunk) % len(lanes)] for chunk in chunks]
        if self._starts_at_once:
            for chunk, lane in zip(chunks, in_turn):
                fail = partial(self._fail, chunk)
                lane.run(self._chunk(chunk), then=self._finish_chunk, fail=fail, at_once=True)
            return self.future
        if len(chunks) == 1:
            self._run(first, self._chunk(0), 0, self._wait_until_fetched, self._finish_chunk, self._prepare())
        else:
            self._run(first, self._prepare(), None, self._wait_until_fetched, lambda _: self._is_prepared.set())
            for chunk, lane in zip(chunks, in_turn):
                # A chunk waits only for a job that was submitted before it: no deadlock.
                self._run(lane, self._chunk(chunk), chunk, self._is_prepared.wait, self._finish_chunk)
        if self.runtime.check or not chunks:
            self._run(first, self._verify(), None, self._wait_for_chunks, lambda _: self._complete(), purpose=", check")
        return self.future

    def _run(
        self,
        lane: Lane,
        job: Exchange[T],
        chunk: int | None,
        wait: Callable[[], object],
        then: Callable[[T], object],
        first: Exchange[None] | None = None,
        purpose: str = "",
    ) -> None:
        """Submit a job to a lane, which calls ``wait`` before it starts the job."""

        def ready() -> None:
            self.runtime.failures.refuse()
            wait()
            self.runtime.failures.refuse()

        label = f"bucket {self.bucket}{purpose}" if chunk is None else f"bucket {self.bucket}, chunk {chunk}"
        lane.run(job, label, wait=ready, first=first, then=then, fail=partial(self._fail, chunk))

    def _context(self, chunk: int | None) -> Context:
        return self.round.context(self.plan, self.bucket, chunk, self.round.measured)

    @property
    def _is_prepared(self) -> threading.Event:
        return self._events[0]

    @property
    def _all_run(self) -> threading.Event:
        return self._events[1]

    def _fail(self, chunk: int | None, error: Exception) -> None:
        where = place(self.bucket, chunk, self.round.number, [s.parameter.name for s in self.segments])
        told = self.runtime.failures.record(error, where)
        for event in self._events:
            event.set()
        with self._lock:
            if not self.future.done():
                self.future.set_exception(told)  # type: ignore[arg-type]

    def _wait_until_fetched(self) -> None:
        """Wait for the copy to main memory, in the lane's thread, so that backward continues."""
        if self.runtime.staged:
            self._fetched.synchronize()
            self._take()

    def _prepare(self) -> Exchange[None]:
        with self.device.stream():
            self._prepared = yield from self.plan.prepare(self._context(None), self.work)

    def _chunk(self, chunk: int) -> Exchange[Outcome]:
        with self.device.stream():
            return (yield from self.plan.run(self._context(chunk), self.work, self._prepared))

    def _wait_for_chunks(self) -> None:
        if not self.plan.chunks:
            return
        self._all_run.wait()
        self.runtime.failures.refuse()
        if isinstance(self.runtime.checks, LateChecks):
            # The comparison waits for all bits anyway, and a payload that changed in transit is the cause to report.
            with self.device.stream():
                Verdict(self.device, None, self.runtime.checks).read()

    def _verify(self) -> Exchange[None]:
        """Compare the bits of the mean over ranks; do nothing for a bucket without chunks."""
        if self.plan.chunks:
            with self.device.stream():
                yield from _same_bits(self._context(None), self.work, self.runtime.ranks)

    def _finish_chunk(self, outcome: Outcome) -> None:
        with self.device.stream():
            if outcome.sent is None:
                self._sent = None  # nothing to compare the gradient with
            elif self._sent is not None:
                outcome.sent(self._sent, 1.0)
            with self._lock:
                self.finite = both(self.finite, outcome.finite)
                self._left -= 1
                if self._left:
                    return
        if self.runtime.check:
            self._all_run.set()
        else:
            self._complete()

    def _complete(self) -> None:
        with self.device.stream():
            if self.plan.chunks and self.work is not self.flat:
                self.flat.copy_(self.work)
            if self._gradient is not None and self._sent is not None:
                context = self._context(None)
                self.plan.target_(context, self._gradient)
                measure = self.runtime.diagnostics.measure
                measure(self._gradient, self._sent, self.segments, self.round.number, context.loss_scale)
            if self.flat is not self.outer and self.plan.chunks:
                self.device.copy_async(self.outer, self.flat)
            arrived = self.runtime.checks.so_far()
            if isinstance(arrived, torch.Tensor):
                # The error is known only later: until then these values must not pass for a mean. In a reduce-scatter
                # each rank reads its own shard.
                read = self.outer if self.plan.collective == REDUCE_SCATTER else self.outer[:1]
                read.masked_fill_(~arrived, math.nan)
            self.round.ended(self.plan, self.finite)
            self.future.set_result(self.outer)


def _same_bits(context: Context, flat: torch.Tensor, ranks: Sequence[int]) -> Exchange[None]:
    """Compare a checksum of the mean over ranks.

    Raises:
        ExchangeError: bits of a rank differ from the first one's; the message names such ranks by these numbers.
    """
    digest = zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
    mine = torch.tensor([digest], dtype=torch.int64, device="cpu").view(torch.uint8)
    workspace = Workspace()
    rows = yield AllGather(mine, workspace.get("check", context.world_size, 8))
    found = rows.contiguous().view(torch.int64).flatten().tolist()
    wrong = [rank for rank, value in zip(ranks, found) if value != found[0]]
    if wrong:
        raise ExchangeError(f"check: the mean of ranks {wrong} differs in its bits from rank {ranks[0]}'s")
