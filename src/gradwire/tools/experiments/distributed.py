"""The engine of a worker in a process group: DDP with a link attached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import LinkEngine, build_model, link_options, score_share
from gradwire.tools.experiments.order import share


class DistributedEngine(LinkEngine):
    """An :class:`~gradwire.tools.experiments.engine.Engine` on the default process group: DDP with a link attached."""

    link: gw.Link

    def __init__(self, plan: RunConfig) -> None:
        self.plan, self.rank, self.world_size = plan, dist.get_rank(), dist.get_world_size()
        self.model: nn.Module = build_model(plan)
        self.load()
        if plan.task.decay:
            for parameter in plan.task.decayed(self.model):
                parameter.register_hook(self._decay(parameter))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = plan.task.build_optimizer(self.model)
        self.link = gw.attach(self.ddp, plan.method, **link_options(plan, self.optimizer))
        method = gw.method(plan.method)
        self.local, self.apart = method.traits.local_steps > 0, method.traits.outcomes_differ

    def load(self) -> None:
        """Read this worker's data."""
        self.source = self.plan.task.load()
        self.order = self.plan.task.order(self.plan.seed, self.source.samples, self.world_size)
        self.part = share(self.order.batch, self.rank, self.world_size)

    def loss(self, step: int) -> Tensor:
        """Return this worker's mean loss of a step."""
        inputs, targets = self.source.batch(self.order.indices(step), self.part, seed=self.plan.seed, step=step)
        return self.plan.task.loss(self.ddp(inputs), targets)

    def score_own(self) -> list[float]:
        """Return the summed loss, the right answers and all answers on this worker's share of the evaluation data."""
        return score_share(self.plan, self.model, self.source.evaluation(self.rank, self.world_size))

    def _decay(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        """Add the decay term to the gradient before DDP sees it, as part of the differentiated loss."""
        factor = self.plan.task.decay
        return lambda gradient: gradient + parameter.detach() * factor

    def backward(self, step: int) -> float:
        """Run this worker's share of the batch; DDP and the link put the mean gradient into ``.grad``.

        Raises:
            GradwireError: the link's own error, instead of DDP's mangled one.
        """
        loss = self.loss(step)
        try:
            loss.backward()
        except RuntimeError as error:
            if self.link.error is not None:
                raise self.link.error from error
            raise
        return float(loss.detach())

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all workers."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) / self.world_size for value in total]

    def score(self) -> tuple[float, float]:
        """Evaluate a share of the data on every rank, with rank 0's buffers, and add up.

        If ranks' parameters stay different (gossip), the mean of parameters and buffers is evaluated.
        """
        for buffer in () if self.apart else self.model.buffers():
            dist.broadcast(buffer, 0)
        with self.link.global_parameters() if self.local else contextlib.nullcontext():
            own, penalty = self.score_own(), self.penalty()
        totals = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(totals)
        loss, right, count = totals.tolist()
        return loss / count + penalty, right / count

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def gauges(self) -> list[dict[str, float]]:
        """Return the method's gauges of this rank's latest step."""
        return [self.link.gauges()]

    def close(self) -> None:
        """Close the link; no backward pass may follow."""
        self.link.close()
