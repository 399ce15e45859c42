"""Momentum and error feedback of signs: after the exchange, before compression, and not at all.

    python benchmarks/claims/sign_momentum.py --work runs/sign_momentum \\
        --json benchmarks/results/claims/sign_momentum.json

Four simulated workers, ``gradwire train --simulate`` by SGD, two seeds, the task ``text`` on its default data and, with
``--mnist FOLDER``, MNIST. A method's own momentum is in its spec, and the optimizer then has none. Rates without
momentum are about ten times those with 0.9, which makes steps as large. 1-bit SGD starts with 5 % of its steps in
float32, as its paper asks. Runs that are whole are not repeated; several copies of the script share the work.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, final, train, write

SEEDS = (0, 1)
STEPS = {"text": 600, "mnist": 3000}
RATES = {
    # By the momentum after the exchange, then by the task.
    0.9: {"text": (0.3, 1.0), "mnist": (0.01, 0.04)},
    0.0: {"text": (1.0, 3.0, 10.0), "mnist": (0.1, 0.4)},
}
SETTINGS: tuple[tuple[str, float], ...] = (
    ("fp32", 0.9),
    ("fp32", 0.0),
    ("EFSignSGD()", 0.9),
    ("EFSignSGD()", 0.0),
    ("EFSignSGD(block_size=64)", 0.9),
    ("EFSignSGD(momentum=0.9)", 0.0),
    ("OneBit()", 0.9),
    ("OneBit()", 0.0),
    ("OneBit(block_size=64)", 0.9),
    ("OneBit(momentum=0.9)", 0.0),
)
"""Methods with the optimizer's momentum."""


@dataclass(frozen=True)
class Run:
    """One training: what decides it, and where it lies."""

    task: str
    method: str
    momentum: float
    rate: float
    seed: int
    steps: int
    work: Path

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        method = re.sub(r"\W+", "_", self.method).strip("_")
        return self.work / f"{self.task}-{method}-m{self.momentum:g}-lr{self.rate:g}-{self.steps}-{self.seed}"

    def final(self) -> dict[str, Any] | None:
        """Return its last evaluation, if it is whole."""
        return final(self.folder, self.steps)

    def go(self, mnist: Path | None) -> None:
        """Train, unless it is whole or another process does."""
        if self.final() or not claim(self.folder):
            return
        options: dict[str, Any] = {"method": self.method, "workers": 4, "seed": self.seed, "steps": self.steps}
        options |= {"optimizer": "sgd", "momentum": self.momentum, "lr": self.rate, "eval-every": self.steps}
        if self.task == "mnist":
            options["data"] = mnist
        if self.method.startswith("OneBit"):
            options["warmup-steps"] = self.steps // 20
        train(self.task, self.folder, options)


def runs(tasks: list[str], steps: int | None, work: Path) -> Iterator[Run]:
    """Yield all runs, those of the first seed first."""
    for seed in SEEDS:
        for task in tasks:
            for method, momentum in SETTINGS:
                # The method's own momentum makes steps as long as the optimizer's.
                for rate in RATES[0.9 if "momentum" in method else momentum][task]:
                    yield Run(task, method, momentum, rate, seed, steps or STEPS[task], work)


def collect(wanted: list[Run]) -> list[dict[str, Any]]:
    """Return a row for each setting with a run that is whole: means over seeds."""
    found: dict[tuple[str, str, float, float], list[dict[str, Any]]] = {}
    for run in wanted:
        row = run.final()
        if row:
            found.setdefault((run.task, run.method, run.momentum, run.rate), []).append(row)
    table = []
    for (task, method, momentum, rate), rows in found.items():
        accuracy = [row["accuracy"] for row in rows]
        table.append(
            {
                "task": task,
                "method": method,
                "momentum": momentum,
                "learning_rate": rate,
                "steps": rows[0]["step"],
                "seeds": len(rows),
                "accuracy_mean": mean(accuracy),
                "accuracy_std": stdev(accuracy) if len(rows) > 1 else None,
                "loss_mean": mean(row["loss"] for row in rows),
                "bits_per_element": mean(row["bits_per_element"] for row in rows),
            }
        )
    return table


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four files; left out: text alone")
    parser.add_argument("--steps", type=int, help="of every run; by default 600 on text and 3000 on MNIST")
    parser.add_argument("--work", type=Path, default=Path("runs/sign_momentum"))
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    wanted = list(runs(["text", *(["mnist"] if chosen.mnist else [])], chosen.steps, chosen.work))
    if not chosen.collect:
        for run in wanted:
            run.go(chosen.mnist)
    table = collect(wanted)
    for row in table:
        spread = f" +- {100 * row['accuracy_std']:.2f}" if row["accuracy_std"] is not None else ""
        print(
            f"{row['task']:6s} {row['method']:25s} momentum {row['momentum']:<4g} lr {row['learning_rate']:<5g} "
            f"{100 * row['accuracy_mean']:.2f}{spread} %, loss {row['loss_mean']:.3f}, "
            f"{row['bits_per_element']:.2f} bits"
        )
    write(chosen.json, workers=4, rows=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
