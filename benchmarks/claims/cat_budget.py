"""Bytes to a given loss by CAT and by every fixed number of elements, on logistic regression.

    python benchmarks/claims/cat_budget.py --data FOLDER --json benchmarks/results/claims/cat_budget.json

One worker descends with its whole gradient and the rate 1 / L on the first rows of each LIBSVM file of the folder, by
``CAT`` and by ``TopK`` with 1, 2, 4, ... and all elements, until the loss is within a hundredth and a ten-thousandth of
the way from its start to the optimum. A round of T elements costs what CAT's rule counts: a fixed part, and T times the
bytes of a float32 value and a position, one by one or in packets of 1472 bytes. The result is the sum over rounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.optimum import find_optimum
from benchmarks.lib.runs import write
from gradwire.methods.sparse.descent_per_byte import MessageCost
from gradwire.tools.experiments.tasks.readers import read_libsvm

FILES = ("a9a.txt", "mushrooms.txt")
COSTS = {
    "bytes alone": MessageCost(0.0),
    "54 bytes a message": MessageCost(54.0),
    "1500 bytes a message": MessageCost(1500.0),
    "12500 bytes a message": MessageCost(12500.0),
    "packets of 1472 bytes, 66 bytes a message": MessageCost(66.0, 1472),
}
MARKS = (1e-2, 1e-4)
ROWS, MOST_ROUNDS = 4000, 8000


def spent(problem: LogisticProblem, method: gw.Method, cost: MessageCost, best: float) -> list[dict[str, Any] | None]:
    """Return the rounds and the cost to each mark; None where a mark was not reached."""
    link = gw.SimulatedLink([("x", torch.empty(problem.features))], method, 1, min_numel=0)
    bits = 32 + (problem.features - 1).bit_length()
    x, total, found = torch.zeros(problem.features, dtype=torch.float64), 0.0, list[dict[str, Any] | None]()
    rate, start = 1 / problem.smoothness()[0], problem.value(torch.zeros(problem.features, dtype=torch.float64))
    for rounds in range(1, MOST_ROUNDS + 1):
        step = link.reduce_(problem.gradients(x).to(torch.float32))
        total += float(cost.of(torch.tensor([int(step.count_nonzero()) * bits / 8])))
        x -= rate * step.double()
        while len(found) < len(MARKS) and problem.value(x) - best <= MARKS[len(found)] * (start - best):
            found.append({"rounds": rounds, "cost_bytes": total})
        if len(found) == len(MARKS):
            break
    return found + [None] * (len(MARKS) - len(found))


def main() -> None:
    """Run all, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the LIBSVM files")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for file in FILES:
        rows_read = read_libsvm(options.data / file)
        inputs, labels = rows_read.dense(torch.float64)[:ROWS], rows_read.labels[:ROWS]
        problem = LogisticProblem.from_rows(inputs, labels, workers=1, l2=options.l2)
        best, d = problem.value(find_optimum(problem).x), problem.features
        numbers = sorted({*(2**i for i in range(d.bit_length())), d})
        # A fixed number takes the same steps whatever they cost.
        fixed = {
            t: spent(problem, gw.TopK(density=min(1.0, (t + 0.5) / d)), COSTS["bytes alone"], best) for t in numbers
        }
        for name, cost in COSTS.items():
            adaptive = gw.CAT(fixed_bytes=cost.fixed, packet_bytes=cost.packet)
            found = spent(problem, adaptive, cost, best)
            for i, mark in enumerate(MARKS):
                element = 32 + (d - 1).bit_length()
                others = {
                    t: reached["rounds"] * float(cost.of(torch.tensor([t * element / 8])))
                    for t, marks in fixed.items()
                    if (reached := marks[i]) is not None
                }
                winner = min(others, key=lambda t: others[t])
                ours = found[i]
                row = {
                    "data": file.removesuffix(".txt"),
                    "features": d,
                    "cost": name,
                    "fixed_bytes": cost.fixed,
                    "packet_bytes": cost.packet,
                    "mark": mark,
                    "cat_rounds": ours and ours["rounds"],
                    "cat_cost_bytes": ours and ours["cost_bytes"],
                    "best_fixed_elements": winner,
                    "best_fixed_cost_bytes": others[winner],
                    "cat_over_best_fixed": ours and ours["cost_bytes"] / others[winner],
                    "fixed_cost_bytes": {str(t): others.get(t) for t in numbers},
                }
                rows.append(row)
                print({k: v for k, v in row.items() if k != "fixed_cost_bytes"}, flush=True)
    write(options.json, command="benchmarks/claims/cat_budget.py", l2=options.l2, rows_read=ROWS, rows=rows)


if __name__ == "__main__":
    main()
