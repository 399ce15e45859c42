"""Local steps of several workers in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from gradwire.errors import IncompatibleError
from gradwire.local_steps import StepsLocally
from gradwire.methods import Method
from gradwire.runtime.global_parameters import GlobalParameters
from gradwire.runtime.parameters import named_parameters
from gradwire.runtime.simulate import SimulatedLink

__all__ = ["SimulatedLocalSteps"]


class SimulatedLocalSteps:
    """Exchanges what N workers' optimizers have changed: the arithmetic of real ranks, in one process.

    The bits are those of a real group where the inner method is bit-stable.

    Args:
        workers: Of each worker its (name, parameter) pairs, the same parameters at first.
        method: A method with local steps, or its spec.
        options: As of :class:`SimulatedLink`.

    Attributes:
        link: The simulated link that the differences go through: its traffic is that of a rank.

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
        named = [named_parameters(pairs) for pairs in workers]
        self.link = SimulatedLink(named[0].items(), method, len(named), **options)
        found = self.link.method
        if not found.local_steps:
            raise IncompatibleError(f"{found!r} exchanges gradients at every step: simulate it by a SimulatedLink")
        for rank, mine in enumerate(named):
            if mine.keys() != named[0].keys() or any(not torch.equal(p, named[0][n]) for n, p in mine.items()):
                raise IncompatibleError(f"worker {rank} begins with other parameters than worker 0")
        self._names = list(named[0])
        self._workers = [GlobalParameters(cast(StepsLocally, found), mine, len(named)) for mine in named]

    @property
    def global_parameters(self) -> dict[str, torch.Tensor]:
        """The global parameters by name, float32, flat in memory order; not to be written."""
        return self._workers[0].held

    def after_step(self) -> None:
        """Count a step that every worker's optimizer has made, and exchange if it is the last of ``every``."""
        for worker in self._workers:
            worker.steps += 1
        if self._workers[0].steps >= self._workers[0].method.every:
            self.synchronise()

    def synchronise(self) -> None:
        """Exchange now what the steps since the last exchange have changed."""
        mean = self.link.reduce_(torch.stack([worker.outgoing(self._names) for worker in self._workers]))
        for worker in self._workers:
            worker.incoming([(self._names, mean)])
