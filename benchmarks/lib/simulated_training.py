"""A training of a built-in task with all workers in this process, as ``gradwire train --simulate`` does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

__all__ = ["trained"]


def trained(
    task: str,
    method: str,
    seed: int,
    *,
    workers: int = 4,
    changed: Callable[[SimulatedEngine, torch.Tensor], None] | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[float, float]:
    """Train; return loss and accuracy on held-out data.

    Args:
        changed: Changes the workers' gradients, ``[workers, numel]``, in place before they are exchanged.
        options: Of the link, as of ``RunConfig``.
        settings: Of the task.
    """
    chosen = dataclasses.replace(tasks.build(task), **settings)
    plan = RunConfig(task=chosen, method=method, workers=workers, simulate=True, seed=seed, **options or {})
    engine = SimulatedEngine(plan)
    reduce_ = engine.link.reduce_

    def reduced(gradients: torch.Tensor) -> torch.Tensor:
        if changed is not None:
            changed(engine, gradients)
        return reduce_(gradients)

    engine.link.reduce_ = reduced  # type: ignore[method-assign]
    for step in range(chosen.steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = chosen.learning_rate(step)
        engine.backward(step)
        engine.optimizer.step()
    return engine.score()
