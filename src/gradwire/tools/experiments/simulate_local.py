"""All workers in one process where each has a model of its own: between exchanges of local steps parameters differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model, link_options, score_share
from gradwire.tools.experiments.order import share

__all__ = ["SimulatedLocalEngine"]


class SimulatedLocalEngine:
    """An :class:`~gradwire.tools.experiments.engine.Engine` that plays all workers, each with its own model.

    ``model`` holds all models, and one optimizer all their parameters: it treats every parameter by itself, so that it
    is as many optimizers.
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
        """Leave every worker's own gradient in ``.grad``; return the mean loss."""
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
        """Return the values: they are means over all workers already."""
        return list(values)

    @torch.no_grad()
    def score(self) -> tuple[float, float]:
        """Evaluate the global parameters on all evaluation data, with worker 0's buffers, which all then have.

        Where workers stay different, the mean of parameters and buffers.
        """
        apart = gw.method(self.plan.method).outcomes_differ
        for model in () if apart else self.models[1:]:
            for buffer, first in zip(model.buffers(), self.models[0].buffers()):
                buffer.copy_(first)
        with self.steps.swapped():
            loss, right, count = score_share(self.plan, self.models[0], self.source.evaluation(0, 1))
        return loss / count, right / count

    def barrier(self) -> None:
        """Nothing to wait for."""

    def traffic(self) -> gw.Traffic:
        """Return the bytes that one real worker would have sent and received."""
        return self.steps.traffic()

    def gauges(self) -> list[dict[str, float]]:
        """Return what the method inside reports of every worker's latest exchange."""
        return self.steps.link.gauges()

    def record(self) -> dict[str, Any]:
        """Describe what the link chose."""
        return self.steps.link.record()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the local steps."""
        return self.steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of the local steps back."""
        self.steps.load_state_dict(state)

    def close(self) -> None:
        """Nothing to close."""
