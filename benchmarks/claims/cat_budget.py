"""Bytes to a given loss by CAT's three schemes and by every fixed number of elements, on logistic regression.

    python benchmarks/claims/cat_budget.py --data FOLDER --work runs/cat_budget \\
        --json benchmarks/results/claims/cat_budget.json

One worker descends with its whole gradient and the rate 1 / L on the first rows of each LIBSVM file of the folder, and
on rows drawn from a seed that are like those of w8a, by ``CAT`` and with 1, 2, 4, ... and all elements of the same
scheme, until the loss is within a hundredth and a ten-thousandth of the way from its start to the optimum. With a fixed
number T of elements "topk" is ``TopK``; "sign" sends the signs of the T largest and their mean magnitude; "stochastic"
is ``ATOMO`` with T elements on average, times omega(T), the step of the paper. A round costs what CAT's rule counts: a
fixed part, and the bytes of values or signs and of positions, one by one or in packets of 1472 bytes. The result is the
sum over rounds. Random numbers have one seed, the same for both.

Pieces that are whole, a set of data and a scheme each, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.optimum import find_optimum
from benchmarks.lib.runs import claim, release, write
from gradwire.methods.sparse.cat import SCHEMES
from gradwire.methods.sparse.descent_per_byte import MessageCost, descent, element_bits
from gradwire.tools.experiments.tasks.readers import read_libsvm

FILES = {"a9a": "a9a.txt", "mushrooms": "mushrooms.txt"}
LIKE_W8A = "like w8a"
COSTS = {
    "bytes alone": MessageCost(0.0),
    "54 bytes a message": MessageCost(54.0),
    "1500 bytes a message": MessageCost(1500.0),
    "12500 bytes a message": MessageCost(12500.0),
    "packets of 1472 bytes, 66 bytes a message": MessageCost(66.0, 1472),
}
MARKS = (1e-2, 1e-4)
ROWS, MOST_ROUNDS = 4000, 8000


Operator = Callable[[Tensor], Tensor]
"""Maps a gradient, float32 ``[1, features]``, to what is sent of it."""


def like_w8a(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return inputs ``[rows, 300]`` of zeros and ones and labels, drawn from a seed.

    As in w8a a row has 11.65 ones on average, unevenly spread over the features, and 3 % of the labels are 1: those
    with the largest of a random linear function of the row, and noise.
    """
    draw = torch.Generator().manual_seed(8)
    often = torch.arange(1, 301, dtype=torch.float64).pow(-0.8)
    chance = (11.65 * often / often.sum()).clamp(max=0.95)
    inputs = (torch.rand(rows, 300, generator=draw, dtype=torch.float64) < chance).double()
    weights = torch.randn(300, generator=draw, dtype=torch.float64)
    score = inputs @ weights + torch.randn(rows, generator=draw, dtype=torch.float64)
    return inputs, torch.where(score > score.quantile(0.97), 1.0, -1.0)


def adaptive(scheme: str, cost: MessageCost, features: int) -> Operator:
    """Return CAT."""
    method = gw.CAT(scheme=scheme, fixed_bytes=cost.fixed, packet_bytes=cost.packet)
    return gw.SimulatedLink([("x", torch.empty(features))], method, 1, min_numel=0).reduce_


def fixed(scheme: str, elements: int, features: int) -> Operator:
    """Return a scheme with a fixed number of elements."""
    if scheme == "sign":
        return partial(signs, elements=elements)
    density = min(1.0, (elements + 0.5) / features) if scheme == "topk" else elements / features
    method = gw.TopK(density=density) if scheme == "topk" else gw.ATOMO(density=density)
    link = gw.SimulatedLink([("x", torch.empty(features))], method, 1, min_numel=0)
    if scheme == "topk":
        return link.reduce_

    def random(g: Tensor) -> Tensor:
        largest = g[0].abs().double().sort(descending=True).values
        omega = descent("stochastic", largest, float(largest.sum()), float(largest.norm()))[elements - 1]
        return link.reduce_(g) * float(omega)

    return random


def signs(g: Tensor, elements: int) -> Tensor:
    """Return the signs of the largest elements, times their mean magnitude."""
    index = g[0].abs().topk(elements).indices
    found = torch.zeros_like(g[0])
    found[index] = g[0, index].sign() * g[0, index].abs().mean()
    return found


def spent(
    problem: LogisticProblem, scheme: str, operator: Operator, cost: MessageCost, best: float
) -> list[dict[str, Any] | None]:
    """Return the rounds, the elements and the cost to each mark; None where a mark was not reached."""
    bits, head = element_bits(scheme, problem.features), 4.0 if scheme == "sign" else 0.0
    x, total, found = torch.zeros(problem.features, dtype=torch.float64), 0.0, list[dict[str, Any] | None]()
    rate, start = 1 / problem.smoothness()[0], problem.value(torch.zeros(problem.features, dtype=torch.float64))
    counts = list[int]()
    for rounds in range(1, MOST_ROUNDS + 1):
        step = operator(problem.gradients(x).to(torch.float32))
        counts.append(int(step.count_nonzero()))
        total += float(cost.of(torch.tensor([head + counts[-1] * bits / 8])))
        x -= rate * step.double()
        while len(found) < len(MARKS) and problem.value(x) - best <= MARKS[len(found)] * (start - best):
            found.append({"rounds": rounds, "cost_bytes": total, "counts": list(counts)})
        if len(found) == len(MARKS):
            break
    return found + [None] * (len(MARKS) - len(found))


def compared(data: str, scheme: str, problem: LogisticProblem) -> list[dict[str, Any]]:
    """Return a row for each cost and mark."""
    best, d, rows = problem.value(find_optimum(problem).x), problem.features, []
    numbers = sorted({*(2**i for i in range(d.bit_length())), d})
    head, bits = 4.0 if scheme == "sign" else 0.0, element_bits(scheme, d)
    # A fixed number takes the same steps whatever they cost.
    steps = {t: spent(problem, scheme, fixed(scheme, t, d), COSTS["bytes alone"], best) for t in numbers}
    for name, cost in COSTS.items():
        ours = spent(problem, scheme, adaptive(scheme, cost, d), cost, best)
        for mark, reached, theirs in zip(MARKS, ours, zip(*steps.values())):
            others = {
                t: float(cost.of(head + torch.tensor(of["counts"]) * bits / 8).sum())
                for t, of in zip(numbers, theirs)
                if of is not None
            }
            winner = min(others, key=lambda t: others[t])
            row = {
                "data": data,
                "scheme": scheme,
                "features": d,
                "cost": name,
                "fixed_bytes": cost.fixed,
                "packet_bytes": cost.packet,
                "mark": mark,
                "cat_rounds": reached and reached["rounds"],
                "cat_cost_bytes": reached and reached["cost_bytes"],
                "best_fixed_elements": winner,
                "best_fixed_cost_bytes": others[winner],
                "cat_over_best_fixed": reached and reached["cost_bytes"] / others[winner],
                "fixed_cost_bytes": {str(t): others.get(t) for t in numbers},
            }
            rows.append(row)
            print({k: v for k, v in row.items() if k != "fixed_cost_bytes"}, flush=True)
    return rows


def main() -> None:
    """Run what is missing, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the LIBSVM files")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--work", type=Path, default=Path("runs/cat_budget"), help="folder of finished pieces")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", nargs="+", help="sets of data or schemes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    rows, took = list[dict[str, Any]](), 0.0
    for data in (*FILES, LIKE_W8A):
        for scheme in SCHEMES:
            path = options.work / f"{data.replace(' ', '-')}-{scheme}-{options.l2:g}.json"
            chosen = not options.only or {data, scheme} & set(options.only)
            if not path.exists() and chosen and claim(path):
                began_s = time.monotonic()
                if data == LIKE_W8A:
                    inputs, labels = like_w8a()
                else:
                    read = read_libsvm(options.data / FILES[data])
                    inputs, labels = read.dense(torch.float64)[:ROWS], read.labels[:ROWS]
                problem = LogisticProblem.from_rows(inputs, labels, workers=1, l2=options.l2)
                made = {"rows": compared(data, scheme, problem), "took_s": time.monotonic() - began_s}
                path.write_text(json.dumps(made) + "\n")
                release(path)
            if path.exists():
                kept = json.loads(path.read_text())
                rows += kept["rows"]
                took += kept["took_s"]
    write(
        options.json,
        command="benchmarks/claims/cat_budget.py",
        l2=options.l2,
        rows_read=ROWS,
        took_s=math.ceil(took),
        rows=rows,
    )


if __name__ == "__main__":
    main()
