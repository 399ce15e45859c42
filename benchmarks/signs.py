"""Sign methods beside float32 and TernGrad: accuracy and bytes on MNIST and on text, 4 workers, two seeds.

    python benchmarks/signs.py --mnist FOLDER --work runs/signs --json benchmarks/results/signs.json

Each run is ``gradwire train --simulate``. Methods whose outcome is a direction take the learning rate of their papers'
scale; the others keep the task's. 1-bit SGD starts with 5 % of its steps in float32, as its paper asks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from runs import claim, final, machine, train

STEPS = {"mnist": 3000, "text": 600}
SEEDS = (0, 1)
METHODS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "terngrad": {},
    "ef_signsgd": {},
    "onebit": {"warmup": 0.05},
    "signsgd": {"direction": True},
    "signum": {"direction": True},
    "scaledsign": {},
}
DIRECTION_LR = 1e-4


def options_of(arguments: argparse.Namespace, task: str, method: str, seed: int) -> dict[str, Any]:
    """Give the command line of one run."""
    steps = STEPS[task]
    options: dict[str, Any] = {"method": method, "workers": 4, "seed": seed, "steps": steps, "eval-every": steps // 5}
    if task == "mnist":
        options["data"] = arguments.mnist
    if METHODS[method].get("direction"):
        options["lr"] = DIRECTION_LR
    if "warmup" in METHODS[method]:
        options["warmup-steps"] = int(METHODS[method]["warmup"] * steps)
    return options


def cells(arguments: argparse.Namespace) -> list[tuple[str, str, int, Path]]:
    """Give task, method, seed and folder of every run."""
    return [
        (task, method, seed, arguments.work / f"{task}-{method}-{seed}")
        for seed in SEEDS
        for task in STEPS
        for method in METHODS
        if task != "mnist" or arguments.mnist is not None
    ]


def collect(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Give a row for each task and method: means over seeds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for task, method, _, folder in cells(arguments):
        row = final(folder, STEPS[task])
        if row:
            found.setdefault((task, method), []).append(row)
    table = []
    for (task, method), rows in found.items():
        accuracy = [row["accuracy"] for row in rows]
        table.append(
            {
                "task": task,
                "method": method,
                "steps": STEPS[task],
                "seeds": len(rows),
                "learning_rate": DIRECTION_LR if METHODS[method].get("direction") else None,
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
    if not arguments.collect:
        for task, method, seed, folder in cells(arguments):
            if not final(folder, STEPS[task]) and claim(folder):
                train(task, folder, options_of(arguments, task, method, seed))
    table = collect(arguments)
    for row in table:
        spread = f" +- {100 * row['accuracy_std']:.2f}" if row["accuracy_std"] is not None else ""
        print(
            f"{row['task']:6s} {row['method']:11s} {100 * row['accuracy_mean']:.2f}{spread} %, loss "
            f"{row['loss_mean']:.3f}, {row['sent_bytes_mean'] / 1e6:.1f} MB, {row['bits_per_element']:.2f} bits"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"workers": 4, **machine(), "rows": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
