"""What the gradient of one worker tells of another's: mutual information an element, beside that of what it is made of.

    python benchmarks/claims/lgc_information.py --mnist FOLDER --cifar10 FOLDER \\
        --json benchmarks/results/claims/lgc_information.json

LeNet on MNIST and ResNet-8 on CIFAR-10 are trained by float32 gradients of 4 simulated workers, at the rates of
``benchmarks/training/lgc.py``. In some steps the elements of a parameter, in the gradients of workers 0 and 1, are
sorted into BINS classes of equal size each: a pair of classes is a sample, and the elements are the samples.
``information`` is what is known of one class by the other, in bits, less its bias (BINS - 1)^2 / (2 n ln 2) for n
independent pairs; ``entropy`` is that of a class, so that ``share`` of it is known. ``chance`` is the share with the
elements of one worker in a random order, which must be about 0.

Elements share their size: where one worker's is large, so is the other's, whatever the signs. ``sizes`` is the share
for absolute values. ``cosine`` is that of the two gradients, and ``gaussian`` the share of two normal vectors with that
cosine, -log2(1 - cosine^2) / (2 entropy).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.lgc_study import RATE, USUAL
from benchmarks.lib.runs import write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build

WORKERS, BINS, SEEDS = 4, 16, (0, 1, 2)
STEPS = (1, 10, 30, 100, 300)
LEAST = 16 * BINS**2
"""Elements of the smallest parameter that is measured: sixteen for each pair of classes."""

Row = dict[str, Any]


class Watched(SimulatedEngine):
    """A training that keeps the gradients of all workers in the latest step."""

    rows: Tensor

    def __init__(self, task: str, data: Path, seed: int) -> None:
        made = build(task, data=str(data), lr=RATE[task], momentum=0.9, optimizer="sgd")
        super().__init__(RunConfig(task=made, method="FP32()", workers=WORKERS, simulate=True, seed=seed))
        reduce = self.link.reduce_

        def kept(rows: Tensor) -> Tensor:
            self.rows = rows.clone()
            return reduce(rows)

        self.link.reduce_ = kept  # type: ignore[method-assign]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of each parameter, ``[workers, elements]``."""
        at = 0
        for name, p in self.model.named_parameters():
            yield name, self.rows[:, at : at + p.numel()]
            at += p.numel()


def classes(x: Tensor) -> Tensor:
    """Sort elements into classes of equal size; equal elements are in the same class."""
    limits = torch.quantile(x.double(), torch.arange(1, BINS, dtype=torch.float64) / BINS)
    return torch.bucketize(x.double(), limits)


def entropy(counts: Tensor) -> float:
    """Return the entropy of classes with these counts, in bits."""
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log2()).sum())


def information(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the mutual information of two vectors' classes less its bias, and the entropy of the second's, in bits."""
    a, b = classes(x), classes(y)
    together = torch.zeros(BINS, BINS).index_put_((a, b), torch.ones(()), accumulate=True)
    there = (int((together.sum(1) > 0).sum()) - 1) * (int((together.sum(0) > 0).sum()) - 1)
    bias = there / (2 * x.numel() * math.log(2))
    own = entropy(together.sum(0))
    return entropy(together.sum(1)) + own - entropy(together.flatten()) - bias, own


def measured(pair: Tensor, seed: int) -> Row:
    """Return what two workers' gradients of a parameter, ``[2, elements]``, share."""
    x, y = pair
    bits, own = information(x, y)
    shuffled = y[torch.randperm(y.numel(), generator=torch.Generator().manual_seed(seed))]
    sizes, size_bits = information(x.abs(), y.abs())
    cosine = float(torch.dot(x.double(), y.double()) / (x.double().norm() * y.double().norm()))
    row = {"information": bits, "entropy": own, "share": bits / own, "chance": information(x, shuffled)[0] / own}
    row |= {"sizes": sizes / size_bits, "cosine": cosine}
    return row | {"gaussian": -math.log2(1 - cosine**2) / (2 * own)}


def rows_of(task: str, data: Path, seed: int) -> list[Row]:
    """Train, and measure every large parameter in each of :data:`STEPS`."""
    engine, rows = Watched(task, data, seed), []
    for step in range(max(STEPS)):
        for group in engine.optimizer.param_groups:
            group["lr"] = engine.plan.task.learning_rate(step)
        engine.backward(step)
        engine.optimizer.step()
        if step + 1 not in STEPS:
            continue
        for name, gradients in engine.gradients():
            if gradients.shape[1] >= LEAST and gradients.shape[1] >= USUAL:
                named = {"task": task, "seed": seed, "step": step + 1, "parameter": name}
                rows.append({**named, "elements": gradients.shape[1], **measured(gradients[:2], seed)})
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """Return the shares by task and step: mean and deviation over seeds of the mean weighted by elements."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for step in STEPS:
            kept = {}
            for key in ("share", "chance", "sizes", "cosine", "gaussian"):
                of_seeds = []
                for seed in SEEDS:
                    chosen = [r for r in rows if (r["task"], r["step"], r["seed"]) == (task, step, seed)]
                    of_seeds.append(sum(r[key] * r["elements"] for r in chosen) / sum(r["elements"] for r in chosen))
                kept |= {key: mean(of_seeds), f"{key}_sd": stdev(of_seeds)}
            found.append({"task": task, "step": step, **kept})
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {"mnist": given.mnist, "cifar10": given.cifar10}
    rows = [row for task, data in tasks.items() for seed in SEEDS for row in rows_of(task, data, seed)]
    for row in summary(rows):
        print(*(f"{key} {value:.3g}" if isinstance(value, float) else value for key, value in row.items()))
    write(given.json, workers=WORKERS, bins=BINS, seeds=SEEDS, summary=summary(rows), rows=rows)


if __name__ == "__main__":
    main()
