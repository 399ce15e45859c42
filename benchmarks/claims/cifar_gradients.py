"""Gradients of ResNet-8 in the course of ``cifar_levels.py``'s training, in float32, for what is measured on them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.claims.cifar_levels import STEPS
from gradwire.tools.experiments import tasks

__all__ = ["gradients", "parser"]

BATCH = 32
"""Of a worker."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of where the data lies, and where the record goes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--json", type=Path)
    return parser


def gradients(data: str, workers: int) -> Iterator[tuple[int, Tensor]]:
    """Train by the mean of the workers' gradients; yield each step and its gradients, one worker a row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = tasks.build("cifar10", data=data, steps=STEPS)
    model, source = task.build_model(), task.load()
    optimizer, parameters = task.build_optimizer(model), list(model.parameters())
    for step in range(STEPS):
        indices = torch.randint(source.samples, (workers * BATCH,), generator=torch.Generator().manual_seed(step))
        inputs, targets = source.batch(indices, slice(0, workers * BATCH), seed=0, step=step)
        rows = []
        for x, y in zip(inputs.split(BATCH), targets.split(BATCH)):
            found = torch.autograd.grad(task.loss(model(x), y), parameters)
            rows.append(torch.cat([(g + task.decay * p.detach()).reshape(-1) for g, p in zip(found, parameters)]))
        every = torch.stack(rows)
        yield step, every
        for p, part in zip(parameters, every.mean(0).split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        optimizer.step()
