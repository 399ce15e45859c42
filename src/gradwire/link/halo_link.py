"""The exchange of halos between the processes of a group."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Traffic
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Exchange
from gradwire.graphs import Boundary, Halo, HaloMethod, halo_method
from gradwire.graphs.halo_plan import BACKWARD, FORWARD, WORDS
from gradwire.link.halo_state import HaloWorker, compiled
from gradwire.link.handshake import agreement, default_group
from gradwire.link.side_lane import SideLane
from gradwire.version import __version__

__all__ = ["HaloLink"]


class HaloLink:
    """Exchanges the rows of a partitioned graph's boundaries over a process group, and their gradients back.

    It is the ``exchange`` of a :class:`gradwire.graphs.GraphNetwork`. Weight gradients have a link of their own::

        parts = graphs.subgraphs(graph, graphs.partition(graph, world_size))
        part = parts[rank]
        halo = gw.HaloLink(part.boundary, "VARCO(start=128)", steps=300)
        link = gw.Link(model.named_parameters(), "fp32")
        for _ in range(300):
            loss(model(part.features, part, halo)).backward()
            link.reduce_()
            optimizer.step()
            halo.next_round()

    Building one is collective. It has one lane: connections and a thread, which the thread of the forward and backward
    pass waits for.

    Args:
        boundary: This rank's, of a partition for as many workers as the group has.
        method: What is done with rows: a spec, see :func:`gradwire.graphs.halo_method`.
        steps: That the training has, for methods that go by it.
        seed: Of random numbers.
        group: Process group; the default group if None.
        backend: Of the kernels.

    Attributes:
        close: Call it to end the thread and the connections; done also when the link is dropped.

    Raises:
        HyperparameterError: a spec is wrong.
        IncompatibleError: the boundary is another rank's, or of another number of workers, or the method cannot serve.
        RankMismatchError: ranks differ in version, method, seed, steps or partition.
    """

    def __init__(
        self,
        boundary: Boundary,
        method: str | HaloMethod | Method,
        *,
        steps: int | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ) -> None:
        group = group if group is not None else default_group()
        rank, world_size = group.rank(), group.size()
        with agreement(group) as mine:
            self.method = halo_method(method)
            if (boundary.rank, boundary.workers) != (rank, world_size):
                raise IncompatibleError(
                    f"the boundary is that of worker {boundary.rank} of {boundary.workers}, and this is rank {rank} of "
                    f"{world_size}: partition the graph for as many workers as there are ranks"
                )
            self._worker = HaloWorker(self.method, boundary, seed=seed, steps=steps, backend=backend)
            self._exact = HaloWorker(Halo(), boundary)
            compiled(self.method, backend)
            mine.fields = {
                "gradwire version": __version__,
                "method of the halo": repr(self.method),
                "seed": seed,
                "steps": steps,
                "boundaries": hashlib.sha256(boundary.counts.numpy().tobytes()).hexdigest(),
            }
        self._side = SideLane(group, mine.circle, "halo")
        self._evaluates = False
        self._side.lane.meter = self._worker.meter
        self.close: Callable[[], object] = self._side.close

    @property
    def round(self) -> int:
        """Training step, counted from 0."""
        return self._worker.round

    def next_round(self) -> None:
        """End a training step: to be called once a step, on all ranks alike."""
        self._worker.next_round()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Send all rows in float32 within the ``with`` block; neither counted as traffic nor remembered."""
        self._evaluates, self._side.lane.meter = True, self._exact.meter
        try:
            yield
        finally:
            self._evaluates, self._side.lane.meter = False, self._worker.meter

    def forward(self, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`."""
        (own,), worker = rows, self._now()
        worker.count_forward(own.shape[1])
        return [self._call(worker.plan.forward(worker.context(layer, FORWARD), own), layer, FORWARD)]

    def backward(self, layer: int, gradients: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`."""
        (halo,), worker = gradients, self._now()
        worker.count_backward(halo.shape[1])
        generator = worker.plan.backward(worker.context(layer, BACKWARD), halo, own[0])
        return [self._call(generator, layer, BACKWARD)]

    def _now(self) -> HaloWorker:
        return self._exact if self._evaluates else self._worker

    def _call(self, generator: Exchange[torch.Tensor], layer: int, direction: int) -> torch.Tensor:
        return self._side.run(generator, f"layer {layer} {WORDS[direction]}, step {self.round}")

    def traffic(self) -> Traffic:
        """Return the bytes of the training's exchanges on this rank.

        ``dense_bytes`` is what the values alone would have taken in float32, and ``elements`` their number.
        """
        return self._worker.traffic()

    def gauges(self) -> dict[str, float]:
        """Return what the method reports of this rank's latest step."""
        return dict(self._worker.gauges.latest)

    def record(self) -> dict[str, Any]:
        """Return what runs, in plain values, and the bytes so far."""
        return {"method": repr(self.method), "traffic": [self._worker.record()]}

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full."""
        return self._side.failures.told()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's state: local, tensors only; under ``rank`` what the method remembers."""
        return self._worker.state()

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Continue where :meth:`state_dict` was taken, on the same rank of the same partition.

        Raises:
            IncompatibleError: it is no such state.
        """
        self._worker.load(state)
