"""Steps that DIANA needs by theory: descent with exact gradients, and the step size that theory gives DIANA.

    python benchmarks/claims/diana_steps.py --data a9a.txt --data mushrooms.txt \\
        --json benchmarks/results/claims/diana_steps.json

DIANA's noise vanishes with the shifts, so that in the end it descends as the mean gradient does, with the step size
1 / (L (1 + 6 omega / N)) that its variance constant omega permits. This counts the steps from zero to the goal with
the exact mean in float64, for the problems of ``diana_convergence.py``, beside which the page shows it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.claims.diana_convergence import GOAL, METHODS, WORKERS, omega_of
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.descent import descend
from benchmarks.lib.optimum import Optimum, find_optimum
from benchmarks.lib.runs import write

AT_ONCE = 500
"""Steps between two looks at the goal."""


def count(problem: LogisticProblem, optimum: Optimum, lr: float, most: int) -> tuple[int | None, list[float]]:
    """Descend until the goal is reached; return after how many steps, and the squared distance after each."""
    last = [torch.zeros_like(optimum.x)]
    distances = [float(optimum.x.square().sum())]
    while distances[-1] > GOAL and len(distances) <= most:

        def watch(x: torch.Tensor) -> None:
            last[:] = [x]

        distances += descend(problem, optimum, lr=lr, steps=AT_ONCE, start=last[0], watch=watch)[1:]
    return next((i for i, d in enumerate(distances) if d <= GOAL), None), distances


def main() -> int:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True, help="LIBSVM file; repeatable")
    parser.add_argument("--steps", type=int, default=40_000, help="at most")
    parser.add_argument("--l2", type=float, default=0.01)
    parser.add_argument("--l1", type=float, default=0.005)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for path in chosen.data:
        loaded = LogisticProblem.from_file(path, workers=WORKERS, l2=1.0)
        for l1 in (0.0, chosen.l1):
            problem = loaded.regularised(l2=chosen.l2, l1=l1)
            optimum = find_optimum(problem)
            for name, method in METHODS.items():
                omega = omega_of(method)
                if not isinstance(method, gw.DIANA) or omega is None:
                    continue
                lr = 1 / (optimum.smoothness_max * (1 + 6 * omega / WORKERS))
                start = time.perf_counter()
                steps, distances = count(problem, optimum, lr, chosen.steps)
                at = {str(step): distances[step] for step in (3000, 6000, 12_000) if step < len(distances)}
                rows.append({"data": path.stem, "l2": chosen.l2, "l1": l1, "method": name, "omega": omega,
                             "learning_rate": lr, "steps_to_goal": steps, "distances_sq": at})  # fmt: skip
                took = time.perf_counter() - start
                print(f"{path.stem:9s} l1={l1:<6} {name:14s} {GOAL:.0e} after {steps} steps ({took:.0f} s)", flush=True)
    write(chosen.json, workers=WORKERS, goal=GOAL, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
