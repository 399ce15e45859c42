"""Engines that play all workers in one process: with one model, or with a model for each under local steps.

Every floating-point operation is that of a real worker, on the same shapes: forward and backward on the worker's share,
``g + decay * w`` for each weight tensor, then the link's own arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import LinkEngine, build_model, link_options, score_share
from gradwire.tools.experiments.order import share


def places_of(parameters: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Return views of a vector that have the parameters' shapes, one after the other, each in memory order."""
    views, offset = [], 0
    for parameter in parameters:
        views.append(vector[offset:].as_strided(parameter.shape, parameter.stride()))
        offset += parameter.numel()
    return views


class SimulatedEngine(LinkEngine):
    """An :class:`~gradwire.tools.experiments.engine.Engine` that plays all workers, with a row of gradients for each.

    Batch-normalisation buffers follow DDP: every worker starts a step with worker 0's, and worker 0's are kept.
    """

    link: gw.SimulatedLink

    def __init__(self, plan: RunConfig) -> None:
        self.plan, self.rank, self.world_size = plan, 0, plan.workers
        self.model = build_model(plan)
        self.load()
        self.local = False
        self.optimizer = plan.task.build_optimizer(self.model)
        options = link_options(plan, self.optimizer)
        self.link = gw.SimulatedLink(self.model.named_parameters(), plan.method, plan.workers, **options)
        self.parameters = list(self.model.parameters())
        self.buffers = list(self.model.buffers())
        self.matrix = torch.empty(plan.workers, self.link.numel)
        self.places = [places_of(self.parameters, row) for row in self.matrix]

    def load(self) -> None:
        """Read the workers' data."""
        self.source = self.plan.task.load()
        self.order = self.plan.task.order(self.plan.seed, self.source.samples, self.world_size)

    def _decay(self) -> list[Tensor | None]:
        if not self.plan.task.decay:
            return [None] * len(self.parameters)
        weights = {id(parameter) for parameter in self.plan.task.decayed(self.model)}
        with torch.no_grad():
            return [p * self.plan.task.decay if id(p) in weights else None for p in self.parameters]

    def backward(self, step: int) -> float:
        """Fill every worker's row, reduce the rows, and put the mean into ``.grad``; return the mean loss."""
        indices, decay = self.order.indices(step), self._decay()
        whole = slice(0, self.order.batch)
        inputs, targets = self.source.batch(indices, whole, seed=self.plan.seed, step=step)
        before = [buffer.clone() for buffer in self.buffers]
        kept: list[Tensor] = []
        losses = []
        for worker in range(self.world_size):
            part = share(self.order.batch, worker, self.world_size)
            if worker:
                self._set_buffers(before)
            losses.append(self._worker(worker, inputs[part], targets[part], decay))
            if not worker:
                kept = [buffer.clone() for buffer in self.buffers]
        self._set_buffers(kept)
        self.link.scatter_(self.link.reduce_(self.matrix))
        return float(torch.stack(losses).mean())

    def _worker(self, worker: int, inputs: Tensor, targets: Tensor, decay: list[Tensor | None]) -> Tensor:
        loss = self.plan.task.loss(self.model(inputs), targets)
        self._fill(worker, torch.autograd.grad(loss, self.parameters), decay)
        return loss.detach()

    def _fill(self, worker: int, gradients: Sequence[Tensor], decay: list[Tensor | None]) -> None:
        """Write a worker's gradients plus weight decay into its row."""
        for place, gradient, term in zip(self.places[worker], gradients, decay):
            if term is None:
                place.copy_(gradient)
            else:
                torch.add(gradient, term, out=place)

    @torch.no_grad()
    def _set_buffers(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.buffers, values):
            buffer.copy_(value)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the values, which are means over all workers already."""
        return list(values)

    def score(self) -> tuple[float, float]:
        """Evaluate on all evaluation data."""
        loss, right, count = score_share(self.plan, self.model, self.source.evaluation(0, 1))
        return loss / count + self.penalty(), right / count

    def barrier(self) -> None:
        """Do nothing: there are no other processes."""

    def gauges(self) -> list[dict[str, float]]:
        """Return the method's gauges of every worker's latest step."""
        return list(self.link.gauges())

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


class SimulatedLocalEngine:
    """An :class:`~gradwire.tools.experiments.engine.Engine` that plays all workers, each with its own model.

    ``model`` holds all models, and one optimizer steps all their parameters: it treats every parameter by itself, like
    one optimizer for each worker.
    """

    def __init__(self, plan: RunConfig) -> None:
        self.plan, self.rank, self.world_size, self.local = plan, 0, plan.workers, True
        self.models = [build_model(plan) for _ in range(plan.workers)]
        self.model: nn.Module = nn.ModuleList(self.models)
        self.source = plan.task.load()
        self.order = plan.task.order(plan.seed, self.source.samples, plan.workers)
        for parameter in (p for model in self.models for p in plan.task.decayed(model)) if plan.task.decay else ():
            parameter.register_hook(self._decay(parameter))
        self.optimizer = plan.task.build_optimizer(self.model)
        options = {name: value for name, value in link_options(plan, self.optimizer).items() if name != "optimizer"}
        self.steps = gw.SimulatedLocalSteps([m.named_parameters() for m in self.models], plan.method, **options)
        self.steps.buffers = [[b for b in m.buffers() if b.is_floating_point()] for m in self.models]
        self.optimizer.register_step_post_hook(lambda *_: self.steps.after_step())

    def _decay(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        factor = self.plan.task.decay
        return lambda gradient: gradient + parameter.detach() * factor

    def backward(self, step: int) -> float:
        """Compute every worker's own gradient into ``.grad``; return the mean loss."""
        whole = slice(0, self.order.batch)
        inputs, targets = self.source.batch(self.order.indices(step), whole, seed=self.plan.seed, step=step)
        losses = []
        for worker, model in enumerate(self.models):
            part = share(self.order.batch, worker, self.world_size)
            loss = self.plan.task.loss(model(inputs[part]), targets[part])
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the values, which are means over all workers already."""
        return list(values)

    def penalty(self) -> float:
        """Return the mean over workers of the penalty of the task, each at its own parameters."""
        return statistics.fmean(map(self.plan.task.penalty, self.models))

    @torch.no_grad()
    def score(self) -> tuple[float, float]:
        """Evaluate the global parameters on all evaluation data, with worker 0's buffers, which are copied to all.

        If workers' parameters stay different (gossip), the mean of parameters and buffers is evaluated.
        """
        apart = gw.method(self.plan.method).traits.outcomes_differ
        for model in () if apart else self.models[1:]:
            for buffer, first in zip(model.buffers(), self.models[0].buffers()):
                buffer.copy_(first)
        with self.steps.swapped():
            loss, right, count = score_share(self.plan, self.models[0], self.source.evaluation(0, 1))
            penalty = self.plan.task.penalty(self.models[0])
        return loss / count + penalty, right / count

    def barrier(self) -> None:
        """Do nothing: there are no other processes."""

    def traffic(self) -> gw.Traffic:
        """Return the bytes that one real worker would have sent and received."""
        return self.steps.traffic()

    def gauges(self) -> list[dict[str, float]]:
        """Return the inner method's gauges of every worker's latest exchange."""
        return self.steps.link.gauges()

    def record(self) -> dict[str, Any]:
        """Describe what the link chose."""
        return self.steps.link.record()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the local steps."""
        return self.steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.steps.load_state_dict(state)

    def close(self) -> None:
        """Do nothing: there is no connection to close."""
