"""SketchedAMSGrad beside AMSGrad on all elements: accuracy by density, at the better of three learning rates.

    python benchmarks/claims/sketched_amsgrad.py --work runs/sketched_amsgrad \\
        --json benchmarks/results/claims/sketched_amsgrad.json

With ``--mnist FOLDER`` it trains LeNet on MNIST, too.

Four simulated workers. AMSGrad is the method with a warm-up as long as the training: such rounds take AMSGrad's exact
step of the mean gradient. Each setting is trained at three learning rates from the first seed, and the one with the
lowest training loss over the last tenth of the steps from two more. A warm-up of a tenth of the steps is a setting of
its own. Runs that are whole are not repeated, so that the program may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, final, train, write

RATES, SEEDS, WORKERS = (0.001, 0.003, 0.01), (0, 1, 2), 4
DENSE = "AMSGrad"
SETTINGS: dict[str, tuple[float, float]] = {
    DENSE: (0.01, 1.0),
    "density 0.1": (0.1, 0.0),
    "density 0.01": (0.01, 0.0),
    "density 0.01, warm-up": (0.01, 0.1),
    "density 0.001": (0.001, 0.0),
    "density 0.001, warm-up": (0.001, 0.1),
}
"""Density, and the share of the steps that is sent in float32."""
TASKS = (("digits", 300), ("mnist", 300))


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    steps: int
    setting: str
    lr: float
    seed: int

    def folder(self, work: Path) -> Path:
        """Return its folder, named after what determines it."""
        name = self.setting.replace(" ", "-").replace(",", "")
        return work / f"{self.task}-{self.steps}-{name}-{self.lr:g}-{self.seed}"

    def go(self, work: Path, data: Path | None) -> None:
        """Train, unless it is whole or another process does."""
        folder = self.folder(work)
        if final(folder, self.steps) or not claim(folder):
            return
        density, warm_up = SETTINGS[self.setting]
        options: dict[str, Any] = {"method": f"SketchedAMSGrad(density={density})", "workers": WORKERS, "momentum": 0}
        options |= {"lr": self.lr, "steps": self.steps, "seed": self.seed, "eval-every": self.steps}
        options |= {"warmup-steps": round(warm_up * self.steps), "log-every": max(1, self.steps // 100)}
        train(self.task, folder, options | ({"data": data} if self.task == "mnist" else {}))

    def row(self, work: Path) -> dict[str, Any] | None:
        """Return its row, None if it has not ended."""
        found = final(self.folder(work), self.steps)
        if found is None:
            return None
        lines = [json.loads(line) for line in (self.folder(work) / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if line["event"] == "train" and line["step"] > 0.9 * self.steps]
        kept = {name: found[name] for name in ("accuracy", "bits_per_element")}
        named = {"task": self.task, "steps": self.steps, "setting": self.setting, "lr": self.lr, "seed": self.seed}
        return {**named, "train_loss": mean(losses), **kept}


def best(rows: list[dict[str, Any]], task: str, steps: int, setting: str) -> float | None:
    """Return the rate with the lowest training loss; None before all have ended."""
    wanted = (task, steps, setting, SEEDS[0])
    tried = [r for r in rows if (r["task"], r["steps"], r["setting"], r["seed"]) == wanted]
    # A training that diverged has no number for a loss.
    ended = [r for r in tried if r["train_loss"] == r["train_loss"]]
    return min(ended, key=lambda r: r["train_loss"])["lr"] if len(tried) == len(RATES) and ended else None


def main() -> int:
    """Train what is missing, print the table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's files; without it digits alone")
    parser.add_argument("--work", type=Path, default=Path("runs/sketched_amsgrad"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    work, rows, table = arguments.work, [], []
    for task, steps in TASKS:
        if task == "mnist" and arguments.mnist is None:
            continue
        for setting in SETTINGS:
            plans = [Run(task, steps, setting, lr, SEEDS[0]) for lr in RATES]
            for turn in range(2):
                for plan in plans:
                    plan.go(work, arguments.mnist)
                rows += [row for plan in plans if (row := plan.row(work))]
                rate = best(rows, task, steps, setting)
                plans = [Run(task, steps, setting, rate, seed) for seed in SEEDS[1:]] if rate and not turn else []
            its = [r for r in rows if (r["task"], r["steps"], r["setting"], r["lr"]) == (task, steps, setting, rate)]
            if its:
                found = [r["accuracy"] for r in its]
                cell = {"task": task, "steps": steps, "setting": setting, "lr": rate, "seeds": len(its)}
                cell |= {"accuracy_mean": mean(found), "accuracy_std": stdev(found) if len(found) > 1 else None}
                cell["bits_per_element"] = its[0]["bits_per_element"]
                table.append(cell)
                print(cell, flush=True)
        write(arguments.json, workers=WORKERS, table=table, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
