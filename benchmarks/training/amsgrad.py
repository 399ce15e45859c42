"""SketchedAMSGrad beside AMSGrad without compression, on digits with one tuning budget.

    python benchmarks/training/amsgrad.py --work runs/amsgrad --json benchmarks/results/training/amsgrad_digits.json

Four simulated workers, 300 steps. AMSGrad is ``torch.optim.Adam(amsgrad=True)`` on the mean gradient by ``fp32``, with
its own eps and with SketchedAMSGrad's; torch corrects moments for their bias, SketchedAMSGrad, as its paper, does not.
Each is trained at four learning rates from the first seed; the rate with the lowest training loss over the last tenth
of the steps is then trained from the other seeds.

Runs that are whole are not repeated, so that the script may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, earlier, release, write
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build

WORKERS, STEPS, SEEDS = 4, 300, (0, 1, 2)
RATES = (0.0003, 0.001, 0.003, 0.01)
SMALLEST, EPS = 1e-8, 1e-4
"""eps of torch's Adam, and of SketchedAMSGrad."""

Row = dict[str, Any]
Optimizer = Callable[[Any, float], torch.optim.Optimizer]


def amsgrad(eps: float) -> Optimizer:
    """Return a maker of AMSGrad."""
    return lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, eps=eps, amsgrad=True)


WAYS: dict[str, tuple[str, Optimizer | None]] = {
    f"AMSGrad, eps={SMALLEST:g}": ("FP32()", amsgrad(SMALLEST)),
    f"AMSGrad, eps={EPS:g}": ("FP32()", amsgrad(EPS)),
    "SketchedAMSGrad, density=0.1": ("SketchedAMSGrad(density=0.1)", None),
    "SketchedAMSGrad, density=0.01": ("SketchedAMSGrad(density=0.01)", None),
}
"""The method, and an optimizer in place of plain SGD."""


def train(label: str, rate: float, seed: int) -> Row:
    """Train, and return what came of it."""
    spec, optimizer = WAYS[label]
    task = build("digits", lr=rate, momentum=0.0, optimizer="sgd", steps=STEPS, weight_decay=0.0)
    engine = SimulatedEngine(RunConfig(task=task, method=spec, workers=WORKERS, simulate=True, seed=seed))
    if optimizer is not None:
        engine.optimizer = optimizer(engine.parameters, rate)
    began_s, losses = time.monotonic(), []
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = task.learning_rate(step)
        losses.append(engine.backward(step))
        engine.optimizer.step()
        if not losses[-1] < 1e4:
            break
    loss, accuracy = engine.score()
    whole = len(losses) == STEPS
    return {
        "label": label, "spec": spec, "rate": rate, "seed": seed, "ended": whole, "accuracy": accuracy, "loss": loss,
        "train_loss": mean(losses[-STEPS // 10 :]) if whole else None,
        "sent_bytes": mean(engine.link.traffic(worker).sent_bytes for worker in range(WORKERS)),
        "took_s": time.monotonic() - began_s,
    }  # fmt: skip


def main() -> None:
    """Train what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/amsgrad"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = {(row["label"], row["rate"], row["seed"]): row for row in earlier(arguments.json, "runs")}

    def run(label: str, rate: float, seed: int) -> Row | None:
        path = arguments.work / f"{zlib.crc32(label.encode()):08x}-{rate:g}-{seed}.json"
        if (label, rate, seed) not in known and not path.exists() and claim(path):
            path.write_text(json.dumps(train(label, rate, seed)) + "\n")
            release(path)
        if path.exists():
            known[label, rate, seed] = json.loads(path.read_text())
        return known.get((label, rate, seed))

    table = []
    for label in WAYS:
        tried = [row for rate in RATES if (row := run(label, rate, SEEDS[0])) is not None and row["ended"]]
        if not tried:
            continue
        rate = min(tried, key=lambda row: row["train_loss"])["rate"]
        rows = [row for seed in SEEDS if (row := run(label, rate, seed)) is not None]
        marks = [100 * row["accuracy"] for row in rows]
        table.append({
            "label": label, "rate": rate, "at_the_edge": rate in (RATES[0], RATES[-1]), "seeds": len(rows),
            "accuracy_percent": mean(marks), "spread": stdev(marks) if len(marks) > 1 else None,
            "sent_bytes": mean(row["sent_bytes"] for row in rows),
        })  # fmt: skip
        print(table[-1], flush=True)
    settings = {"workers": WORKERS, "steps": STEPS, "rates": RATES}
    write(arguments.json, **settings, methods=table, runs=list(known.values()))


if __name__ == "__main__":
    main()
