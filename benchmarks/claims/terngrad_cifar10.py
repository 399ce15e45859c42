"""TernGrad's CIFAR-10 experiment (Wen et al., NeurIPS 2017, table 1), shortened: ConvNet, Adam, 2 and 16 workers.

    python benchmarks/claims/terngrad_cifar10.py --data FOLDER --json benchmarks/results/claims/terngrad_cifar10.json

The network, crops of 24 pixels, flips, Adam at 2e-4, a weight decay of 0.004, an average of the weights in evaluation,
and total batches of 128 on 2 workers and of 2048 on 16 are those of the authors' programs; ``--samples`` is how many
images a run sees, where theirs see 38.4 million. The second row has a quarter of the weight decay, as the paper gives
TernGrad on larger networks; this network has no dropout that could be lowered. TernGrad has its defaults: clipping at
2.5, a scaler a parameter, parameters below 1024 elements in float32.

Each run is ``gradwire train cifar10 --simulate``, which gives the bits of as many real workers. Runs that are whole, in
the work folder or in the result that ``--json`` names, are not repeated, so that the script may be stopped and started
again; several copies of it share the work. ``--collect`` runs nothing.
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

from benchmarks.lib.runs import claim, earlier, final, train, write

SAMPLES = 98_304
BATCH = {2: 128, 16: 2048}
METHODS = ("fp32", "terngrad")
DECAYS = (0.004, 0.001)
SEEDS = (0, 1, 2)
# Workers, weight decay and seed. Every row of the table first, then more seeds, of the paper's weight decay first.
ORDER = [(2, DECAYS[0], 0), (2, DECAYS[0], 1), (16, DECAYS[0], 0), (2, DECAYS[1], 0), (2, DECAYS[0], 2)]
ORDER += [(2, DECAYS[1], 1), (2, DECAYS[1], 2), (16, DECAYS[1], 0)]
PAPER = {2: (300_000, 86.56, 85.64), 16: (18_750, 83.19, 82.80)}
"""Steps, and accuracy in percent of float and of TernGrad on the official test set, one run each."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training: what decides it, and where it lies."""

    method: str
    workers: int
    decay: float
    seed: int
    samples: int
    work: Path

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.samples // BATCH[self.workers]

    def made(self, row: Row) -> bool:
        """Return whether it has made this row of a result."""
        ours = ("FP32()" if self.method == "fp32" else None, self.workers, self.decay, self.seed, self.steps)
        method = row["method"] if row["method"] == "FP32()" else None
        return ours == (method, row["workers"], row["weight_decay"], row["seed"], row["steps"])

    @property
    def folder(self) -> Path:
        """Its folder, named after what decides it."""
        return self.work / f"{self.method}-{self.workers}-wd{self.decay:g}-{self.steps}-{self.seed}"

    def go(self, data: Path) -> None:
        """Train, unless it is whole or another process does."""
        if final(self.folder, self.steps) or not claim(self.folder):
            return
        options = {"data": data, "model": "convnet", "crop": 24, "method": self.method, "workers": self.workers}
        options |= {"optimizer": "adam", "lr": 2e-4, "schedule": "constant", "weight-decay": self.decay, "ema": 0.9999}
        options |= {"batch": BATCH[self.workers], "steps": self.steps, "seed": self.seed}
        options |= {"eval-every": self.steps // 2, "log-every": max(1, self.steps // 16)}
        train("cifar10", self.folder, options)


def runs(arguments: argparse.Namespace) -> list[Run]:
    """Return all runs in the order in which they are trained."""
    return [
        Run(method, workers, decay, seed, arguments.samples, arguments.work)
        for workers, decay, seed in ORDER
        for method in METHODS
    ]


def collect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather every whole run, and the mean over seeds of each cell."""
    rows, known = [], earlier(arguments.json, "runs")
    for run in runs(arguments):
        row = final(run.folder, run.steps)
        if row is None:
            rows += [earlier_row for earlier_row in known if run.made(earlier_row)]
        else:
            took = run.folder / "took.json"
            half = final(run.folder, run.steps // 2)
            rows.append(
                {
                    "method": json.loads((run.folder / "config.json").read_text())["method"],
                    "workers": run.workers,
                    "batch": BATCH[run.workers],
                    "weight_decay": run.decay,
                    "seed": run.seed,
                    "steps": run.steps,
                    "accuracy_halfway": half and half["accuracy"],
                    "accuracy": row["accuracy"],
                    "loss": row["loss"],
                    "bits_per_element": row["bits_per_element"],
                    **(json.loads(took.read_text()) if took.exists() else {"wall_s": None, "cpu_s": None}),
                }
            )
    table = []
    for workers, decay in sorted({(workers, decay) for workers, decay, _ in ORDER}, key=lambda key: (key[0], -key[1])):
        cell = [row for row in rows if (row["workers"], row["weight_decay"]) == (workers, decay)]
        by_seed = [{r["seed"]: r for r in cell if (r["method"] == "FP32()") == whole} for whole in (True, False)]
        pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in SEEDS if all(seed in found for found in by_seed)]
        if pairs:
            table.append(_line(workers, decay, pairs))
    return {"table": table, "runs": rows}


def _line(workers: int, decay: float, pairs: list[tuple[Row, Row]]) -> Row:
    """Compare fp32 and TernGrad in one set-up, from pairs of runs with the same seed."""
    whole, ternary = ([pair[i] for pair in pairs] for i in (0, 1))
    differences = [100 * (ours["accuracy"] - base["accuracy"]) for base, ours in pairs]
    line: Row = {"workers": workers, "batch": BATCH[workers], "weight_decay": decay, "steps": ternary[0]["steps"]}
    line["seeds"] = len(pairs)
    for name, rows in (("fp32", whole), ("terngrad", ternary)):
        found = [row["accuracy"] for row in rows]
        line[f"{name}_accuracy_mean"] = mean(found)
        line[f"{name}_accuracy_std"] = stdev(found) if len(found) > 1 else None
        line[f"{name}_loss_mean"] = mean(row["loss"] for row in rows)
        halfway = [row["accuracy_halfway"] for row in rows]
        line[f"{name}_halfway_mean"] = None if None in halfway else mean(halfway)
    line["bits_per_element"] = mean(row["bits_per_element"] for row in ternary)
    line["difference_points_mean"] = mean(differences)
    line["difference_points_std"] = stdev(differences) if len(differences) > 1 else None
    steps, float_, ternary_ = PAPER[workers]
    paper = {"paper_steps": steps, "paper_float_accuracy": float_ / 100, "paper_terngrad_accuracy": ternary_ / 100}
    return line | (paper if decay == DECAYS[0] else dict.fromkeys(paper))


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's data batches")
    parser.add_argument("--work", type=Path, default=Path("runs/terngrad_cifar10"))
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images that each run sees, a multiple of 2048")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.samples % BATCH[16] or arguments.samples < 2 * BATCH[16]:
        parser.error(f"--samples is a multiple of {BATCH[16]} from {2 * BATCH[16]}, not {arguments.samples}")
    if not arguments.collect:
        if arguments.data is None:
            parser.error("name the folder of the data by --data")
        known = earlier(arguments.json, "runs")
        for run in runs(arguments):
            if not any(run.made(row) for row in known):
                run.go(arguments.data)
    found = collect(arguments)
    for line in found["table"]:
        print(
            f"{line['workers']:3d} workers, weight decay {line['weight_decay']:g}: "
            f"fp32 {100 * line['fp32_accuracy_mean']:.2f} %, TernGrad {100 * line['terngrad_accuracy_mean']:.2f} %, "
            f"{line['seeds']} seeds"
        )
    what = (
        "ConvNet on crops of 24 of CIFAR-10 (batches 1-4, evaluated on 5), Adam at 2e-4, average of weights, "
        f"{arguments.samples} images a run, simulated workers"
    )
    write(arguments.json, what=what, samples=arguments.samples, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
