"""ALQ and AMQ with levels fitted before a round and after it: accuracy on ``digits``, and bytes.

    python benchmarks/training/overlapped_levels.py --json benchmarks/results/training/overlapped_levels.json

Four simulated workers, SGD with momentum 0.9, and the learning rate that the table of methods finds for both
(``method_table.py``), three seeds. Blocks of "model" are the default; those of "parameter" are what overlapping needs,
so that the difference between the last two settings of a method is that of the levels' age alone. ``--setting``
and ``--method`` train a part, whose rows take the place of those in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from benchmarks.training.method_table import SEEDS, STEPS, WORKERS, train
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.tasks import build

RATE, MOMENTUM = 0.15, 0.9
KINDS = {"alq": gw.ALQ, "amq": gw.AMQ}


def settings(kind: type[gw.ALQ] | type[gw.AMQ]) -> list[gw.Method]:
    """Return the three settings of a method."""
    return [kind(), kind(blocks="parameter"), kind(blocks="parameter", overlap=True)]


def ended(spec: str, seed: int, steps: int, work: Path) -> dict[str, Any]:
    """Train once; return the last evaluation."""
    task = build("digits", lr=RATE, momentum=MOMENTUM, optimizer="sgd", steps=steps, eval_every=steps)
    plan = RunConfig(task=task, method=spec, workers=WORKERS, simulate=True, seed=seed)
    failed = train(plan, work / "run")["failed"]
    if failed:
        raise SystemExit(f"{spec}, seed {seed}: {failed}")
    last: dict[str, Any] = json.loads(RunFolder(work / "run").metrics.read_text().splitlines()[-1])
    return last


def main() -> None:
    """Train all settings from all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS["digits"])
    parser.add_argument("--method", choices=KINDS, action="append")
    parser.add_argument("--setting", type=int, choices=(0, 1, 2), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [settings(KINDS[name])[i] for name in options.method or KINDS for i in options.setting or (0, 1, 2)]
    rows = []
    for method in chosen:
        with tempfile.TemporaryDirectory() as work:
            found = [ended(repr(method), seed, options.steps, Path(work)) for seed in SEEDS]
        accuracy, loss = ([row[name] for row in found] for name in ("accuracy", "loss"))
        row = {
            "method": repr(method),
            "accuracy": {"mean": mean(accuracy), "std": stdev(accuracy), "values": accuracy},
            "loss": {"mean": mean(loss), "std": stdev(loss), "values": loss},
            "sent_bytes": found[0]["sent_bytes"],
            "steps": options.steps,
        }
        rows.append(row)
        told = f"{100 * mean(accuracy):.2f} +- {100 * stdev(accuracy):.2f} %, loss {mean(loss):.4f}"
        print(f"{told}: {method!r}", flush=True)
    if options.json:
        if options.json.exists():
            kept = json.loads(options.json.read_text())["rows"]
            rows = [row for row in kept if row["method"] not in [new["method"] for new in rows]] + rows
        write(options.json, command="benchmarks/training/overlapped_levels.py", task="digits", rows=rows)


if __name__ == "__main__":
    main()
