"""Engines of the task ``graph``: one worker of a group, or all workers in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gradwire as gw
from gradwire.graphs import GraphNetwork, Subgraph, forward_together
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.distributed import DistributedEngine
from gradwire.tools.experiments.engine import LinkEngine
from gradwire.tools.experiments.errors import RunError
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks.graph import GraphTask


def share_of_loss(logits: Tensor, part: Subgraph) -> Tensor:
    """Return a worker's loss; the mean over workers is the mean cross entropy of the graph's known labels."""
    known = F.cross_entropy(logits[part.training], part.labels[part.training], reduction="sum")
    return known * (part.boundary.workers / part.labelled)


def _task(plan: RunConfig) -> GraphTask:
    if not isinstance(plan.task, GraphTask):
        raise TypeError(f"the task {plan.task.name} has no graph")
    return plan.task


def _joined(link: gw.Traffic, halo: gw.Traffic) -> gw.Traffic:
    """Return the traffic of weight gradients and halos together; dense bytes are those of both in float32."""
    return gw.Traffic(
        link.sent_bytes + halo.sent_bytes,
        link.received_bytes + halo.received_bytes,
        link.dense_bytes + halo.dense_bytes,
        link.elements,
        link.rounds,
    )


class HaloEngine(LinkEngine):
    """Base of the engines with a second link, for the halo: record and state of both."""

    halo: gw.HaloLink | gw.SimulatedHaloLink

    def record(self) -> dict[str, Any]:
        """Describe what the links chose."""
        return {**super().record(), "halo": self.halo.record()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both links."""
        return {"link": super().state_dict(), "halo": self.halo.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            RunError: the state is not that of a graph's training.
        """
        try:
            link, halo = state["link"], state["halo"]
        except KeyError as error:
            raise RunError(f"this checkpoint is not one of a graph's training: it has no {error}") from error
        super().load_state_dict(link)
        self.halo.load_state_dict(halo)


class GraphEngine(HaloEngine, DistributedEngine):
    """An :class:`~gradwire.tools.experiments.engine.Engine` of one worker's subgraph, on the default process group."""

    halo: gw.HaloLink

    def load(self) -> None:
        """Cut out this worker's subgraph, and build the link of the halo."""
        task = _task(self.plan)
        self.subgraph = task.subgraphs(self.world_size, self.plan.seed)[self.rank]
        self.halo = gw.HaloLink(self.subgraph.boundary, task.halo_method(), steps=task.steps, seed=self.plan.seed)

    def loss(self, step: int) -> Tensor:
        """Return this worker's share of the loss."""
        return share_of_loss(self.ddp(self.subgraph.features, self.subgraph, self.halo), self.subgraph)

    def backward(self, step: int) -> float:
        """Compute the mean gradient into ``.grad``, with the exchange of the halo; see :class:`DistributedEngine`."""
        try:
            loss = super().backward(step)
        except RuntimeError as error:
            if self.halo.error is not None:
                raise self.halo.error from error
            raise
        self.halo.next_round(loss)
        return loss

    @torch.no_grad()
    def score_own(self) -> list[float]:
        """Evaluate this worker's held-out nodes, with all rows of the halo in float32."""
        self.model.eval()
        with self.halo.evaluation():
            logits = self.model(self.subgraph.features, self.subgraph, self.halo)
        self.model.train()
        held_out = self.subgraph.held_out
        return list(map(float, self.plan.task.score(logits[held_out], self.subgraph.labels[held_out])))

    def traffic(self) -> gw.Traffic:
        """Return this rank's bytes, of weight gradients and of the halo."""
        return _joined(super().traffic(), self.halo.traffic())

    def gauges(self) -> list[dict[str, float]]:
        """Return both methods' gauges of this rank's latest step."""
        return [{**own, **self.halo.gauges()} for own in super().gauges()]

    def close(self) -> None:
        """Close both links."""
        super().close()
        self.halo.close()


class SimulatedGraphEngine(HaloEngine, SimulatedEngine):
    """An :class:`~gradwire.tools.experiments.engine.Engine` that plays all workers of a partitioned graph.

    Each worker has a network of its own that shares the values of the weights with the others, so that each gets the
    gradient of a real worker.
    """

    halo: gw.SimulatedHaloLink

    def load(self) -> None:
        """Cut out the subgraphs, and build the link of the halos."""
        task = _task(self.plan)
        self.subgraphs = task.subgraphs(self.world_size, self.plan.seed)
        boundaries = [part.boundary for part in self.subgraphs]
        self.halo = gw.SimulatedHaloLink(boundaries, task.halo_method(), steps=task.steps, seed=self.plan.seed)
        self.networks: list[GraphNetwork] = [copy.deepcopy(self.model) for _ in self.subgraphs]  # type: ignore[misc]
        for network in self.networks:
            for own, shared in zip(network.parameters(), self.model.parameters()):
                own.data = shared.data

    def backward(self, step: int) -> float:
        """Fill every worker's row, reduce the rows, and put the mean into ``.grad``; return the mean loss."""
        decay = self._decay()
        losses = torch.stack([share_of_loss(out, part) for out, part in zip(self._logits(), self.subgraphs)])
        own = [list(network.parameters()) for network in self.networks]
        gradients = iter(torch.autograd.grad(losses.sum(), [p for parameters in own for p in parameters]))
        for worker, parameters in enumerate(own):
            self._fill(worker, [next(gradients) for _ in parameters], decay)
        self.link.scatter_(self.link.reduce_(self.matrix))
        self.halo.next_round(losses.detach().tolist())
        return float(losses.detach().mean())

    def _logits(self) -> Sequence[Tensor]:
        features = [part.features for part in self.subgraphs]
        return forward_together(self.networks, features, self.subgraphs, self.halo)

    @torch.no_grad()
    def score(self) -> tuple[float, float]:
        """Evaluate all held-out nodes, with all rows of the halos in float32."""
        for network in self.networks:
            network.eval()
        with self.halo.evaluation():
            found = self._logits()
        for network in self.networks:
            network.train()
        totals = [0.0, 0.0, 0.0]
        for logits, part in zip(found, self.subgraphs):
            scored = self.plan.task.score(logits[part.held_out], part.labels[part.held_out])
            totals = [a + b for a, b in zip(totals, scored)]
        return totals[0] / totals[2] + self.penalty(), totals[1] / totals[2]

    def traffic(self) -> gw.Traffic:
        """Return the bytes that worker 0 would have sent and received."""
        return _joined(super().traffic(), self.halo.traffic()[0])

    def gauges(self) -> list[dict[str, float]]:
        """Return both methods' gauges of every worker's latest step."""
        return [{**own, **halo} for own, halo in zip(super().gauges(), self.halo.gauges())]
