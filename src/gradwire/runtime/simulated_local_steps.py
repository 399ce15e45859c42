"""Local steps of several workers in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, cast

import torch

from gradwire.drivers import Traffic, dense_bytes
from gradwire.errors import IncompatibleError
from gradwire.local_steps import StepsLocally
from gradwire.methods import Method
from gradwire.planning import Options
from gradwire.runtime.fragments import FragmentClock, exchanged
from gradwire.runtime.global_parameters import GlobalParameters
from gradwire.runtime.parameters import named_parameters
from gradwire.runtime.simulate import SimulatedLink
from gradwire.spec import method as read_method

__all__ = ["SimulatedLocalSteps"]


class SimulatedLocalSteps:
    """Exchanges what N workers' optimizers have changed: the arithmetic of real ranks, in one process.

    The bits are those of a real group where the inner method is bit-stable.

    Args:
        workers: Of each worker its (name, parameter) pairs, the same parameters at first.
        method: A method with local steps, or its spec.
        options: As of :class:`SimulatedLink`.

    Attributes:
        link: The simulated link that the differences go through.
        buffers: Of each worker, buffers that are averaged when the last fragment is exchanged.

    Raises:
        IncompatibleError: the method exchanges gradients, or workers begin with different parameters.

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
        if not found.local_steps:
            raise IncompatibleError(f"{found!r} exchanges gradients at every step: simulate it by a SimulatedLink")
        pieces, its_options = exchanged(found, named[0], Options.of(options))
        settings = {field.name: getattr(its_options, field.name) for field in fields(its_options)}
        self.link = SimulatedLink(pieces.items(), found, len(named), **settings)
        for rank, mine in enumerate(named):
            if mine.keys() != named[0].keys() or any(not torch.equal(p, named[0][n]) for n, p in mine.items()):
                raise IncompatibleError(f"worker {rank} begins with other parameters than worker 0")
        self._workers = [GlobalParameters(cast(StepsLocally, found), mine, len(named)) for mine in named]
        self.buffers: list[list[torch.Tensor]] = []
        self._flying: tuple[Sequence[str], torch.Tensor] | None = None
        self._elements = 0

    @property
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """The global parameters by the names of what is exchanged, float32, flat in memory order; not to be written."""
        return self._workers[0].held

    def after_step(self) -> None:
        """Count a step that every worker's optimizer has made, and exchange what is due after it."""
        self._elements += self.link.numel
        ends, begins = self._clock.step()
        if ends is not None:
            self._end(ends)
        if begins is not None:
            self._begin(self._workers[0].pieces.fragments[begins])
            if not self._clock.delay:
                self._end(begins)

    def synchronise(self) -> None:
        """Exchange now what the steps since the last exchange have changed; an exchange in flight ends first."""
        if self._clock.flying is not None:
            self._end(self._clock.flying)
        self._clock.reset()
        self._begin(list(self._workers[0].pieces))
        self._end(self._clock.count - 1, replaced=not self._workers[0].method.keeps_own)

    def swapped(self) -> AbstractContextManager[None]:
        """Return a context in which worker 0's parameters are the global ones."""
        return self._workers[0].swapped()

    def traffic(self) -> Traffic:
        """Return the bytes that worker 0 would have sent and received, against an exchange in every step."""
        found = self.link.traffic()
        return replace(found, elements=self._elements, dense_bytes=dense_bytes(self._elements, len(self._workers)))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state, in the form of :meth:`SimulatedLink.state_dict`, without the workers' own parameters."""
        state = self.link.state_dict()
        self._workers[0].add_state(state, [self._flying] if self._flying and self._clock.flying is not None else None)
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue where :meth:`state_dict` was taken, with the workers' parameters of then.

        Raises:
            IncompatibleError: it is no state of these local steps.
        """
        self._workers[0].check(state)
        rest: Mapping[str, Mapping[str, torch.Tensor]] = state
        for worker in self._workers:
            rest = worker.load(state)
            arrived = worker.arrived()
            self._flying = arrived[0] if arrived else None
        self.link.load_state_dict(rest)

    @property
    def _clock(self) -> FragmentClock:
        """All workers count alike."""
        return self._workers[0].clock

    def _begin(self, names: Sequence[str]) -> None:
        # Means are read only.
        mean = self.link.reduce_(torch.stack([worker.outgoing(names) for worker in self._workers]), names)
        self._flying = names, mean

    @torch.no_grad()
    def _end(self, fragment: int, replaced: bool = False) -> None:
        if self._flying is None:
            raise TypeError("no exchange is in flight")
        for worker in self._workers:
            worker.incoming([self._flying], replaced=replaced)
        self._flying = None
        for buffers in zip(*self.buffers) if fragment == self._clock.count - 1 else ():
            mean = torch.stack([b.to(torch.float64) for b in buffers]).mean(0)
            for buffer in buffers:
                buffer.copy_(mean)
