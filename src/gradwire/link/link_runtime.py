"""The parts of a link that all its rounds share: lanes, memory, failures, measurements and counts."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradwire.errors import ExchangeError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.drivers import Device, HostDevice, Lane, Meter, Traffic, dense_bytes
from gradwire.exchange.method import is_whole, require
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.protocols import Gauges, Memory, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.link.diagnostics import Diagnostics, Judge
from gradwire.link.failures import Failures, WarnOnce
from gradwire.link.peers.circle import Circle


class Unread(Protocol):
    """A round whose checks have been enqueued on a device."""

    def look(self, *, wait: bool = False) -> None:
        """Read them if the device has finished them; with ``wait``, wait until it has."""


class LinkRuntime:
    """Lanes, memory, failures, measurements and counts of one link.

    A :class:`~gradwire.link.link.Link` chooses the plan of a bucket, a
    :class:`~gradwire.link.bucket_exchange.BucketExchange` runs it, and a :class:`~gradwire.link.round.Round` counts and
    ends the buckets of one round. They share this object, which outlives them. It does not depend on methods, options
    or frameworks.

    Args:
        lanes: Lanes of the link; the order of jobs is the same on every rank.
        circle: The ranks of the link.
        diagnostics: Measures the errors of vectors sent.
        grad_scaler: The scaler of the gradients; None or False if they are not scaled.
        check: True to verify after each bucket that all ranks hold the same bits.
        passes: Passes of the ring that exchanges are compared with: 2 for an all-reduce, 1 for a reduce-scatter.
        device: Device of the buckets; main memory if None.
        staged: True if buckets are copied from the device to main memory, and exchanged there.
        warnings: Warnings of the link; new ones of this rank if None.
        judge: Called at the end of measured rounds; None: not called.
        checks: Takes the results of payload checks; a :class:`gradwire.exchange.drivers.LateChecks` if payloads are on
            a device.

    Attributes:
        ranks: Global numbers of the link's ranks, for messages.
        round: Synchronised backward passes so far, also those before a checkpoint.
        rounds_here: Rounds that were exchanged in this process.
        skipped_rounds: Rounds with a non-finite value, if the method checks for it, or one out of its range.
        memory: State of the method on this rank.
        failures: The first error, if there is one.
        warnings: Warnings of the link.
        gauges: Numbers that the method reports of its rounds.
        link_cost: Cost of a message; None if the method does not use it.
        unread: The round whose checks on a device have not been read; None: there is none.
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
        self.check, self._passes = check, passes
        self.device, self.staged, self.checks = device or HostDevice(), staged, checks
        self._room = "cpu" if staged else self.device.name
        self.round = self.rounds_here = self.skipped_rounds = 0
        self.memory, self.gauges = Memory(self._room), Gauges()
        self.link_cost: LinkCost | None = None
        self.unread: Unread | None = None
        self.failures = Failures(circle, lanes)
        self.diagnostics, self.warnings = diagnostics, warnings or WarnOnce()
        self.grad_scaler = grad_scaler
        self.lanes: Sequence[Lane] = ()
        self._closed = False
        self._past: list[Meter] = []
        self.connect(lanes, circle, judge)
        self._lock = threading.Lock()
        self._elements: Counter[int] = Counter()
        self._spaces: weakref.WeakKeyDictionary[BucketPlan, dict[int | None, Workspace]] = weakref.WeakKeyDictionary()

    def connect(self, lanes: Sequence[Lane], circle: Circle, judge: Judge | None) -> None:
        """Go on over the lanes of other ranks; state and counts stay as they are."""
        self._past += [lane.meter for lane in self.lanes]
        self.lanes, self.judge = lanes, judge
        self.rank, self.world_size, self.ranks = circle.place, circle.world_size, circle.ranks
        self.failures.connect(circle, lanes)

    def close(self) -> None:
        """Read the checks that are left, end the lanes, and tell the other ranks before they see that connections end.

        A payload of the last round that changed on its way to a device is logged here, since no round follows that
        would be refused.
        """
        self._closed = True
        unread, self.unread = self.unread, None
        # After an error the device may wait for ranks that are gone.
        broken = self.failures.error is not None or self.failures.circle.lost()
        if unread is not None and not broken:
            unread.look(wait=True)
            if self.failures.error is not None:
                self.warnings.here("last round", f"this link was closed after an error: {self.failures.error}")
        close_threads(self.lanes, self.failures.circle)

    def refuse(self) -> None:
        """Raise if nothing new can be exchanged; call it before anything is submitted to a lane.

        Raises:
            ExchangeError: the link was closed.
            GradwireError: it is broken: the link's error.
        """
        if self._closed:
            raise ExchangeError("this link was closed: wrap the module anew and attach again")
        self.failures.refuse()

    def count(self, numel: int) -> None:
        """Count elements of a step, exchanged or not."""
        with self._lock:
            self._elements[self.world_size] += numel

    def next_round(self) -> None:
        """Count a round whose buckets have all been started."""
        self.round += 1
        self.rounds_here += 1

    def workspace(self, plan: BucketPlan, chunk: int | None) -> Workspace:
        """Return the buffers of a chunk (None: of the whole bucket), which exist as long as its plan."""
        with self._lock:
            spaces = self._spaces.get(plan)
            if spaces is None:
                spaces = self._spaces[plan] = {}
            space = spaces.get(chunk)
            if space is None:
                whole = spaces.setdefault(None, Workspace(self._room))
                space = whole if chunk is None else spaces.setdefault(chunk, Workspace(self._room, whole))
        return space

    def failed_between_buckets(self, error: Exception, purpose: str) -> Exception:
        """Turn the failure of a small exchange between two buckets into the link's error."""
        return self.failures.record(error, f"{purpose}, round {self.round}")

    def traffic(self, buffer_bytes: int) -> Traffic:
        """Return the bytes that this rank sent and received so far."""
        meters = self._meters()
        with self._lock:
            elements = dict(self._elements)
        return Traffic(
            sent_bytes=sum(m.sent_bytes for m in meters),
            received_bytes=sum(m.received_bytes for m in meters),
            # Members come and go, and a rank sends another share of its gradient among another number of ranks.
            dense_bytes=sum(dense_bytes(numel, ranks, self._passes) for ranks, numel in elements.items()),
            elements=sum(elements.values()),
            rounds=self.rounds_here,
            buffer_bytes=buffer_bytes,
            sent_to=dict(sum((m.sent_to for m in meters), Counter())),
            sent_within=dict(sum((m.sent_within for m in meters), Counter())),
        )

    def _meters(self) -> list[Meter]:
        return [*self._past, *(lane.meter for lane in self.lanes)]

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in encoders, on the wire and in decoders."""
        meters = self._meters()
        return {part: sum(getattr(m, part) for m in meters) for part in ("encode_s", "wire_s", "decode_s")}


def check_lanes(count: object) -> None:
    """Check the number of lanes that a user asked for.

    Raises:
        HyperparameterError: it is no whole number from 1 on.
    """
    require(is_whole(count, 1), "lanes", f"at least 1 is needed, not {count!r}")


def close_link(runtime: LinkRuntime, unbinders: Sequence[Callable[[], None] | None]) -> None:
    """Remove the hooks of a link, and end its threads, even if a hook cannot be removed."""
    # Callbacks are called last in, first out, all of them; the last error is raised.
    with contextlib.ExitStack() as ending:
        ending.callback(runtime.close)
        for unbind in reversed(unbinders):
            if unbind is not None:
                ending.callback(unbind)


def close_threads(lanes: Sequence[Lane], circle: Circle) -> None:
    """End lanes, and tell the other ranks before they see that connections end."""
    circle.close()
    # Each takes a while to end its connections: they do so at the same time.
    for lane in lanes:
        lane.close(0.0)
    for lane in lanes:
        lane.close()
