"""Halo exchanges between simulated workers in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Traffic, simulate_ranks
from gradwire.exchange.method import Method
from gradwire.graphs import Boundary, Halo, HaloMethod, halo_method
from gradwire.graphs.halo_plan import BACKWARD, FORWARD
from gradwire.link.halo_link import HaloWorker, State, compiled


class SimulatedHaloLink:
    """Exchanges halos between simulated workers, with the code, bytes and results of :class:`HaloLink`.

    Args:
        boundaries: The boundary of each worker, in order.
        method: See :class:`HaloLink`, also for the other arguments.

    Raises:
        HyperparameterError: a spec is wrong.
        IncompatibleError: boundaries are missing, or the method cannot be used.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        method: str | HaloMethod | Method,
        *,
        steps: int | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.method = halo_method(method)
        if not boundaries or any((b.rank, b.workers) != (r, len(boundaries)) for r, b in enumerate(boundaries)):
            raise IncompatibleError("the boundaries of all workers are needed, in the order of their ranks")
        self.workers = [HaloWorker(self.method, b, seed=seed, steps=steps, backend=backend) for b in boundaries]
        for worker in self.workers:
            worker.plan.drawn = self.workers[0].plan.drawn
        self._exact = [HaloWorker(Halo(), b) for b in boundaries]
        compiled(self.method, backend)
        self._evaluates = False

    @property
    def round(self) -> int:
        """Training step, counted from 0."""
        return self.workers[0].round

    def next_round(self, losses: Sequence[float] | None = None) -> None:
        """End a training step of all workers.

        Args:
            losses: Loss of each worker; see :meth:`HaloLink.next_round`.

        Raises:
            IncompatibleError: the method follows the loss, and there is not one for each worker.
        """
        totals: Sequence[float | None] = [None] * len(self.workers)
        if self.method.follows_loss:
            known = [None] * len(self.workers) if losses is None else losses
            if len(known) != len(self.workers):
                raise IncompatibleError(f"{len(self.workers)} workers have as many losses, not {len(known)}")
            generators = [worker.agreed_loss(loss) for worker, loss in zip(self.workers, known)]
            totals = simulate_ranks(generators, [worker.meter for worker in self.workers])
        for worker, total in zip(self.workers, totals):
            worker.next_round(total)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Send all rows in float32 within the ``with`` block, without counting traffic or changing state."""
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False

    def forward(self, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`."""
        workers = self._now()
        for worker, own in zip(workers, rows):
            worker.count_forward(own.shape[1])
        return simulate_ranks(
            [w.plan.forward(w.context(layer, FORWARD), own) for w, own in zip(workers, rows)],
            [worker.meter for worker in workers],
        )

    def backward(self, layer: int, gradients: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`."""
        workers = self._now()
        for worker, halo in zip(workers, gradients):
            worker.count_backward(halo.shape[1])
        generators = [
            w.plan.backward(w.context(layer, BACKWARD), halo, n) for w, halo, n in zip(workers, gradients, own)
        ]
        return simulate_ranks(generators, [worker.meter for worker in workers])

    def _now(self) -> list[HaloWorker]:
        return self._exact if self._evaluates else self.workers

    def traffic(self) -> list[Traffic]:
        """Return :meth:`HaloLink.traffic` of each worker."""
        return [worker.traffic() for worker in self.workers]

    def gauges(self) -> list[dict[str, float]]:
        """Return the method's gauges of each worker's latest step."""
        return [dict(worker.gauges.latest) for worker in self.workers]

    def record(self) -> dict[str, Any]:
        """Return the method, the options and the bytes of each worker so far as plain values."""
        return {"method": repr(self.method), "traffic": [worker.record() for worker in self.workers]}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state, with a "rank R" for every worker."""
        states = [worker.state() for worker in self.workers]
        return {"global": states[0]["global"], **{f"rank {r}": state["rank"] for r, state in enumerate(states)}}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of :meth:`state_dict`, with the same workers.

        Raises:
            IncompatibleError: it is not such a state, or the states of two workers are mixed up.
        """
        names = [f"rank {r}" for r in range(len(self.workers))]
        if set(state) != {"global", *names}:
            raise IncompatibleError(f"this is not the state of a halo link of {len(names)} simulated workers")
        for name, worker in zip(names, self.workers):
            worker.load({"global": state["global"], "rank": state[name]})
