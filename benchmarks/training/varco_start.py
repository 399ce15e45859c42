"""Why a variable rate fails on the stochastic block model: the first steps, step by step.

    python benchmarks/training/varco_start.py --json benchmarks/results/training/varco_start.json

Four simulated workers, GCN, 60 steps, as in ``graph.py``. For each set-up the training loss and the norm of the
gradient just before and after the rate reaches one (step 12 of 60 with a slope of 5), and the accuracy there and at the
end, over three seeds. "Adam begins anew" forgets the moments in the step after; at the lower rate all else is as it
was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engines import simulated_engine
from gradwire.tools.experiments.tasks import build

STEPS, WORKERS, SEEDS = 60, 4, (0, 1, 2)
WHOLE = 12
"""The first step in which all entries are sent."""
VARIABLE = "VARCO(start=128, end=1, slope=5)"
SETUPS: dict[str, tuple[str, float, int | None]] = {
    "full": ("fp32", 0.01, None),
    "VARCO": (VARIABLE, 0.01, None),
    "VARCO, Adam begins anew": (VARIABLE, 0.01, WHOLE + 1),
    "full, rate 0.003": ("fp32", 0.003, None),
    "VARCO, rate 0.003": (VARIABLE, 0.003, None),
}


def train(halo: str, rate: float, anew: int | None, seed: int) -> dict[str, float]:
    """Train once, and return what happens around the step in which the rate reaches one."""
    task = build("graph", graph="sbm", model="gcn", partition="random", halo=halo, steps=STEPS, lr=rate)
    engine = simulated_engine(RunConfig(task=task, workers=WORKERS, seed=seed, simulate=True))
    found = {}
    for step in range(STEPS):
        if step == anew:
            engine.optimizer.state.clear()
        loss = engine.backward(step)
        norm = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None]).norm()
        if step in (WHOLE - 1, WHOLE):
            when = "before" if step < WHOLE else "after"
            found |= {f"loss_{when}": loss, f"gradient_{when}": float(norm)}
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if step == WHOLE - 1:
            found["accuracy_before"] = engine.score()[1]
    return found | {"loss": loss, "accuracy": engine.score()[1]}


def main() -> None:
    """Train all, and print means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, (halo, rate, anew) in SETUPS.items():
        runs = [train(halo, rate, anew, seed) for seed in SEEDS]
        row: dict[str, Any] = {"name": name, "halo": halo, "rate": rate, "seeds": len(runs)}
        for field in runs[0]:
            values = [run[field] for run in runs]
            row |= {f"{field}_mean": mean(values), f"{field}_std": stdev(values)}
        rows.append(row)
        print(
            f"{name:26s} loss {row['loss_before_mean']:.2f} -> {row['loss_after_mean']:.2f}, gradient "
            f"{row['gradient_before_mean']:.3f} -> {row['gradient_after_mean']:.3f}, accuracy "
            f"{100 * row['accuracy_before_mean']:.1f} % there, {100 * row['accuracy_mean']:.1f} +- "
            f"{100 * row['accuracy_std']:.1f} % at the end",
            flush=True,
        )
    write(arguments.json, graph="sbm", steps=STEPS, workers=WORKERS, whole_from=WHOLE, rows=rows)


if __name__ == "__main__":
    main()
