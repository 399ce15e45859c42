"""A gradient of the ``text`` task, as real data for what is measured on one vector."""

from __future__ import annotations

import torch

from gradwire.tools.experiments import tasks

__all__ = ["real_gradient"]


def real_gradient(steps: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Train the text task's model for some steps by plain SGD on batches ``first`` on; give the next gradient."""
    torch.manual_seed(0)
    task = tasks.build("text")
    model, source = task.build_model(), task.load()
    optimizer = task.build_optimizer(model)
    for step in range(steps + 1):
        indices = torch.randint(source.samples, (task.batch,), generator=torch.Generator().manual_seed(first + step))
        inputs, targets = source.batch(indices, slice(0, task.batch), seed=0, step=step)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        if step < steps:
            optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
