"""Sign methods beside float32 and TernGrad: accuracy and bytes on MNIST and on text, 4 workers, two seeds.

    python benchmarks/claims/signs.py --mnist FOLDER --work runs/signs --json benchmarks/results/claims/signs.json

Each run is ``gradwire train --simulate``. Methods whose outcome is a direction run on SGD without momentum, as their
papers do; on text, where the task has Adam, EF-signSGD and float32 run on SGD with momentum 0.9, too. These, and
EF-signSGD anyway, get the best of several learning rates, by the accuracy of seed 0 (after a third of the steps rates
look best that are too high for the rest); all others keep the task's (SGD with momentum 0.9 on MNIST, Adam on text).
1-bit SGD starts with 5 % of its steps in float32, as its paper asks. Runs that are whole are not repeated; several
copies of the script share the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, final, train, write

STEPS = {"mnist": 3000, "text": 600}
SEEDS = (0, 1)
METHODS = (
    "fp32",
    "terngrad",
    "ef_signsgd",
    "onebit",
    "scaledsign",
    "signsgd",
    "signum",
    "fp32 on SGD",
    "ef_signsgd on SGD",
)
ON_SGD = " on SGD"
DIRECTIONS = ("signsgd", "signum")
RATES = {
    # 0.08 diverges.
    ("mnist", "ef_signsgd"): (0.04, 0.02, 0.01),
    ("text", "ef_signsgd"): (0.008, 0.004, 0.002),
    ("text", "fp32 on SGD"): (0.3, 1.0, 3.0),
    ("text", "ef_signsgd on SGD"): (0.1, 0.3, 1.0),
    **{("mnist", method): (1e-5, 3e-5, 1e-4, 3e-4) for method in DIRECTIONS},
    **{("text", method): (1e-3, 3e-3, 1e-2) for method in DIRECTIONS},
}
"""Learning rates to choose from, where a method has several."""


@dataclass(frozen=True)
class Run:
    """One training: where it lies, how long it is, and what decides it."""

    task: str
    method: str
    seed: int
    steps: int
    rate: float | None
    work: Path

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        rate = "" if self.rate is None else f"-lr{self.rate:g}"
        return self.work / f"{self.task}-{self.method.replace(' ', '_')}{rate}-{self.steps}-{self.seed}"

    def final(self) -> dict[str, Any] | None:
        """Return its last evaluation, if it is whole."""
        return final(self.folder, self.steps)

    def go(self, mnist: Path | None) -> None:
        """Train, unless it is whole or another process does."""
        if self.final() or not claim(self.folder):
            return
        spec = self.method.removesuffix(ON_SGD)
        options: dict[str, Any] = {"method": spec, "workers": 4, "seed": self.seed, "steps": self.steps}
        options["eval-every"] = self.steps // 5
        if self.task == "mnist":
            options["data"] = mnist
        if self.rate is not None:
            options["lr"] = self.rate
        if self.method in DIRECTIONS:
            options |= {"optimizer": "sgd", "momentum": 0.0}
        if self.method.endswith(ON_SGD):
            options |= {"optimizer": "sgd", "momentum": 0.9}
        if self.method == "onebit":
            options["warmup-steps"] = self.steps // 20
        train(self.task, self.folder, options)


def trials(arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that decide a learning rate."""
    for (task, method), rates in RATES.items():
        for rate in rates if task in arguments.tasks else ():
            yield Run(task, method, 0, STEPS[task], rate, arguments.work)


def chosen(arguments: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Return the best learning rate of every method whose trials are all whole."""
    found: dict[tuple[str, str], dict[float | None, dict[str, Any] | None]] = {}
    for run in trials(arguments):
        found.setdefault((run.task, run.method), {})[run.rate] = run.final()
    return {
        key: max((row["accuracy"], rate) for rate, row in rows.items() if row and rate)[1]
        for key, rows in found.items()
        if all(rows.values())
    }


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of the table, as far as their learning rate is decided."""
    for seed in SEEDS:
        for task in arguments.tasks:
            for method in METHODS:
                if task == "mnist" and method.endswith(ON_SGD):
                    continue
                rate = chosen(arguments).get((task, method))
                if rate is not None or (task, method) not in RATES:
                    yield Run(task, method, seed, STEPS[task], rate, arguments.work)


def collect(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each task and method: means over seeds."""
    found: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for run in runs(arguments):
        row = run.final()
        if row:
            found.setdefault((run.task, run.method, run.rate), []).append(row)
    table = []
    for (task, method, rate), rows in sorted(found.items(), key=lambda item: (item[0][0], METHODS.index(item[0][1]))):
        accuracy = [row["accuracy"] for row in rows]
        table.append(
            {
                "task": task,
                "method": method,
                "steps": STEPS[task],
                "seeds": len(rows),
                "learning_rate": rate,
                "learning_rates_tried": RATES.get((task, method)),
                "accuracy_mean": mean(accuracy),
                "accuracy_std": stdev(accuracy) if len(rows) > 1 else None,
                "loss_mean": mean(row["loss"] for row in rows),
                "sent_bytes_mean": mean(row["sent_bytes"] for row in rows),
                "bits_per_element": mean(row["bits_per_element"] for row in rows),
            }
        )
    return table


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four files; left out: text alone")
    parser.add_argument("--work", type=Path, default=Path("runs/signs"))
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.tasks = [task for task in STEPS if task != "mnist" or arguments.mnist is not None]
    if not arguments.collect:
        for run in trials(arguments):
            run.go(arguments.mnist)
        for run in runs(arguments):
            run.go(arguments.mnist)
    table = collect(arguments)
    tried = [
        {"task": run.task, "method": run.method, "learning_rate": run.rate, "steps": run.steps, **row}
        for run in trials(arguments)
        if (row := {key: value for key, value in (run.final() or {}).items() if key in ("accuracy", "loss")})
    ]
    for row in table:
        spread = f" +- {100 * row['accuracy_std']:.2f}" if row["accuracy_std"] is not None else ""
        rate = "" if row["learning_rate"] is None else f", lr {row['learning_rate']:g}"
        print(
            f"{row['task']:6s} {row['method']:11s} {100 * row['accuracy_mean']:.2f}{spread} %, loss "
            f"{row['loss_mean']:.3f}, {row['sent_bytes_mean'] / 1e6:.1f} MB, {row['bits_per_element']:.2f} bits{rate}"
        )
    write(arguments.json, workers=4, rows=table, tried=tried)
    return 0


if __name__ == "__main__":
    sys.exit(main())
