r"""Steps of DIANA to a goal, beside the bound of its paper's corollary, with the corollary's own alpha and step size.

    python benchmarks/claims/diana_complexity.py --json benchmarks/results/claims/diana_complexity.json

Mishchenko et al. 2019, theorem 2, as in the sheet: for f_i that are mu-strongly convex with L-Lipschitz gradients,
exact gradients, and h_i* = grad f_i(x*)::

    V_k = |x_k - x*|^2 + (c gamma^2 / n) sum_i |h_i - h_i*|^2        E V_k <= (1 - gamma mu)^k V_0
    gamma = min(alpha / mu, 2 / ((mu + L) (1 + c alpha)))

and its corollary: alpha = alpha_p / 2 and c = 4 (1 - alpha_p) / (n alpha_p^2), for which::

    1 / (gamma mu) = max(2 / alpha_p, (kappa + 1) (1/2 - 1/n + 1/(n alpha_p)))        kappa = L / mu

with 1 / alpha_p = sqrt(b) for p = 2 and (1 + sqrt(b)) / 2 for p = inf, in blocks of b elements. So after
ln(1 / share) / (gamma mu) steps the mean squared distance to the optimum is at most ``share`` times V_0. This counts
the steps until it is, averaged over draws, and divides them by that number: above 1 the bound would be broken. It also
fits the exponent with which the steps grow with the bound over all cells, and over the numbers of workers and over the
condition numbers alone: 1 where the bound has the right order.

The problem is regularised logistic regression of even and odd digits (scikit-learn's 8 x 8 images), rows sorted by
label, so that most workers see one label only; the l2 penalty sets kappa. Gradients travel in float32, iterates are
float64; the goal is far above what float32 can tell apart.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.descent import descend, float32_floor
from benchmarks.lib.optimum import Optimum, find_optimum
from benchmarks.lib.runs import write

WORKERS = (2, 8, 32)
CONDITIONS = (3.0, 10.0, 30.0)
BLOCKS = (16, 64)
AT_ONCE = 50
"""Steps between two looks at the goal."""


def digits(workers: int) -> LogisticProblem:
    """Return the problem of even and odd digits, with inputs from 0 to 1."""
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    signs = torch.from_numpy(labels % 2).double() * 2 - 1
    return LogisticProblem.from_rows(torch.from_numpy(inputs) / 16, signs, workers=workers, l2=1.0)


def with_condition(problem: LogisticProblem, condition: float) -> LogisticProblem:
    """Set the l2 penalty so that the largest L of a worker is ``condition`` times it."""
    largest = problem.smoothness()[1] - problem.l2
    return problem.regularised(l2=largest / (condition - 1))


def inverse_alpha(p: str, block: int) -> float:
    """Return 1 / alpha_p for blocks of ``block`` elements."""
    return math.sqrt(block) if p == "2" else (1 + math.sqrt(block)) / 2


def compressor(p: str, block: int) -> gw.Method:
    """Return block p-quantisation."""
    return gw.QSGD(levels=1, block_size=block) if p == "2" else gw.QSGDinf(levels=1, block_size=block)


def distances(
    problem: LogisticProblem, optimum: Optimum, method: gw.Method, lr: float, goal: float, most: int, seed: int
) -> list[float]:
    """Descend from zero until a tenth of the goal, or for ``most`` steps; return the squared distances."""
    link = gw.SimulatedLink([("x", torch.empty(problem.features))], method, problem.workers, min_numel=0, seed=seed)
    last = [torch.zeros_like(optimum.x)]
    found = [float(optimum.x.square().sum())]

    def exchange(gradients: torch.Tensor) -> torch.Tensor:
        return link.reduce_(gradients.float()).double()

    def watch(x: torch.Tensor) -> None:
        last[:] = [x]

    # The mean over draws is at the goal later than most draws, not after all have a tenth of it.
    while found[-1] > goal / 10 and len(found) <= most:
        steps = min(AT_ONCE, most + 1 - len(found))
        found += descend(problem, optimum, lr=lr, steps=steps, exchange=exchange, start=last[0], watch=watch)[1:]
    return found


def measure(problem: LogisticProblem, optimum: Optimum, p: str, block: int, share: float, draws: int) -> dict[str, Any]:
    """Count steps to ``share`` of V_0 and compare them with the bound."""
    n, mu, largest = problem.workers, optimum.convexity, optimum.smoothness_max
    inverse, kappa = inverse_alpha(p, block), largest / mu
    alpha, c = 1 / (2 * inverse), 4 * (1 - 1 / inverse) * inverse**2 / n
    gamma = min(alpha / mu, 2 / ((mu + largest) * (1 + c * alpha)))
    bound = max(2 * inverse, (kappa + 1) * (1 / 2 - 1 / n + inverse / n))
    if not math.isclose(bound, 1 / (gamma * mu), rel_tol=1e-9):
        raise ValueError(f"the corollary's bound is {bound}, the theorem's {1 / (gamma * mu)}")
    inner = compressor(p, block)
    if not math.isclose(1 + (inner.omega or 0.0), inverse, rel_tol=1e-6):
        raise ValueError(f"{inner!r} has the variance constant {inner.omega}, the paper's is {inverse - 1}")
    start = float(optimum.x.square().sum() + c * gamma**2 * optimum.heterogeneity)
    allowed = bound * math.log(1 / share)
    goal = share * start
    method = gw.DIANA(compressor=inner, alpha=alpha)
    runs = [distances(problem, optimum, method, gamma, goal, math.ceil(allowed), seed) for seed in range(draws)]
    longest = max(map(len, runs))
    # A run that ended earlier stands at its last distance, below a tenth of the goal.
    means = [sum(run[min(k, len(run) - 1)] for run in runs) / draws for k in range(longest)]
    steps = next((k for k, mean in enumerate(means) if mean <= goal), None)
    single = [next((k for k, d in enumerate(run) if d <= goal), None) for run in runs]
    return {
        "method": repr(method),
        "p": p,
        "block": block,
        "workers": n,
        "condition": kappa,
        "inverse_alpha_p": inverse,
        "learning_rate": gamma,
        "bound": bound,
        "reached_by": "2 / alpha_p" if 2 * inverse >= bound else "kappa",
        "allowed_steps": allowed,
        "steps": steps,
        "steps_by_draw": single,
        "of_allowed": None if steps is None else steps / allowed,
        "goal_sq": goal,
        "float32_floor_sq": float32_floor(problem, optimum),
    }


def exponent(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> float:
    """Return the slope of log steps by log bound, with a level of its own for each value of ``keys``."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        point = (math.log(row["bound"]), math.log(row["steps"]))
        groups.setdefault(tuple(row[key] for key in keys), []).append(point)
    over = under = 0.0
    for points in groups.values():
        x_mean, y_mean = (sum(axis) / len(points) for axis in zip(*points))
        over += sum((x - x_mean) * (y - y_mean) for x, y in points)
        under += sum((x - x_mean) ** 2 for x, _ in points)
    return over / under


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1e-5, help="goal, as a share of V_0")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for workers in WORKERS:
        loaded = digits(workers)
        for goal_condition in CONDITIONS:
            problem = with_condition(loaded, goal_condition)
            optimum = find_optimum(problem, tolerance=1e-12)
            for p in ("2", "inf"):
                for block in BLOCKS:
                    row = measure(problem, optimum, p, block, chosen.share, chosen.draws)
                    rows.append({"condition_wanted": goal_condition, **row})
                    print(
                        f"n={workers:<3} kappa={goal_condition:<6.0f} p={p:4s} b={block:<3} "
                        f"bound {row['bound']:7.1f} ({row['reached_by']:11s}) "
                        f"steps {row['steps']} {row['steps_by_draw']} of {row['allowed_steps']:.0f}",
                        flush=True,
                    )
    reached = [row for row in rows if row["steps"] is not None]
    shares = [row["of_allowed"] for row in reached]
    summary: dict[str, Any] = {
        "cells": len(rows),
        "cells_within_the_bound": len(reached),
        "least_of_allowed": min(shares),
        "most_of_allowed": max(shares),
        "exponent_over_all": exponent(reached, ()),
        "exponent_over_workers": exponent(reached, ("condition_wanted", "p", "block")),
        "exponent_over_conditions": exponent(reached, ("workers", "p", "block")),
        "exponent_over_compressors": exponent(reached, ("workers", "condition_wanted")),
    }
    print(summary)
    write(chosen.json, share=chosen.share, draws=chosen.draws, summary=summary, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
