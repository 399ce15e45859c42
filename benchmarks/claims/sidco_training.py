"""SIDCo beside exact selection in training: a perceptron whose large layers have more than 100 000 elements.

    python benchmarks/claims/sidco_training.py --data FOLDER --json benchmarks/results/claims/sidco_training.json

``SIDCo`` takes the k largest elements of a parameter with fewer than 100 000 elements, so a comparison needs larger
ones. The model is a perceptron 784-512-512-10 on MNIST: two matrices of 401 408 and 262 144 elements, which are fitted,
and one of 5120, which is not. Four simulated workers train for 200 steps of 64 samples by SGD without momentum at a
constant rate, with error feedback::

    TopK     the k = floor(density d) largest of a parameter's d elements
    SIDCo    those above a threshold that exponentials are fitted for (SIDCo-E), three stages or an adapted number

TopK and SIDCo with adapted stages are tuned alike: by the loss on held-out data, from one seed, over the same rates; a
rate at the end of the grid moves the search on by a factor of two. Seeds 0, 1 and 2 are then trained at the best rate.
Three stages, the library's default, are trained at the rate of adapted ones. Each row has the accuracy, the loss, and
the density that workers sent: the mean over workers and steps, and the least and the largest mean over workers of a
step. ``differences`` pairs the seeds: each SIDCo's accuracy less that of TopK, in points.

Source: Abdelmoniem, Elzanaty, Alouini, Canini, MLSys 2021 (densities 0.01 and 0.001; the paper adapts the stages).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks.base import Source
from gradwire.tools.experiments.tasks.mnist import Mnist

WORKERS, STEPS, BATCH = 4, 200, 64
DENSITIES = (0.01, 0.001)
METHODS = {
    "TopK": "ErrorFeedback(TopK(density={density}))",
    "SIDCo, adapted stages": "ErrorFeedback(SIDCo(density={density}, stages=None))",
    "SIDCo, three stages": "ErrorFeedback(SIDCo(density={density}))",
}
RATES = (0.2, 0.4, 0.8)
HIGHEST, LOWEST = 3.2, 0.05
SEEDS, TUNING_SEED = (0, 1, 2), 10
SMALLEST = 1024
"""Elements of the smallest parameter that is compressed."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WidePerceptron(Mnist):
    """MNIST with a perceptron of two hidden layers of 512 units."""

    name: ClassVar[str] = "mnist"

    def build_model(self) -> nn.Module:
        """Build the perceptron, with PyTorch's initial values."""
        sizes = (784, 512, 512, 10)
        first, second, last = (nn.Linear(a, b) for a, b in pairwise(sizes))
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)

    def load(self) -> Source:
        """Read the data once for all runs."""
        return source(self.data_path())


@cache
def source(folder: Path) -> Source:
    """Return MNIST."""
    return Mnist(data=str(folder)).load()


def kept_by_rank(engine: SimulatedEngine, spec: str) -> float:
    """Return the density of TopK, which has no gauge: max(1, floor(density d)) of each compressed parameter."""
    density = gw.method(spec).compressor.density  # type: ignore[attr-defined]
    sizes = [p.numel() for p in engine.parameters if p.numel() >= SMALLEST]
    return sum(max(1, int(density * d)) for d in sizes) / sum(sizes)


def train(data: str, spec: str, lr: float, seed: int, steps: int) -> Row:
    """Train; return loss and accuracy on held-out data, and the density that was sent."""
    task = WidePerceptron(
        data=data, steps=steps, batch=BATCH, lr=lr, momentum=0.0, schedule="constant", weight_decay=0.0
    )
    engine = SimulatedEngine(RunConfig(task=task, method=spec, workers=WORKERS, simulate=True, seed=seed))
    sent: list[float] = []
    for step in range(steps):
        engine.backward(step)
        engine.optimizer.step()
        gauges = engine.gauges()
        if all("density" in gauge for gauge in gauges):
            sent.append(mean(gauge["density"] for gauge in gauges))
    loss, accuracy = engine.score()
    row = {"spec": spec, "lr": lr, "seed": seed, "loss": loss, "accuracy": 100 * accuracy}
    row["bits_per_element"] = engine.link.traffic().bits_per_element
    sent = sent or [kept_by_rank(engine, spec)]
    return row | {"density": mean(sent), "least_density": min(sent), "largest_density": max(sent)}


def tried(data: str, spec: str, steps: int, lr: float) -> Row:
    """Train from the seed that rates are chosen by."""
    return train(data, spec, lr, TUNING_SEED, steps)


def best_rate(run: Callable[[float], Row]) -> tuple[float, list[Row]]:
    """Return the rate of the least loss, inside the rates tried or at an end of those allowed; and all runs."""
    rows = [run(lr) for lr in RATES]
    while True:
        best = min(rows, key=lambda row: row["loss"] if row["loss"] == row["loss"] else float("inf"))["lr"]
        tried = sorted(row["lr"] for row in rows)
        if best == tried[-1] and best < HIGHEST:
            rows.append(run(2 * best))
        elif best == tried[0] and best > LOWEST:
            rows.append(run(best / 2))
        else:
            return best, rows


def over_seeds(rows: list[Row], **beside: Any) -> Row:
    """Return mean and spread of a method's runs."""
    found = {**beside, "spec": rows[0]["spec"], "lr": rows[0]["lr"]}
    for field in ("accuracy", "loss", "density", "bits_per_element"):
        values = [row[field] for row in rows]
        found |= {field: mean(values), f"{field}_spread": stdev(values)}
    found["least_density"] = min(row["least_density"] for row in rows)
    found["largest_density"] = max(row["largest_density"] for row in rows)
    return found


def main() -> int:
    """Tune, train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's four files")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[Row] = []
    methods: list[Row] = []
    accuracies: dict[tuple[str, float], list[float]] = {}
    lr = 0.0
    for density, (name, form) in product(DENSITIES, METHODS.items()):
        spec = form.format(density=density)
        if name != "SIDCo, three stages":
            lr, tuning = best_rate(partial(tried, chosen.data, spec, chosen.steps))
            runs += [{**row, "tuning": True} for row in tuning]
        rows = [train(chosen.data, spec, lr, seed, chosen.steps) for seed in SEEDS]
        runs += [{**row, "tuning": False} for row in rows]
        accuracies[name, density] = [row["accuracy"] for row in rows]
        found = over_seeds(rows, method=name, aim=density)
        methods.append(found)
        print(
            f"{spec:55s} lr {lr:g}: {found['accuracy']:.2f} ± {found['accuracy_spread']:.2f} %, "
            f"loss {found['loss']:.4f} ± {found['loss_spread']:.4f}, "
            f"density {found['density']:.6f}, {found['least_density']:.6f} to {found['largest_density']:.6f}",
            flush=True,
        )
    differences = []
    for density in DENSITIES:
        for name in METHODS:
            if name != "TopK":
                apart = [a - b for a, b in zip(accuracies[name, density], accuracies["TopK", density])]
                differences.append({"method": name, "aim": density, "points": mean(apart), "spread": stdev(apart)})
                print(f"{name} less TopK at {density}: {mean(apart):+.2f} ± {stdev(apart):.2f} points")
    write(
        chosen.json, task="mnist, perceptron 784-512-512-10", workers=WORKERS, steps=chosen.steps, batch=BATCH,
        methods=methods, differences=differences, runs=runs,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
