"""The paper's MNIST experiment (TernGrad, NeurIPS 2017, fig. 3): LeNet, total batch 64, 10 000 steps, 2 to 64 workers.

    python benchmarks/claims/mnist_curve.py --data FOLDER --work runs/mnist --json benchmarks/results/claims/mnist.json

Each run is ``gradwire train mnist --simulate``, which gives the bits of as many real workers. Runs that are whole are
not repeated, so the script may be stopped and started again; two copies of it share the work. The last copy to finish,
or ``--collect``, writes the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, final, train, write

METHODS = ("terngrad", "fp32")
# Workers and seeds. All numbers of workers see the same batches of a seed, so that fp32 runs with the same seed differ
# in rounding alone; where one is missing, fp32 with BASELINE_WORKERS stands in, and the table says so.
GRID = [(2, 0), (4, 0), (4, 1), (4, 2), (8, 0), (16, 0), (32, 0), (64, 0), (64, 1), (64, 2)]
BASELINE_WORKERS = 4
ORDER = [("fp32", 4, 0), ("fp32", 4, 1), ("fp32", 4, 2), ("terngrad", 4, 0), ("terngrad", 4, 1), ("terngrad", 4, 2)]
ORDER += [("terngrad", 64, s) for s in (0, 1, 2)] + [("terngrad", n, 0) for n in (2, 16, 8, 32)]
ORDER += [("fp32", n, 0) for n in (2, 16, 8, 32, 64)] + [("fp32", 64, 1), ("fp32", 64, 2)]


def run_all(arguments: argparse.Namespace) -> None:
    """Run whatever is neither whole nor taken."""
    for method, workers, seed in ORDER:
        folder = arguments.work / f"{method}-{workers}-{seed}"
        if final(folder, arguments.steps) or not claim(folder):
            continue
        options = {"data": arguments.data, "method": method, "workers": workers, "seed": seed}
        options |= {"steps": arguments.steps, "eval-every": max(1, arguments.steps // 10), "log-every": 100}
        train("mnist", folder, options)


def collect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather every whole run, and compare the methods at each number of workers."""
    rows, table = [], []
    for method, workers, seed in ORDER:
        row = final(arguments.work / f"{method}-{workers}-{seed}", arguments.steps)
        if row:
            config = json.loads((arguments.work / f"{method}-{workers}-{seed}" / "config.json").read_text())
            rows.append(
                {
                    "method": config["method"],
                    "workers": workers,
                    "seed": seed,
                    "steps": row["step"],
                    "test_accuracy": row["accuracy"],
                    "test_loss": row["loss"],
                    "sent_bytes": row["sent_bytes"],
                    "bits_per_element": row["bits_per_element"],
                }
            )
    for workers in sorted({w for w, _ in GRID}):
        pairs = [pair for seed in (0, 1, 2) if (pair := _pair(rows, workers, seed))]
        if not pairs:
            continue
        line: dict[str, Any] = {"workers": workers, "fp32_workers": sorted({base["workers"] for _, base in pairs})}
        for m, values in zip(METHODS, zip(*[(ours["test_accuracy"], base["test_accuracy"]) for ours, base in pairs])):
            line[f"{m}_seeds"] = len(values)
            line[f"{m}_accuracy_mean"] = mean(values)
            line[f"{m}_accuracy_std"] = stdev(values) if len(values) > 1 else None
        line["difference_points"] = 100 * (line["terngrad_accuracy_mean"] - line["fp32_accuracy_mean"])
        line["allowed_points"] = 0.25 if line["terngrad_seeds"] >= 3 and line["fp32_seeds"] >= 3 else 0.4
        line["within"] = abs(line["difference_points"]) <= line["allowed_points"]
        table.append(line)
    return {"table": table, "runs": rows}


def _pair(rows: list[dict[str, Any]], workers: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return TernGrad's run and the fp32 run to hold it against."""
    found = {(r["method"].lower()[:4], r["workers"]): r for r in rows if r["seed"] == seed}
    base = found.get(("fp32", workers)) or found.get(("fp32", BASELINE_WORKERS))
    ours = found.get(("tern", workers))
    return (ours, base) if ours and base else None


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four files")
    parser.add_argument("--work", type=Path, default=Path("runs/mnist"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.collect:
        run_all(arguments)
    found = collect(arguments)
    for line in found["table"]:
        spread = ", ".join(f"{m} {100 * line[f'{m}_accuracy_mean']:.2f} %" for m in METHODS)
        print(f"{line['workers']:3d} workers: {spread}; {line['difference_points']:+.2f} points")
    what = "LeNet on MNIST, total batch 64, SGD with momentum 0.9, rate 0.01 (polynomial, power 0.5), simulated"
    write(arguments.json, what=what, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
