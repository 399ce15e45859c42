"""TernGrad's clip about zero and about the mean (the paper's), and its scalers of the round before, in training.

    python benchmarks/claims/terngrad_clip.py --mnist FOLDER --text FILE --work runs/terngrad_clip \\
        --json benchmarks/results/claims/terngrad_clip.json

Four simulated workers, LeNet on MNIST (SGD with momentum) and the character model on a text (Adam; without ``--text``
the task's default text), the tasks' own settings, all methods from the same seeds. By default parameters with fewer
than 1024 elements travel in float32; these are the biases and gains whose gradients have a mean, so that both rules are
run with ``--min-numel 0``, too. "ahead" encodes with the shared scalers of the round before. Each run is ``gradwire
train --simulate``. Runs that are whole are not repeated, so the script may be stopped and started again; several copies
of it share the work. ``--collect`` only writes the results.
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
SEEDS = (0, 1, 2)
WORKERS = 4
DEFAULT_MIN_NUMEL = 1024
METHODS: dict[str, tuple[str, int]] = {
    "fp32": ("fp32", 0),
    "rms": ('TernGrad(clip_by="rms")', DEFAULT_MIN_NUMEL),
    "std": ('TernGrad(clip_by="std")', DEFAULT_MIN_NUMEL),
    "ahead": ("TernGrad(ahead=True)", DEFAULT_MIN_NUMEL),
    "rms, all parameters": ('TernGrad(clip_by="rms")', 0),
    "std, all parameters": ('TernGrad(clip_by="std")', 0),
}
"""Spec and smallest parameter that is compressed."""


@dataclass(frozen=True)
class Run:
    """One training: what decides it, and where it lies."""

    task: str
    label: str
    seed: int
    steps: int
    work: Path

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        return self.work / f"{self.task}-{self.label.replace(', ', '-').replace(' ', '_')}-{self.steps}-{self.seed}"

    def final(self) -> dict[str, Any] | None:
        """Return its last evaluation, if it is whole."""
        return final(self.folder, self.steps)

    def go(self, data: Path | None) -> None:
        """Train, unless it is whole or another process does."""
        if self.final() or not claim(self.folder):
            return
        spec, min_numel = METHODS[self.label]
        options: dict[str, Any] = {"method": spec, "workers": WORKERS, "seed": self.seed, "steps": self.steps}
        options |= {"min-numel": min_numel, "eval-every": max(1, self.steps // 5), "log-every": 100}
        if data is not None:
            options["data"] = data
        train(self.task, self.folder, options)


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs, those of the first seed first."""
    for seed in SEEDS[: arguments.seeds]:
        for task in arguments.tasks:
            for label in METHODS:
                yield Run(task, label, seed, arguments.steps or STEPS[task], arguments.work)


def collect(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each task and method: means over the seeds whose runs are whole."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs(arguments):
        row = run.final()
        if row:
            found.setdefault((run.task, run.label), []).append(row)
    table = []
    for (task, label), rows in found.items():
        spec, min_numel = METHODS[label]
        accuracy, loss = [row["accuracy"] for row in rows], [row["loss"] for row in rows]
        table.append(
            {
                "task": task,
                "run": label,
                "method": spec,
                "min_numel": min_numel,
                "steps": rows[0]["step"],
                "seeds": len(rows),
                "accuracy_mean": mean(accuracy),
                "accuracy_std": stdev(accuracy) if len(rows) > 1 else None,
                "loss_mean": mean(loss),
                "loss_std": stdev(loss) if len(rows) > 1 else None,
                "bits_per_element": mean(row["bits_per_element"] for row in rows),
            }
        )
    return table


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four files; left out: text alone")
    parser.add_argument("--text", type=Path, help="a text file; left out: the task's default text")
    parser.add_argument("--work", type=Path, default=Path("runs/terngrad_clip"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--steps", type=int, help="steps of every run, for a trial")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.tasks = [task for task in STEPS if task != "mnist" or arguments.mnist is not None]
    data = {"mnist": arguments.mnist, "text": arguments.text}
    if not arguments.collect:
        for run in runs(arguments):
            run.go(data[run.task])
    table = collect(arguments)
    for row in table:
        spread = f" +- {100 * row['accuracy_std']:.2f}" if row["accuracy_std"] is not None else ""
        accuracy = f"{100 * row['accuracy_mean']:.2f}{spread} %, loss {row['loss_mean']:.4f}"
        bits = f"{row['bits_per_element']:.2f} bits, {row['seeds']} seeds"
        print(f"{row['task']:6s} {row['run']:20s} {accuracy}, {bits}")
    text = "the task's default text" if arguments.text is None else arguments.text.name
    write(arguments.json, workers=WORKERS, text=text, rows=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
