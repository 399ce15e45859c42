"""How well fitted levels fit: variance of three bits on the gradients of ResNet-8, in the course of a training.

    python benchmarks/fitted_levels.py --data FOLDER --json benchmarks/results/fitted_levels.json

Four workers' gradients in a float32 training of ``cifar_levels.py``'s length. At some steps, the exact relative
variance sum_k (h_k - r_k) (r_k - l_k) R^2 / |g|^2 of the workers' gradients with the levels that ALQ, ALQ-N, AMQ and
AMQ-N fit to them then ("fresh"), with those that they fitted at their last update ("in use"), and what it would be if
values were what the fit takes them for: draws from normals of the blocks' means and deviations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cifar_levels import STEPS
from runs import write
from torch import Tensor, nn
from zero_level import of_block, variance

import gradwire as gw
from gradwire.experiments import tasks

WORKERS, BATCH = 4, 32
BLOCKS = (64, 32768)
UPDATES = (0, 100, 1000)
MEASURED = (0, 50, 100, 101, 200, 400, 700, 999, 1000, 1250, STEPS - 1)
METHODS = ("ALQ", "ALQN", "AMQ", "AMQN")


def fitted(method: str, block_size: int, gradients: Tensor) -> Tensor:
    """Give the levels that a method fits to the workers' gradients."""
    link = gw.SimulatedLink(
        [("g", torch.empty(gradients.shape[1]))], f"{method}(block_size={block_size})", world_size=WORKERS, min_numel=0
    )
    link.reduce_(gradients.clone())
    return link.state_dict()["global"]["levels"].double()


def measured(levels: Tensor, gradients: Tensor, block_size: int) -> float:
    """Give the relative variance of the workers' gradients, a mean weighted by their squares."""
    squares = gradients.double().square().sum(1)
    found = [variance(levels, g.double(), block_size, norm=2) for g in gradients]
    return float((torch.tensor(found, dtype=torch.float64) * squares).sum() / squares.sum())


def predicted(levels: Tensor, gradients: Tensor, block_size: int) -> float:
    """Give what it would be if every block's values were draws from a normal of its mean and deviation."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    for v in (v for g in gradients.double() for v in g.split(block_size)):
        drawn = v.mean() + v.std(correction=0) * torch.randn(v.numel(), generator=generator, dtype=torch.float64)
        norm = v.norm()
        total += of_block(levels, drawn.clamp(-norm, norm), norm)
    return total / float(gradients.double().square().sum())


def train(task: Any, model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Train by the mean of the workers' gradients; yield each step's gradients, one worker a row."""
    source, optimizer = task.load(), task.build_optimizer(model)
    parameters = list(model.parameters())
    for step in range(STEPS):
        indices = torch.randint(source.samples, (WORKERS * BATCH,), generator=torch.Generator().manual_seed(step))
        inputs, targets = source.batch(indices, slice(0, WORKERS * BATCH), seed=0, step=step)
        rows = []
        for x, y in zip(inputs.split(BATCH), targets.split(BATCH)):
            found = torch.autograd.grad(task.loss(model(x), y), parameters)
            rows.append(torch.cat([(g + task.decay * p.detach()).reshape(-1) for g, p in zip(found, parameters)]))
        gradients = torch.stack(rows)
        yield step, gradients
        for p, part in zip(parameters, gradients.mean(0).split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        optimizer.step()


def main() -> int:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = tasks.build("cifar10", data=chosen.data, steps=STEPS)
    rows: list[dict[str, Any]] = []
    in_use: dict[tuple[str, int], Tensor] = {}
    for step, gradients in train(task, task.build_model()):
        for block_size in BLOCKS if step in MEASURED or step in UPDATES else ():
            for method in METHODS:
                fresh = fitted(method, block_size, gradients)
                if step in UPDATES:
                    in_use[method, block_size] = fresh
                row = {
                    "step": step,
                    "block_size": block_size,
                    "method": method,
                    "fresh": measured(fresh, gradients, block_size),
                    "in_use": measured(in_use[method, block_size], gradients, block_size),
                    "fresh_if_normal": predicted(fresh, gradients, block_size),
                    "fresh_levels": fresh.tolist(),
                }
                rows.append(row)
                told = ", ".join(f"{k} {row[k]:.3g}" for k in ("fresh", "in_use", "fresh_if_normal"))
                print(f"step {step:4d}, blocks of {block_size:5d}, {method:5s}: {told}", flush=True)
    write(chosen.json, workers=WORKERS, elements=gradients.shape[1], rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
