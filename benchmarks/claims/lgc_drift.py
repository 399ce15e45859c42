"""How well LGC's frozen autoencoder fits later gradients.

    python benchmarks/claims/lgc_drift.py --data FOLDER --work runs/lgc_drift \\
        --json benchmarks/results/claims/lgc_drift.json

The training of ``benchmarks/claims/lgc_curve.py`` (LeNet on MNIST, 4 simulated workers, 30 rounds in float32 and 90 in
which the autoencoder learns) goes on for 600 rounds of codes. ``error`` is |mean p - outcome|^2 over |mean p|^2 at the
leader's elements, of 100 rounds together. Gradients change their kind in a training, so that errors may grow for any
decoder. ``own curve`` is the error of a curve that is fitted to the same 100 rounds: what a decoder of the order alone
could reach at best. The autoencoder has drifted by as much as its error grows beside that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.claims.lgc_curve import TASK, WORKERS, Watched, error
from benchmarks.lib.lgc_study import FULL, TRAINING
from benchmarks.lib.runs import claim, earlier, release, write
from gradwire.methods.learned.autoencoder import ElementScales

ROUNDS, WINDOW = 600, 100


def measure(seed: int, data: Path) -> dict[str, Any]:
    """Train, and return the errors of each window of rounds."""
    began_s = time.monotonic()
    engine = Watched(seed, data)
    for step in range(FULL + TRAINING + ROUNDS):
        for group in engine.optimizer.param_groups:
            group["lr"] = engine.plan.task.learning_rate(step)
        engine.backward(step)
        engine.optimizer.step()
    rows, windows = torch.stack(engine.vectors), []
    scaled, means = ElementScales(engine.counts), rows.mean(1)
    leaders = torch.stack([row[(FULL + t) % WORKERS] for t, row in enumerate(rows)])
    scales = torch.stack([scaled.of(row)[scaled.each] for row in leaders])
    for first in range(TRAINING, TRAINING + ROUNDS, WINDOW):
        here = slice(first, first + WINDOW)
        weights = scales[here].double()
        # Least squares of the means by the scales, a number for each place of the order.
        curve = (means[here] * weights).sum(0) / weights.square().sum(0)
        found = {label: error(means[here], torch.stack(outcomes[here])) for label, outcomes in engine.found.items()}
        found["own curve"] = error(means[here], weights * curve)
        windows.append({"first_round": first - TRAINING, "error": found})
    return {"seed": seed, "windows": windows, "took_s": time.monotonic() - began_s}


def main() -> None:
    """Measure what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/lgc_drift"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = {row["seed"]: row for row in earlier(arguments.json, "runs")}
    for seed in arguments.seeds:
        path = arguments.work / f"{seed}.json"
        if path.exists() or seed in known or not claim(path):
            continue
        path.write_text(json.dumps(measure(seed, arguments.data), indent=1) + "\n")
        release(path)
    runs = [json.loads(path.read_text()) for path in sorted(arguments.work.glob("*.json"))]
    rows = list((known | {row["seed"]: row for row in runs}).values())
    for row in rows:
        for window in row["windows"]:
            print(row["seed"], window["first_round"], {k: round(v, 4) for k, v in window["error"].items()})
    kept = {"task": TASK, "workers": WORKERS, "full_rounds": FULL, "training_rounds": TRAINING, "rounds": ROUNDS}
    write(arguments.json, **kept, window=WINDOW, runs=rows)


if __name__ == "__main__":
    main()
