"""Measure how well fitted levels fit: the variance of three bits on the gradients of ResNet-8, as it is trained.

    python benchmarks/claims/fitted_levels.py --data FOLDER --json benchmarks/results/claims/fitted_levels.json

The gradients are those of four workers in a float32 training of ``cifar_levels.py``'s length. At some steps, this
computes the exact relative variance sum_k (h_k - r_k) (r_k - l_k) R^2 / |g|^2 of the workers' gradients with the levels
that ALQ, ALQ-N, AMQ and AMQ-N fit to them then ("fresh"), by either of their models, and with those that they fitted at
their last update ("in_use"); and what it would be if values were what the normal model takes them for, draws from
normals of the blocks' means and deviations ("fresh_if_normal").

For comparison, it does the same in long blocks for levels of ALQ's normal model by the authors' solver, which takes
ten finite-difference gradient steps of rate 1 for each level in each of thirty sweeps, from quantiles, even and
exponential levels, and keeps the best by the model; and for the levels that the authors' notebook shows for ResNet-32.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.claims.cifar_gradients import gradients, parser
from benchmarks.claims.cifar_levels import STEPS
from benchmarks.claims.zero_level import of_block, variance
from benchmarks.lib.runs import write
from gradwire.methods.levels.level_fitting import Mixture, powers

WORKERS = 4
BLOCKS = (64, 8192, 32768)
UPDATES = (0, 100, 1000)
MEASURED = (0, 50, 100, 101, 200, 400, 700, 999, 1000, 1250, STEPS - 1)
METHODS = ("ALQ", "ALQN", "AMQ", "AMQN")
MODELS = ("normal", "histogram")
LONG = 8192
"""Block size from which on the authors' levels are measured, too."""

PUBLISHED = (0.005, 0.018, 0.126, 1.0)
"""The positive half of ALQ's levels in the authors' notebook: ResNet-32, whose blocks are 8192 by default, 3 bits."""

Fits = dict[tuple[str, str], Tensor]


def fitted(method: str, model: str, block_size: int, every: Tensor) -> Tensor:
    """Return the levels that a method fits to the workers' gradients."""
    spec = f"{method}(block_size={block_size}, model={model!r})"
    link = gw.SimulatedLink([("g", torch.empty(every.shape[1]))], spec, world_size=WORKERS, min_numel=0)
    link.reduce_(every.clone())
    return link.state_dict()["global"]["levels"].double()


def normals(every: Tensor, block_size: int) -> Mixture:
    """Return the normal model of the workers' gradients: a truncated normal for each block, with the weight R^2 d."""
    blocks = [v for g in every.double() for v in g.split(block_size)]
    rows = [(v.mean() / v.norm(), v.std(correction=0) / v.norm(), v.square().sum() * v.numel()) for v in blocks]
    return Mixture(*(torch.stack(column) for column in zip(*rows))).merged()


def by_the_authors(model: Mixture, count: int = 8) -> Tensor:
    """Return the best of three sets of levels, each moved by the authors' gradient steps."""
    wanted = torch.arange(1, count - 1, dtype=torch.float64) / (count - 1)
    inner = model.inverse(wanted, torch.full_like(wanted, -1), torch.full_like(wanted, 1)).tolist()
    starts = [[-1.0, *inner, 1.0], [-1 + 2 * j / (count - 1) for j in range(count)], powers(0.5, count)]
    ends = [moved(model, levels) for levels in starts]
    return torch.tensor(min(ends, key=model.variance), dtype=torch.float64)


def moved(model: Mixture, levels: list[float], sweeps: int = 30, steps: int = 10) -> list[float]:
    """Return the levels after sweeps of gradient steps; a step out of the neighbours' interval is not taken."""
    x = list(levels)
    for _, j in itertools.product(range(sweeps), range(1, len(x) - 1)):
        low, high = x[j - 1], x[j + 1]
        eps = (high - low) / 1000
        for _ in range(steps):
            slope = (model.variance([low, x[j] + eps, high]) - model.variance([low, x[j] - eps, high])) / (2 * eps)
            if low < x[j] - slope < high:
                x[j] -= slope
    return x


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


def all_fits(every: Tensor, block_size: int) -> Fits:
    """Return the levels of all methods and models, and the authors'."""
    found = {(method, model): fitted(method, model, block_size, every) for method in METHODS for model in MODELS}
    if block_size >= LONG:
        found["ALQ", "normal, authors' solver"] = by_the_authors(normals(every, block_size))
        half = torch.tensor(PUBLISHED, dtype=torch.float64)
        found["ALQ", "published"] = torch.cat([-half.flip(0), half])
    return found


def samples(data: str, path: Path | None) -> Iterator[tuple[int, Tensor]]:
    """Yield the steps that are measured and their gradients; with a path, from there, or to there for another time."""
    wanted = sorted({*MEASURED, *UPDATES})
    if path and path.exists():
        yield from torch.load(path).items()
        return
    found = {}
    for step, every in gradients(data, WORKERS):
        if step in wanted:
            found[step] = every
            yield step, every
    if path:
        torch.save(found, path)


def main() -> int:
    """Train, measure, print."""
    reader = parser(__doc__)
    reader.add_argument("--gradients", type=Path, help="where the gradients are kept, so that none trains twice")
    chosen = reader.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    in_use: dict[int, Fits] = {}
    for step, found in samples(chosen.data, chosen.gradients):
        for block_size in BLOCKS:
            fits = all_fits(found, block_size)
            if step in UPDATES:
                in_use[block_size] = fits
            for (method, model), fresh in fits.items():
                row = {
                    "step": step,
                    "block_size": block_size,
                    "method": method,
                    "model": model,
                    "fresh": measured(fresh, found, block_size),
                    "in_use": measured(in_use[block_size][method, model], found, block_size),
                    "fresh_if_normal": predicted(fresh, found, block_size),
                    "fresh_levels": fresh.tolist(),
                }
                rows.append(row)
                told = ", ".join(f"{k} {row[k]:.3g}" for k in ("fresh", "in_use", "fresh_if_normal"))
                print(f"step {step:4d}, blocks of {block_size:5d}, {method:4s} {model:23s}: {told}", flush=True)
    write(chosen.json, workers=WORKERS, elements=found.shape[1], rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
