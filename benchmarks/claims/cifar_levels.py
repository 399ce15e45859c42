"""The AQSGD comparison (Faghri et al., NeurIPS 2020): 3 bits, 4 workers, CIFAR-10, whole-network blocks of many sizes.

    python benchmarks/claims/cifar_levels.py --data FOLDER --work runs/cifar \\
        --json benchmarks/results/claims/cifar_levels.json

ResNet-8, total batch 128, five epochs (1560 steps) of data batches 1 to 4, evaluated on batch 5; SGD with momentum
0.9, learning rate 0.1 with a cosine schedule. Every parameter is compressed (``min_numel=0``) and blocks are cut from
the joined gradient, as the authors cut them. Each run is ``gradwire train cifar10 --simulate``, which gives the bits of
four real workers. Runs that are whole are not repeated; two copies of the script share the work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import claim, final, train, write

STEPS = 1560
SIZES = (64, 32768, 1024, 8192)
ENDS = (64, 32768)
UPDATES = "updates=(0, 100, 1000)"
METHODS = {
    "ALQ": f"ALQ(block_size={{}}, {UPDATES})",
    "ALQ-N": f"ALQN(block_size={{}}, {UPDATES})",
    "AMQ": f"AMQ(block_size={{}}, {UPDATES})",
    "AMQ-N": f"AMQN(block_size={{}}, {UPDATES})",
    "QSGDinf": "QSGDinf(levels=3, block_size={}, blocks='model')",
    "TernGrad": "QSGDinf(levels=1, block_size={}, blocks='model')",
    "NUQSGD": "NUQSGD(levels=4, zero=False, block_size={}, blocks='model')",
}
# The ends of the table first, then what lies between, then second seeds at the ends.
ORDER = [("fp32", 0, 0)]
ORDER += [(name, size, 0) for size in SIZES[:2] for name in METHODS]
ORDER += [("fp32", 0, 1)]
ORDER += [(name, size, 0) for size in SIZES[2:] for name in METHODS]
ORDER += [(name, size, 1) for size in reversed(ENDS) for name in METHODS]


def spec(name: str, size: int) -> str:
    """Return the method of a row and a block size."""
    return name if name == "fp32" else METHODS[name].format(size)


def folder_of(arguments: argparse.Namespace, name: str, size: int, seed: int) -> Path:
    """Return a run's folder."""
    work: Path = arguments.work
    return work / f"{name}-{size}-{seed}"


def run_all(arguments: argparse.Namespace) -> None:
    """Run whatever is neither whole nor taken."""
    for name, size, seed in ORDER:
        folder = folder_of(arguments, name, size, seed)
        if final(folder, arguments.steps) or not claim(folder):
            continue
        options = {"data": arguments.data, "method": spec(name, size), "workers": 4, "seed": seed, "min-numel": 0}
        options |= {"steps": arguments.steps, "eval-every": max(1, arguments.steps // 5), "log-every": 100}
        train("cifar10", folder, options)


def collect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather every whole run, and the mean over seeds of each cell."""
    rows = []
    for name, size, seed in ORDER:
        row = final(folder_of(arguments, name, size, seed), arguments.steps)
        if row:
            rows.append(
                {
                    "method": name,
                    "spec": spec(name, size),
                    "block_size": size,
                    "seed": seed,
                    "accuracy": row["accuracy"],
                    "loss": row["loss"],
                    "bits_per_element": row["bits_per_element"],
                }
            )
    table = []
    for name in ("fp32", *METHODS):
        for size in (0,) if name == "fp32" else sorted(SIZES):
            found = [r["accuracy"] for r in rows if (r["method"], r["block_size"]) == (name, size)]
            if found:
                table.append(
                    {
                        "method": name,
                        "block_size": size,
                        "seeds": len(found),
                        "accuracy_mean": mean(found),
                        "accuracy_std": stdev(found) if len(found) > 1 else None,
                    }
                )
    return {"table": table, "runs": rows}


def main() -> int:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--work", type=Path, default=Path("runs/cifar"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.collect:
        run_all(arguments)
    found = collect(arguments)
    for line in found["table"]:
        print(
            f"{line['method']:9s} {line['block_size']:6d}  {100 * line['accuracy_mean']:.2f} % ({line['seeds']} seeds)"
        )
    what = f"ResNet-8 on CIFAR-10 (batches 1-4, evaluated on 5), 4 workers, total batch 128, {arguments.steps} steps"
    write(arguments.json, what=what, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
