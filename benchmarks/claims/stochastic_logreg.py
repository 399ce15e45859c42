"""Stochastic gradients on logistic regression: sparse steps with a memory, and DIANA with variance-reduced gradients.

    python benchmarks/claims/stochastic_logreg.py --data a9a.txt --json benchmarks/results/claims/stochastic_logreg.json

*Memory*: one worker takes one row a step, with the steps 2 / (l2 (t + a)) of Stich, Cordonnier and Jaggi (2018). What
is measured is the mean of all iterates, weighted by (t + a)^2.

*Variance*: eight workers take 16 rows a step, with a constant step. With L-SVRG (Kovalev et al. 2020) a worker sends
g_i(x) - g_i(w) + grad f_i(w) in the place of g_i(x), where w becomes x with a probability of 16 / rows. DIANA exchanges
the one as it exchanges the other. So this is VR-DIANA (Horvath et al. 2019).

``excess`` is P(x) - P(x*).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.optimum import find_optimum
from benchmarks.lib.runs import write

L2, WORKERS, BATCH = 1e-2, 8, 16
SPARSE = ("ErrorFeedback(TopK(density={}))", "ErrorFeedback(RandK(density={}))", "TopK(density={})")
MEASURED = (300, 3000, 30_000)
"""Steps after which to measure a training with a memory."""
REDUCED = (1000, 2000, 4000)
"""Steps after which to measure one with variance-reduced gradients."""


def loss_gradients(problem: LogisticProblem, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return each worker's mean gradient over some of its rows, int64 ``[workers, batch]``."""
    inputs = torch.take_along_dim(problem.inputs, rows[:, :, None], dim=1)
    labels = torch.take_along_dim(problem.labels, rows, dim=1)
    slopes = -labels * torch.sigmoid(-labels * (inputs @ x))
    return (slopes[:, None] @ inputs)[:, 0] / rows.shape[1] + problem.l2 * x


def with_a_memory(problem: LogisticProblem, best: float, spec: str) -> Iterator[dict[str, Any]]:
    """Take sparse steps by single rows."""
    rows = problem.labels.shape[1]
    largest = float(problem.inputs.square().sum(dim=2).max()) / 4 + problem.l2
    shift = max(problem.features, 2 * largest / problem.l2)
    draws = torch.randint(rows, (MEASURED[-1], 1, 1), generator=torch.Generator().manual_seed(0))
    link = gw.SimulatedLink([("x", torch.empty(problem.features))], spec, 1, min_numel=0)
    x = torch.zeros(problem.features, dtype=torch.float64)
    mean, weights = torch.zeros_like(x), 0.0
    for step, draw in enumerate(draws, start=1):
        gradient = loss_gradients(problem, x, draw).float()
        x = x - 2 / (problem.l2 * (step + shift)) * link.reduce_(gradient).double()
        weights += (step + shift) ** 2
        mean += (step + shift) ** 2 / weights * (x - mean)
        if step in MEASURED:
            yield {"case": "memory", "method": spec, "steps": step, "excess": problem.value(mean) - best}


def with_reduced_variance(problem: LogisticProblem, best: float, spec: str, reduced: bool) -> Iterator[dict[str, Any]]:
    """Descend by small batches of eight workers."""
    rows, generator = problem.labels.shape[1], torch.Generator().manual_seed(0)
    link = gw.SimulatedLink([("x", torch.empty(problem.features))], spec, WORKERS, min_numel=0)
    x = torch.zeros(problem.features, dtype=torch.float64)
    known = [x.clone() for _ in range(WORKERS)]
    full = problem.gradients(x)
    # The gradients of the rows at w: a worker at a time, since each has a w of its own.
    alone = [_alone(problem, worker) for worker in range(WORKERS)]
    rate = 0.5 / problem.smoothness()[1]
    for step in range(1, REDUCED[-1] + 1):
        draw = torch.randint(rows, (WORKERS, BATCH), generator=generator)
        sent = loss_gradients(problem, x, draw)
        if reduced:
            for worker in range(WORKERS):
                sent[worker] += (
                    full[worker] - loss_gradients(alone[worker], known[worker], draw[worker : worker + 1])[0]
                )
                if float(torch.rand((), generator=generator)) < BATCH / rows:
                    known[worker], full[worker] = x.clone(), alone[worker].gradients(x)[0]
        x = x - rate * link.reduce_(sent.float()).double()
        if step in REDUCED:
            case = "L-SVRG" if reduced else "batches"
            yield {"case": case, "method": spec, "steps": step, "excess": problem.value(x) - best}


def _alone(problem: LogisticProblem, worker: int) -> LogisticProblem:
    inputs, labels = problem.inputs[worker : worker + 1], problem.labels[worker : worker + 1]
    return LogisticProblem(inputs=inputs, labels=labels, l2=problem.l2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a LIBSVM file")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    single = LogisticProblem.from_file(given.data, workers=1, l2=L2)
    best = single.value(find_optimum(single).x)
    for spec in ("fp32", *(spec.format(round(1 / single.features, 6)) for spec in SPARSE)):
        rows += with_a_memory(single, best, spec)
    split = LogisticProblem.from_file(given.data, workers=WORKERS, l2=L2)
    best = split.value(find_optimum(split).x)
    for spec in ("fp32", "diana"):
        for reduced in (False, True):
            rows += with_reduced_variance(split, best, spec, reduced)
    for row in rows:
        print(row["case"], row["method"], row["steps"], f"{row['excess']:.3g}")
    write(given.json, data=given.data.stem, l2=L2, workers=WORKERS, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
