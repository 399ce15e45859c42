"""The interface of engines, which compute a step's mean gradient in a real group or a simulation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.seeds import parameter_key
from gradwire.tools.experiments.config import RunConfig


class Engine(Protocol):
    """Computes the gradients of this process's worker, or of all simulated workers."""

    rank: int
    world_size: int
    model: nn.Module
    local: bool
    """Whether each rank has a model and an optimizer of its own between exchanges."""
    optimizer: torch.optim.Optimizer

    def backward(self, step: int) -> float:
        """Compute the mean gradient of ``step`` into ``.grad``; return this process's mean loss (no penalty)."""

    def penalty(self) -> float:
        """Return the mean over this process's workers of the penalty of the task, each at its own parameters."""

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all workers of this process's values."""

    def score(self) -> tuple[float, float]:
        """Evaluate the model; return mean loss with penalty, and share of right answers, the same on all ranks."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def traffic(self) -> gw.Traffic:
        """Return the traffic since the engine was built."""

    def gauges(self) -> Sequence[Mapping[str, float]]:
        """Return the method's gauges of the latest step, for each worker of this process."""

    def record(self) -> dict[str, Any]:
        """Describe what the link chose."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's link state, tensors only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""


class LinkEngine:
    """Base of the engines around one link: its traffic, record and state."""

    plan: RunConfig
    model: nn.Module
    link: gw.Link | gw.SimulatedLink

    def penalty(self) -> float:
        """Return the penalty of the task at this process's parameters."""
        return self.plan.task.penalty(self.model)

    def traffic(self) -> gw.Traffic:
        """Return the traffic of this rank, or in a simulation that of a real worker."""
        return self.link.traffic()

    def record(self) -> dict[str, Any]:
        """Describe what the link chose."""
        return dict(self.link.record())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the link: this rank's, or in a simulation that of all workers."""
        return dict(self.link.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.link.load_state_dict(state)


def now_s() -> float:
    """Return the time of a monotonic clock in seconds."""
    return time.perf_counter()


def build_model(plan: RunConfig) -> nn.Module:
    """Build the task's model from the run's seed; torch's global generator is restored."""
    low, high = parameter_key(plan.seed, "initial weights", "experiments")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(low | high << 32)
        return plan.task.build_model()


def link_options(plan: RunConfig, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of the link: the run's, and the optimizer if the method needs it or counts its steps."""
    method = gw.method(plan.method)
    known = {"optimizer": optimizer} if method.traits.needs_learning_rates or method.traits.local_steps else {}
    return {**plan.link_options(), **known}


@torch.no_grad()
def score_share(plan: RunConfig, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the summed loss, the right answers and all answers over ``batches``, in evaluation mode."""
    totals = [0.0, 0.0, 0.0]
    model.eval()
    for inputs, targets in batches:
        for i, value in enumerate(plan.task.score(model(inputs), targets)):
            totals[i] += value
    model.train()
    return totals
