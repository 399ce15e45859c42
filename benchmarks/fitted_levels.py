"""How well fitted levels fit: variance of three bits on the gradients of ResNet-8, in the course of a training.

    python benchmarks/fitted_levels.py --data FOLDER --json benchmarks/results/fitted_levels.json

Four workers' gradients in a float32 training of ``cifar_levels.py``'s length. At some steps, the exact relative
variance sum_k (h_k - r_k) (r_k - l_k) R^2 / |g|^2 of the workers' gradients with the levels that ALQ, ALQ-N, AMQ and
AMQ-N fit to them then ("fresh"), with those that they fitted at their last update ("in use"), and what it would be if
values were what the fit takes them for: draws from normals of the blocks' means and deviations.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from cifar_gradients import arguments, gradients
from cifar_levels import STEPS
from runs import write
from torch import Tensor
from zero_level import of_block, variance

import gradwire as gw

WORKERS = 4
BLOCKS = (64, 32768)
UPDATES = (0, 100, 1000)
MEASURED = (0, 50, 100, 101, 200, 400, 700, 999, 1000, 1250, STEPS - 1)
METHODS = ("ALQ", "ALQN", "AMQ", "AMQN")


def fitted(method: str, block_size: int, every: Tensor) -> Tensor:
    """Return the levels that a method fits to the workers' gradients."""
    link = gw.SimulatedLink(
        [("g", torch.empty(every.shape[1]))], f"{method}(block_size={block_size})", world_size=WORKERS, min_numel=0
    )
    link.reduce_(every.clone())
    return link.state_dict()["global"]["levels"].double()


def measured(levels: Tensor, every: Tensor, block_size: int) -> float:
    """Return the relative variance of the workers' gradients, a mean weighted by their squares."""
    squares = every.double().square().sum(1)
    found = [variance(levels, g.double(), block_size, norm=2) for g in every]
    return float((torch.tensor(found, dtype=torch.float64) * squares).sum() / squares.sum())


def predicted(levels: Tensor, every: Tensor, block_size: int) -> float:
    """Return what it would be if every block's values were draws from a normal of its mean and deviation."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    for v in (v for g in every.double() for v in g.split(block_size)):
        drawn = v.mean() + v.std(correction=0) * torch.randn(v.numel(), generator=generator, dtype=torch.float64)
        norm = v.norm()
        total += of_block(levels, drawn.clamp(-norm, norm), norm)
    return total / float(every.double().square().sum())


def main() -> int:
    """Train, measure, print."""
    chosen = arguments(__doc__)
    rows: list[dict[str, Any]] = []
    in_use: dict[tuple[str, int], Tensor] = {}
    for step, found in gradients(chosen.data, WORKERS):
        for block_size in BLOCKS if step in MEASURED or step in UPDATES else ():
            for method in METHODS:
                fresh = fitted(method, block_size, found)
                if step in UPDATES:
                    in_use[method, block_size] = fresh
                row = {
                    "step": step,
                    "block_size": block_size,
                    "method": method,
                    "fresh": measured(fresh, found, block_size),
                    "in_use": measured(in_use[method, block_size], found, block_size),
                    "fresh_if_normal": predicted(fresh, found, block_size),
                    "fresh_levels": fresh.tolist(),
                }
                rows.append(row)
                told = ", ".join(f"{k} {row[k]:.3g}" for k in ("fresh", "in_use", "fresh_if_normal"))
                print(f"step {step:4d}, blocks of {block_size:5d}, {method:5s}: {told}", flush=True)
    write(chosen.json, workers=WORKERS, elements=found.shape[1], rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
