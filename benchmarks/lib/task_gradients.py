"""Gradients of the library's own tasks in the course of training, of many distinct batches, as real data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradwire.tools.experiments.tasks import Task

__all__ = ["sampled", "task_gradients"]


def task_gradients(task: Task, workers: Mapping[int, int], batch: int) -> Iterator[tuple[int, Tensor]]:
    """Train on batches of ``task.batch``; after some steps yield the gradients of other batches, one a worker.

    Args:
        task: What is trained, by its own optimizer and learning rates.
        workers: How many gradients are taken at the same parameters, by the number of steps before.
        batch: Samples of each, drawn without replacement from one draw, so that no two workers share a sample.

    Yields:
        The number of steps, and float32 ``[workers, numel]``: all parameters one after the other, with the weight decay
        that the task adds to its loss.
    """
    torch.manual_seed(0)
    model, source = task.build_model(), task.load()
    optimizer, parameters = task.build_optimizer(model), list(model.parameters())
    decayed = {id(p) for p in task.decayed(model)}

    def gradient(indices: Tensor, step: int) -> list[Tensor]:
        inputs, targets = source.batch(indices, slice(0, len(indices)), seed=0, step=step)
        found = torch.autograd.grad(task.loss(model(inputs), targets), parameters)
        return [g + task.decay * p.detach() if id(p) in decayed else g for g, p in zip(found, parameters)]

    for step in range(max(workers) + 1):
        if step in workers:
            drawn = torch.randperm(source.samples, generator=torch.Generator().manual_seed(-1 - step))
            parts = [drawn[(torch.arange(batch) + r * batch) % len(drawn)] for r in range(workers[step])]
            yield step, torch.stack([torch.cat([g.reshape(-1) for g in gradient(part, step)]) for part in parts])
        indices = torch.randint(source.samples, (task.batch,), generator=torch.Generator().manual_seed(step))
        for p, g in zip(parameters, gradient(indices, step)):
            p.grad = g
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        optimizer.step()


def sampled(rows: Tensor, numel: int, piece: int = 1024) -> Tensor:
    """Return ``numel`` elements of each row: pieces of neighbours, evenly spaced over the whole row, in order.

    Example:
        >>> sampled(torch.arange(12.0)[None], 4, 2)
        tensor([[0., 1., 6., 7.]])
    """
    pieces = rows.shape[1] // piece
    wanted = numel // piece
    if wanted > pieces:
        raise ValueError(f"{rows.shape[1]} elements have no {wanted} pieces of {piece}")
    chosen = torch.arange(wanted) * pieces // wanted
    return rows[:, : pieces * piece].reshape(len(rows), pieces, piece)[:, chosen].reshape(len(rows), -1).contiguous()
