"""DIANA beside DQGD, QSGD and TernGrad: full gradients of eight unlike workers, logistic regression.

    python benchmarks/claims/diana_convergence.py --data a9a.txt --data mushrooms.txt \\
        --json benchmarks/results/claims/diana.json

Rows are sorted by label and cut in eight equal shares, so that most workers see one label only. Gradients are exact
and travel in float32; the iterate is float64. Every method takes the step size of its theory. DIANA starts from zero,
the others from the optimum, which they leave for their plateau: the mean squared distance over the last half of the
steps. With l1, the support is compared with scikit-learn's (saga, elastic net).
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
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.descent import descend, float32_floor
from benchmarks.lib.optimum import Optimum, find_optimum
from benchmarks.lib.runs import write

WORKERS = 8
BLOCK = 32
EVERY = 100
GOAL = 1e-10
P2, PINF = gw.QSGD(levels=1, block_size=BLOCK), gw.QSGDinf(levels=1, block_size=BLOCK)
METHODS: dict[str, gw.Method] = {
    "DIANA, p = inf": gw.DIANA(compressor=PINF),
    "DIANA, p = 2": gw.DIANA(compressor=P2),
    "DQGD, p = inf": gw.DQGD(compressor=PINF),
    "QSGD, p = 2": P2,
    "TernGrad": gw.TernGrad(clip=None),
    "fp32": gw.FP32(),
}


def omega_of(method: gw.Method) -> float | None:
    """Return the variance constant, where one is known; 0 for float32."""
    inner: gw.Method = getattr(method, "compressor", method)
    return inner.omega


def run(problem: LogisticProblem, optimum: Optimum, method: gw.Method, steps: int) -> dict[str, Any]:
    """Descend by one method."""
    link = gw.SimulatedLink([("x", torch.empty(problem.features))], method, WORKERS, min_numel=0)
    omega = omega_of(method)
    # TernGrad shares one scaler over workers: the whole vector is its block, and a larger scaler costs more still.
    known = (problem.features**0.5 - 1) / 2 if omega is None else omega
    factor = 6 if isinstance(method, gw.DIANA) else 2
    lr = 1 / (optimum.smoothness_max * (1 + factor * known / WORKERS))
    last: list[torch.Tensor] = []

    def exchange(gradients: torch.Tensor) -> torch.Tensor:
        return link.reduce_(gradients.float()).double()

    def watch(x: torch.Tensor) -> None:
        last[:] = [x]

    start = time.perf_counter()
    origin = torch.zeros_like(optimum.x) if isinstance(method, gw.DIANA | gw.FP32) else optimum.x
    distances = descend(problem, optimum, lr=lr, steps=steps, exchange=exchange, start=origin, watch=watch)
    tail = distances[-max(1, steps // 2) :]
    reached = next((i for i, d in enumerate(distances) if d <= GOAL), None) if origin is not optimum.x else None
    return {
        "spec": repr(method),
        "omega": omega,
        "learning_rate": lr,
        "steps": steps,
        "steps_to_goal": reached,
        "plateau_sq": sum(tail) / len(tail),
        "final_sq": distances[-1],
        "plateau_bound_sq": None
        if omega is None or isinstance(method, gw.DIANA)
        else 2 * lr * omega * optimum.heterogeneity / (optimum.convexity * WORKERS),
        "support": int((last[0] != 0).sum()),
        "support_is_the_optimums": bool(torch.equal(last[0] != 0, optimum.support)),
        "bits_per_element": link.traffic().bits_per_element,
        "seconds": time.perf_counter() - start,
        "distances_sq": distances[::EVERY],
    }


def reference(problem: LogisticProblem) -> torch.Tensor:
    """Solve by scikit-learn: minimise C sum log(1 + exp) + (1 - r) / 2 |x|^2 + r |x|_1."""
    from sklearn.linear_model import LogisticRegression

    total = problem.l1 + problem.l2
    model = LogisticRegression(
        C=1 / (problem.labels.numel() * total),
        l1_ratio=problem.l1 / total,
        penalty="elasticnet",
        solver="saga",
        fit_intercept=False,
        tol=1e-10,
        max_iter=5000,
    )
    model.fit(problem.inputs.reshape(-1, problem.features).numpy(), problem.labels.reshape(-1).numpy())
    return torch.from_numpy(model.coef_[0])


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True, help="LIBSVM file; repeatable")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--l2", type=float, default=0.01)
    parser.add_argument("--l1", type=float, default=0.005)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in chosen.data:
        loaded = LogisticProblem.from_file(path, workers=WORKERS, l2=1.0)
        for l1 in (0.0, chosen.l1):
            problem = loaded.regularised(l2=chosen.l2, l1=l1)
            optimum = find_optimum(problem)
            shared: dict[str, Any] = {
                "data": path.stem,
                "l2": chosen.l2,
                "l1": l1,
                "features": problem.features,
                "condition": optimum.condition,
                "heterogeneity": optimum.heterogeneity,
                "optimum_support": int(optimum.support.sum()),
                "float32_floor_sq": float32_floor(problem, optimum),
            }
            if l1:
                found = reference(problem)
                shared["sklearn_distance_sq"] = float((found - optimum.x).square().sum())
                shared["sklearn_support_is_the_optimums"] = bool(torch.equal(found != 0, optimum.support))
            for name, method in METHODS.items():
                steps = chosen.steps if isinstance(method, gw.DIANA | gw.FP32) else chosen.steps // 4
                rows.append({**shared, "method": name, **run(problem, optimum, method, steps)})
                r = rows[-1]
                print(
                    f"{r['data']:9s} l1={l1:<6} {name:14s} ends at {r['final_sq']:.1e}, plateau {r['plateau_sq']:.1e}, "
                    f"bound {r['plateau_bound_sq'] or float('nan'):.1e}, {GOAL:.0e} after {r['steps_to_goal']} steps, "
                    f"support {r['support']} ({r['support_is_the_optimums']}), {r['seconds']:.0f} s",
                    flush=True,
                )
    write(chosen.json, workers=WORKERS, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
