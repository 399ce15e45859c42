"""Who computes a step's mean gradient: what the training loop needs of a real group and of a simulation alike."""

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
    """One process's part in the training of all workers."""

    rank: int
    world_size: int
    model: nn.Module
    local: bool
    """Whether each rank has a model and an optimizer of its own between exchanges."""
    optimizer: torch.optim.Optimizer

    def backward(self, step: int) -> float:
        """Leave the workers' mean gradient of ``step`` in ``.grad``; return this process's mean loss."""

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all workers of this process's values."""

    def score(self) -> tuple[float, float]:
        """Evaluate the model: mean loss and share of right answers, the same on all ranks."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def traffic(self) -> gw.Traffic:
        """Return the bytes since the engine was built."""

    def gauges(self) -> Sequence[Mapping[str, float]]:
        """Return what the method reports of the latest step, of each worker that this process plays."""

    def record(self) -> dict[str, Any]:
        """Describe what the link chose."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's link state, tensors only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's link state back."""


def now_s() -> float:
    """Return a clock's reading in seconds."""
    return time.perf_counter()


def build_model(plan: RunConfig) -> nn.Module:
    """Build the task's model from the run's seed, leaving torch's global generator as it was."""
    low, high = parameter_key(plan.seed, "initial weights", "experiments")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(low | high << 32)
        return plan.task.build_model()


def link_options(plan: RunConfig, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of the link: the plan's, and the optimizer for a method that looks at it or at its steps."""
    method = gw.method(plan.method)
    known = {"optimizer": optimizer} if method.traits.needs_learning_rates or method.traits.local_steps else {}
    return {**plan.link_options(), **known}


@torch.no_grad()
def score_share(plan: RunConfig, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return summed loss, right answers and answers over ``batches``, with the model in evaluation mode."""
    totals = [0.0, 0.0, 0.0]
    model.eval()
    for inputs, targets in batches:
        for i, value in enumerate(plan.task.score(model(inputs), targets)):
            totals[i] += value
    model.train()
    return totals
