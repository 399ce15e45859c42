"""Local steps of several workers in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.exchange.drivers import Meter, Traffic, dense_bytes, simulate_ranks
from gradwire.exchange.method import Method
from gradwire.exchange.planning import FragmentClock, Options, exchanged
from gradwire.exchange.protocols import Context
from gradwire.exchange.segments import Parameter
from gradwire.link.buffers import mean_of_simulated
from gradwire.link.global_parameters import GlobalParameters, mean_over_ranks, parameters_of
from gradwire.link.local_steps import GIVES_UP, MOST_DISCARDED
from gradwire.link.memory_order import check_orders, in_memory_order, memory_orders
from gradwire.link.parameters import named_parameters, put, swapped
from gradwire.link.simulate import SimulatedLink
from gradwire.methods.spec import method as read_method


class SimulatedLocalSteps:
    """Exchanges the changes by the optimizers of N simulated workers, with the arithmetic of real ranks.

    Results have the same bits as those of a real group if the inner method has the property ``bit_stable``.

    Args:
        workers: The (name, parameter) pairs of each worker, with equal values at first.
        method: A method with local steps, or its spec.
        options: See :class:`SimulatedLink`.

    Attributes:
        link: The simulated link that exchanges the differences or parameters. ``link.traffic(worker)`` is the traffic
            of a rank, without that of a mean for an evaluation.
        buffers: For each worker, buffers that are averaged with the last fragment; under gossip, whenever parameters
            are.

    Raises:
        IncompatibleError: the method exchanges gradients, or would in its first rounds (``warmup_steps``), or workers
            begin with different parameters and the method is not gossip, or differ in the names, shapes, strides or
            types of parameters.
        ExchangeError: a parameter of a worker is not finite in an exchange by gossip, or the means of three exchanges
            in a row are not.

    Example:
        >>> import torch, gradwire as gw
        >>> workers = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        >>> steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], "LocalSGD(every=1)")
        >>> with torch.no_grad():
        ...     _ = workers[0].add_(1.0)
        >>> steps.after_step()
        >>> workers[1].tolist()
        [0.5, 0.5]
    """

    def __init__(
        self, workers: Sequence[Iterable[tuple[str, torch.Tensor]]], method: str | Method, **options: Any
    ) -> None:
        named, found = [named_parameters(pairs) for pairs in workers], read_method(method)
        if not found.traits.local_steps:
            raise IncompatibleError(f"{found!r} exchanges gradients at every step: simulate it by a SimulatedLink")
        pieces, its_options = exchanged(found, named[0], Options.of(options))
        if its_options.warmup_steps:
            raise IncompatibleError(
                "in rounds of warm-up gradients are exchanged, which a simulation of local steps does not see: use "
                "warmup_steps=0, or real workers"
            )
        settings = {field.name: getattr(its_options, field.name) for field in fields(its_options)}
        self.link = SimulatedLink(pieces.items(), found, len(named), **settings)
        self.link.orders = memory_orders(named[0])
        layouts = [{n: Parameter.of(n, p) for n, p in mine.items()} for mine in named]
        for rank, mine in enumerate(named):
            if layouts[rank] != layouts[0]:
                raise IncompatibleError(
                    f"worker {rank}'s parameters have other names, shapes, strides or types than worker 0's"
                )
            if not (found.traits.outcomes_differ or all(torch.equal(p, named[0][n]) for n, p in mine.items())):
                raise IncompatibleError(f"worker {rank} begins with other parameters than worker 0")
        self._workers = [parameters_of(found, mine, len(named)) for mine in named]
        self.buffers: list[list[torch.Tensor]] = []
        self._names = list(self._workers[0].pieces)
        self._flying: tuple[Sequence[str], list[torch.Tensor]] | None = None
        self._elements = self._discarded = 0
        self._is_counted = False

    @property
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """The global parameters by name of piece, or the mean over workers; read only.

        Float32, flat in memory order.
        """
        first = self._workers[0]
        return first.held if isinstance(first, GlobalParameters) else self._mean()

    def after_step(self) -> None:
        """Count a step of every worker's optimizer, and exchange if it is due."""
        self._elements += self.link.numel
        ends, begins = self._clock.step()
        if ends is not None:
            self._end(ends)
        if begins is not None:
            self._begin(self._workers[0].pieces.fragments[begins])
            if not self._clock.delay:
                self._end(begins)

    def synchronise(self) -> None:
        """Exchange the changes since the last exchange now, if there are any, or set all parameters to their mean.

        An exchange in flight ends first.
        """
        first = self._workers[0]
        if not isinstance(first, GlobalParameters):
            mean = self._mean()
            for worker in self._workers:
                put([worker.pieces[name] for name in mean], list(mean.values()))
                worker.take()
            self._average_buffers()
            for memory in self.link._memories:
                for kind in first.method.traits.of_parameters:
                    memory.forget(kind)
            return
        if self._clock.flying is not None:
            self._end(self._clock.flying)
        self._clock.reset()
        if any(worker.has_moved() for worker in self._workers if isinstance(worker, GlobalParameters)):
            self._begin(self._names)
        self._end(self._clock.count - 1, replaced=not first.method.keeps_own)

    def swapped(self) -> AbstractContextManager[None]:
        """Return a context in which worker 0's parameters are the global ones, or the mean, as are its buffers."""
        first = self._workers[0]
        if isinstance(first, GlobalParameters):
            return first.swapped()
        tensors = [*first.pieces.values(), *(self.buffers[0] if self.buffers else ())]
        return swapped(tensors, [*self._mean().values(), *self._mean_buffers()])

    def traffic(self, worker: int = 0) -> Traffic:
        """Return the bytes that a worker would have sent and received, compared with an exchange in every step."""
        found = self.link.traffic(worker)
        return replace(found, elements=self._elements, dense_bytes=dense_bytes(self._elements, len(self._workers)))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the link's state with that of the local steps, without the workers' own parameters."""
        state = self.link.state_dict()
        flying = self._flying if self._clock.flying is not None else None
        self._workers[0].add_state(state, [(flying[0], flying[1][0])] if flying else None)
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from a state of :meth:`state_dict`; the caller loads parameters and optimizers.

        Raises:
            IncompatibleError: it is not a state of these local steps.
        """
        self._workers[0].check(state)
        check_orders(state, self.link.orders, self.link.method)
        state = in_memory_order(state, self.link.orders, self.link.method)
        rest, self._flying, self._discarded = state, None, 0
        for worker in self._workers:
            rest = worker.load(state)
            for names, mean in worker.arrived() or ():
                self._flying = names, [mean] * len(self._workers)
        self.link.load_state_dict(rest)

    @property
    def _clock(self) -> FragmentClock:
        """The step clock, which is the same for all workers."""
        return self._workers[0].clock

    def _begin(self, names: Sequence[str]) -> None:
        for rank, worker in enumerate(self._workers):
            problem = worker.problem()
            if problem is not None:
                raise ExchangeError(f"worker {rank}: {problem}")
        if not names:
            return  # an empty fragment: the model has fewer pieces than fragments
        rows = torch.stack([worker.outgoing(names) for worker in self._workers])
        skipped = self.link.skipped_rounds
        self.link.exchange_(rows, names)
        self._is_counted = self.link.skipped_rounds > skipped
        # A mean is only read, so that workers share one row.
        self._flying = names, list(rows) if self.link.method.traits.outcomes_differ else [rows[0]] * len(rows)

    @torch.no_grad()
    def _end(self, fragment: int, replaced: bool = False) -> None:
        if self._flying is not None:
            (names, outcomes), self._flying = self._flying, None
            # All workers see the same means.
            pairs = zip(self._workers, outcomes)
            taken = [worker.incoming([(names, mean)], replaced=replaced) for worker, mean in pairs]
            self._count(discarded=not all(taken))
        if fragment == self._clock.count - 1 and isinstance(self._workers[0], GlobalParameters):
            self._average_buffers()

    def _average_buffers(self) -> None:
        means = self._mean_buffers()
        for own in self.buffers:
            put(own, means)

    def _mean_buffers(self) -> list[torch.Tensor]:
        context = Context(0, len(self._workers), self.link.round)
        return [mean_of_simulated(same, replace(context, bucket=i)) for i, same in enumerate(zip(*self.buffers))]

    def _count(self, discarded: bool) -> None:
        self._discarded = self._discarded + 1 if discarded else 0
        self.link.skipped_rounds += discarded and not self._is_counted
        if self._discarded >= MOST_DISCARDED:
            raise ExchangeError(GIVES_UP)

    def _mean(self) -> dict[str, torch.Tensor]:
        rows = torch.stack([worker.outgoing(self._names) for worker in self._workers])
        contexts = [Context(rank, len(rows), self.link.round) for rank in range(len(rows))]
        simulate_ranks([mean_over_ranks(*pair) for pair in zip(contexts, rows)], [Meter() for _ in rows])
        sizes = [p.numel() for p in self._workers[0].pieces.values()]
        return dict(zip(self._names, rows[0].split(sizes)))
