"""How dense the corrected gradients of EF-signSGD are: phi along trainings of four networks.

    python benchmarks/claims/corrected_density.py --mnist FOLDER --cifar10 FOLDER \\
        --json benchmarks/results/claims/corrected_density.json

The scaled sign of a vector p of d elements loses the share 1 - phi of its square, with::

    phi(p) = |p|_1^2 / (d |p|_2^2)        p = g + e, the gradient and the residual of a worker

Four simulated workers train by EF-signSGD, with SGD without momentum, and phi of worker 0's p is taken in the first ten
steps and in every tenth. ``whole`` is phi of all compressed elements as one vector, ``smallest`` the least phi of a
parameter, which has a scale of its own. ``gradient_whole`` and ``gradient_smallest`` are those of g alone. The
networks: a perceptron on digits, LeNet on MNIST, a small transformer on text, and VGG-11 with an eighth of its channels
on CIFAR-10, with batch normalisation. Rows have the least values of a training, and the mean over the steps measured.

Source: Karimireddy et al., ICML 2019: the smallest phi of a corrected gradient in their trainings is 0.134 (VGG19).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import Task
from gradwire.tools.experiments.tasks.cifar10 import Cifar10

WORKERS, STEPS, SEEDS = 4, 200, (0, 1, 2)
DENSE_START, EVERY = 10, 10
CHANNELS: tuple[int, ...] = (8, 0, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0)
"""Of VGG-11, over eight; 0 is a pooling."""
FIELDS = ("whole", "smallest", "gradient_whole", "gradient_smallest")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class NarrowVGG(Cifar10):
    """CIFAR-10 with a narrow VGG-11."""

    name: ClassVar[str] = "cifar10"

    def build_model(self) -> nn.Module:
        """Build the network, with PyTorch's initial values."""
        layers: list[nn.Module] = []
        before = 3
        for channels in CHANNELS:
            if channels:
                convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
                before = channels
            else:
                layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, 10))


def networks(mnist: str, cifar10: str) -> dict[str, Task]:
    """Return the tasks, with rates at which EF-signSGD learns."""
    plain: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "steps": STEPS}
    return {
        "perceptron, digits": dataclasses.replace(tasks.build("digits"), **plain, lr=0.2),
        "LeNet, mnist": tasks.build("mnist", data=mnist, **plain, lr=0.05),
        "transformer, text": dataclasses.replace(tasks.build("text"), **plain, lr=3.0),
        "VGG-11 of an eighth, cifar10": NarrowVGG(data=cifar10, **plain, lr=0.05, batch=128),
    }


def phi(p: Tensor) -> float | None:
    """Return |p|_1^2 / (d |p|_2^2); None of zeros."""
    x = p.double()
    square = float(x.square().sum())
    return float(x.abs().sum()) ** 2 / (x.numel() * square) if square else None


def least(parts: Sequence[Tensor]) -> float:
    """Return the least phi of some vectors that are not zero."""
    return min(found for part in parts if (found := phi(part)) is not None)


def train(task: Task, seed: int) -> Row:
    """Train; return phi of the measured steps, its least values, and the accuracy."""
    engine = SimulatedEngine(RunConfig(task=task, method="EFSignSGD()", workers=WORKERS, simulate=True, seed=seed))
    sizes = {name: p.numel() for name, p in engine.model.named_parameters()}
    reduce_ = engine.link.reduce_
    rows: list[Row] = []
    step = 0

    def watched(gradients: Tensor, names: Sequence[str] | None = None) -> Tensor:
        if step < DENSE_START or (step + 1) % EVERY == 0:
            state = engine.link.state_dict()["rank 0"]
            own = dict(zip(sizes, gradients[0].split(list(sizes.values()))))
            # In the first step there are no residuals, and a parameter that is sent in float32 never has one.
            kept = {name: state.get(f"residual/{name}") for name in sizes}
            compressed = [name for name, size in sizes.items() if size >= 1024]
            g = [own[name] for name in compressed]
            corrected = [x if (e := kept[name]) is None else x + e.reshape(-1) for name, x in zip(compressed, g)]
            row: Row = {"step": step + 1, "whole": phi(torch.cat(corrected)), "smallest": least(corrected)}
            rows.append(row | {"gradient_whole": phi(torch.cat(g)), "gradient_smallest": least(g)})
        return reduce_(gradients, names)

    engine.link.reduce_ = watched  # type: ignore[method-assign]
    for step in range(task.steps):
        engine.backward(step)
        engine.optimizer.step()
    if not any(key.startswith("residual/") for key in engine.link.state_dict()["rank 0"]):
        raise RuntimeError("no residual was kept: nothing is corrected")
    return {
        "seed": seed,
        "accuracy": 100 * engine.score()[1],
        **{field: min(row[field] for row in rows) for field in FIELDS},
        **{f"mean_{field}": mean(row[field] for row in rows) for field in FIELDS},
        "steps": rows,
    }


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True, help="folder with MNIST's four files")
    parser.add_argument("--cifar10", required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    summary: list[Row] = []
    runs: list[Row] = []
    for name, task in networks(chosen.mnist, chosen.cifar10).items():
        found = [train(task, seed) for seed in SEEDS]
        runs += [{"network": name, **run} for run in found]
        row: Row = {"network": name, "lr": task.lr, "steps": task.steps}
        for field in ("accuracy", *FIELDS, *(f"mean_{field}" for field in FIELDS)):
            values = [run[field] for run in found]
            row |= {field: mean(values), f"{field}_spread": stdev(values)}
        summary.append(row)
        told = ", ".join(f"{field} {row[field]:.3f} ± {row[f'{field}_spread']:.3f}" for field in FIELDS)
        print(f"{name}: {row['accuracy']:.1f} ± {row['accuracy_spread']:.1f} %, least phi: {told}", flush=True)
        print("    mean:", ", ".join(f"{field} {row[f'mean_{field}']:.3f}" for field in FIELDS), flush=True)
    write(chosen.json, workers=WORKERS, networks=summary, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
