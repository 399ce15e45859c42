"""A parameter server and workers of any speed, simulated in the order of events."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method, cast_of, is_number, is_whole, require
from gradwire.exchange.pace import AtOwnPace
from gradwire.exchange.planning import Options, one_way_bytes
from gradwire.exchange.segments import flat_view
from gradwire.link.parameters import gradient, named_parameters, put
from gradwire.link.simulate import SimulatedLink
from gradwire.methods.spec import method as read_method
from gradwire.seeds import worker_seed


@dataclass(frozen=True)
class ServerTurn:
    """A gradient that a worker has to compute.

    Attributes:
        worker: Number of the worker.
        clock: Number of steps that it has taken before.
        time_s: Time at which its push reaches the server.
        lead: Number of steps that it was ahead of the slowest worker when it began.
        behind: Number of pushes that the server has applied since the worker fetched the parameters.
    """

    worker: int
    clock: int
    time_s: float
    lead: int
    behind: int


@dataclass
class _Pusher:
    """A worker: its clock, the parameters at which it computes, and its half of the exchange."""

    link: SimulatedLink
    copy: SimulatedLink | None
    clock: int = 0
    lead: int = 0
    since: int = 0
    asked_s: float = 0.0
    waited_s: float = 0.0
    fetched: list[torch.Tensor] = field(default_factory=list)


class SimulatedServer:
    """Runs :class:`gradwire.AsyncServer` with a server and N workers in one process.

    It is deterministic: a push counts when its worker has computed for its time, pushes of the same time in the order
    of workers, and all pushes of a time before the fetches of that time. Messages take no time, unless ``seconds``
    includes it. The caller computes the gradients, at the parameters that the worker fetched::

        server = gw.SimulatedServer(
            model.named_parameters(), "AsyncServer(ErrorFeedback(TopK(density=0.01)), staleness=3)", [1, 1, 2, 4],
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        for turn in server.turns(1000):
            loss(model, batch(turn.worker, turn.clock)).backward()

    Between two turns, and after the loop, the model holds the server's parameters.

    Args:
        parameters: (name, parameter) pairs.
        method: An ``AsyncServer`` or its spec.
        seconds: Time that each worker computes for a step, above 0; or a function of worker and clock, with
            ``world_size``.
        optimizer: Optimizer of the parameters, which steps at each push by the pushed gradient divided by N.
        world_size: Number of workers; by default that of ``seconds``.
        seed: Seed of random numbers. Workers draw independently.
        options: See :class:`Options`.

    Attributes:
        method: The method.
        time_s: Time of the last push.
        pushes: Number of pushes so far.
        skipped: Number of pushes that were not finite, and so not applied.
        leads: Number of steps that were begun with each lead over the slowest worker.
        push_bytes: Bytes of one push, by a dry run: a bound if the length of payloads varies.
        fetch_bytes: Bytes of one fetch.

    Raises:
        HyperparameterError: ``world_size`` or an option is wrong.
        IncompatibleError: the method is not an ``AsyncServer``, or its inner method needs more than one worker.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
        method: str | Method,
        seconds: Sequence[float] | Callable[[int, int], float],
        *,
        optimizer: torch.optim.Optimizer,
        world_size: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.method = read_method(method)
        if not self.method.traits.at_own_pace:
            raise IncompatibleError(
                f"{self.method!r} exchanges in rounds: simulate it by a SimulatedLink, or put AsyncServer around it"
            )
        at_own_pace = cast(AtOwnPace, self.method)
        self._staleness, inner, fetch = at_own_pace.staleness, at_own_pace.inner, at_own_pace.fetch
        if not callable(seconds):
            given = tuple(seconds)
            require(world_size in (None, len(given)), "world_size", f"there are {len(given)} times in seconds")
            world_size, seconds = len(given), lambda worker, clock: given[worker]
        if world_size is None or not is_whole(world_size, 1):
            raise HyperparameterError(f"world_size: at least one worker is needed, not {world_size!r}")
        self._seconds, self._optimizer = seconds, optimizer
        self._parameters = named_parameters(parameters)
        self.world_size, self.time_s = world_size, 0.0
        self.pushes = self.skipped = 0
        self.leads: Counter[int] = Counter()
        exact = cast_of(fetch) == torch.float32
        self._workers = [
            _Pusher(
                self._link(inner, worker, seed, optimizer, options),
                # A fetch draws other numbers than a push.
                None if exact else self._link(fetch, worker, worker_seed(seed, world_size), None, options),
            )
            for worker in range(world_size)
        ]
        known = Options.of(options)
        self.push_bytes, self.fetch_bytes = (one_way_bytes(m, self._parameters, known) for m in (inner, fetch))
        # The earliest first; of the same time, the first worker.
        self._computing: list[tuple[float, int]] = []
        self._asking = list(range(world_size))

    def _link(self, method: Method, worker: int, seed: int, optimizer: Any, options: dict[str, Any]) -> SimulatedLink:
        own = worker_seed(seed, worker)
        made = SimulatedLink(self._parameters.items(), method, 1, optimizer=optimizer, seed=own, **options)
        made.take_place(worker)
        return made

    def turns(self, pushes: int) -> Iterator[ServerTurn]:
        """Yield the turns of some pushes, in the order in which they reach the server.

        The gradient of a turn is read when the next turn is asked for; a missing gradient counts as zeros. If the loop
        ends at a turn, that turn is not pushed, and comes again in the next call.

        Raises:
            HyperparameterError: a time in ``seconds`` is not above 0.
        """
        for _ in range(pushes):
            self._let_begin()
            self.time_s, number = self._computing[0]
            worker = self._workers[number]
            own = [flat_view(p.detach()).clone() for p in self._parameters.values()]
            self._optimizer.zero_grad(set_to_none=True)
            self._put(worker.fetched)
            try:
                yield ServerTurn(number, worker.clock, self.time_s, worker.lead, self.pushes - worker.since)
            finally:
                self._put(own)
            heapq.heappop(self._computing)
            self._push(worker)
            worker.asked_s = self.time_s
            self._asking.append(number)

    @property
    def clocks(self) -> tuple[int, ...]:
        """Number of steps that each worker has taken."""
        return tuple(worker.clock for worker in self._workers)

    @property
    def waited_s(self) -> tuple[float, ...]:
        """Time that each worker has waited for slower ones."""
        return tuple(worker.waited_s for worker in self._workers)

    @property
    def links(self) -> tuple[SimulatedLink, ...]:
        """Each worker's half of the exchange, which has its state."""
        return tuple(worker.link for worker in self._workers)

    @property
    def received_bytes(self) -> int:
        """Bytes that all pushes so far have brought to the server."""
        return self.pushes * self.push_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that the server has sent for all fetches so far."""
        return sum(self.leads.values()) * self.fetch_bytes

    def _let_begin(self) -> None:
        """Let those that have pushed begin their next step, if no push of the same time is left and they may."""
        if self._computing and self._computing[0][0] <= self.time_s:
            return
        slowest = min(worker.clock for worker in self._workers)
        for number in sorted(self._asking):
            worker = self._workers[number]
            lead = worker.clock - slowest
            if self._staleness is None or lead <= self._staleness:
                self._asking.remove(number)
                self._begin(number, worker, lead)

    def _begin(self, number: int, worker: _Pusher, lead: int) -> None:
        took_s = self._seconds(number, worker.clock)
        if not is_number(took_s, above=0) or not math.isfinite(took_s):
            raise HyperparameterError(
                f"seconds: worker {number} takes {took_s!r} s for a step: a time above 0 is needed"
            )
        worker.waited_s += self.time_s - worker.asked_s
        worker.lead, worker.since = lead, self.pushes
        self.leads[lead] += 1
        current = [flat_view(p.detach()) for p in self._parameters.values()]
        if worker.copy is None or not worker.fetched:
            worker.fetched = [x.clone() for x in current]
        else:
            change = torch.cat([x.float() - held.float() for x, held in zip(current, worker.fetched)])
            worker.copy.exchange_(change[None])
            for held, part in zip(worker.fetched, change.split([x.numel() for x in current])):
                held.add_(part.to(held.dtype))
        heapq.heappush(self._computing, (self.time_s + took_s, number))

    @torch.no_grad()
    def _push(self, worker: _Pusher) -> None:
        grads = [flat_view(gradient(p)) for p in self._parameters.values()]
        sent = torch.cat([grad.float() for grad in grads])
        worker.link.exchange_(sent[None])
        worker.clock += 1
        self.pushes += 1
        if not bool(torch.isfinite(sent).all()):
            self.skipped += 1
            return
        for grad, part in zip(grads, sent.div_(self.world_size).split([g.numel() for g in grads])):
            grad.copy_(part)
        self._optimizer.step()

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        put(list(self._parameters.values()), values)
