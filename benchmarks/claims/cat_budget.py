"""Bytes to a given loss by CAT's three schemes and by every fixed number of elements, on logistic regression.

    python benchmarks/claims/cat_budget.py --data FOLDER --json benchmarks/results/claims/cat_budget.json

One worker descends with its whole gradient and the rate 1 / L on the first rows of each LIBSVM file of the folder, and
on rows made here that are like those of w8a: 300 features that are 0 or 1, a dozen of them 1 in a row and few of them
often, three labels in a hundred positive. It does so by ``CAT`` and with 1, 2, 4, ... and all elements in every round,
until the loss is within a hundredth and a ten-thousandth of the way from its start to the optimum. A round of T
elements costs what CAT's rule counts: a fixed part, and T times the bytes of a position and of a float32 value, or of a
sign for the scheme "sign", one by one or in packets of 1472 bytes. The result is the sum over rounds. With the scheme
"stochastic", a fixed number is the expected one, and a round costs what it sends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.optimum import find_optimum
from benchmarks.lib.runs import earlier, write
from gradwire.methods.atoms.atom_codec import probabilities
from gradwire.methods.sparse.cat import SCHEMES
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

Step = Callable[[torch.Tensor], torch.Tensor]


def sparse_step(gradient: torch.Tensor, scheme: str, number: int, draw: torch.Generator) -> torch.Tensor:
    """Return the direction that a scheme of CAT takes with a fixed number of elements; the rate is 1 / L.

    "topk": the largest elements; "sign": their mean magnitude, with their signs; "stochastic": ATOMO's elements, of
    which ``number`` are expected, times omega = |g|^2 / sum_i g_i^2 / p_i.
    """
    magnitudes = gradient.abs()
    if scheme == "stochastic":
        p = probabilities(magnitudes, float(number)).clamp(max=1.0)
        kept = p > 0
        inverse = torch.where(kept, 1.0 / torch.where(kept, p, 1.0), 0.0)
        omega = gradient.square().sum() / (gradient.square() * inverse).sum()
        taken = torch.rand(gradient.shape, generator=draw, dtype=p.dtype) < p
        return torch.where(taken, omega * gradient * inverse, 0.0)
    largest = magnitudes.topk(number).indices
    out = torch.zeros_like(gradient)
    out[largest] = gradient[largest].sign() * magnitudes[largest].mean() if scheme == "sign" else gradient[largest]
    return out


def element_bits(scheme: str, features: int) -> int:
    """Return the bits that CAT's rule counts for an element."""
    return (1 if scheme == "sign" else 32) + (features - 1).bit_length()


def descend(problem: LogisticProblem, best: float, step: Step) -> list[tuple[int, list[int]] | None]:
    """Descend to the marks; return for each the rounds and the elements of every round, or None."""
    x, sent, found = torch.zeros(problem.features, dtype=torch.float64), list[int](), list[Any]()
    rate, start = 1 / problem.smoothness()[0], problem.value(torch.zeros(problem.features, dtype=torch.float64))
    for rounds in range(1, MOST_ROUNDS + 1):
        direction = step(problem.gradients(x)[0])
        sent.append(int(direction.count_nonzero()))
        x -= rate * direction.double()
        while len(found) < len(MARKS) and problem.value(x) - best <= MARKS[len(found)] * (start - best):
            found.append((rounds, list(sent)))
        if len(found) == len(MARKS):
            break
    return found + [None] * (len(MARKS) - len(found))


def spent(reached: tuple[int, list[int]] | None, cost: MessageCost, bits: int) -> float | None:
    """Return the cost of rounds in bytes."""
    return None if reached is None else float(cost.of(torch.tensor(reached[1]) * (bits / 8)).sum())


def like_w8a(rows: int, features: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sparse rows of 0 and 1, and labels that three rows in a hundred have positive."""
    draw = torch.Generator().manual_seed(8)
    often = torch.arange(1, features + 1, dtype=torch.float64).pow(-0.9)
    chances = (12 * often / often.sum()).clamp(max=0.9)[torch.randperm(features, generator=draw)]
    inputs = (torch.rand(rows, features, generator=draw, dtype=torch.float64) < chances).double()
    scores = inputs @ torch.randn(features, generator=draw, dtype=torch.float64)
    scores += 0.5 * torch.randn(rows, generator=draw, dtype=torch.float64)
    return inputs, torch.where(scores > scores.quantile(0.97), 1.0, -1.0)


def measure(name: str, problem: LogisticProblem, scheme: str) -> list[dict[str, Any]]:
    """Return a row for each cost and mark."""
    best, d, rows = problem.value(find_optimum(problem).x), problem.features, []
    bits, numbers = element_bits(scheme, d), sorted({*(2**i for i in range(d.bit_length())), d})
    draw = torch.Generator().manual_seed(0)
    # A fixed number takes the same steps whatever they cost.
    fixed = {t: descend(problem, best, lambda g, t=t: sparse_step(g, scheme, t, draw)) for t in numbers}
    for told, cost in COSTS.items():
        adaptive = gw.CAT(scheme=scheme, fixed_bytes=cost.fixed, packet_bytes=cost.packet)
        link = gw.SimulatedLink([("x", torch.empty(d))], adaptive, 1, min_numel=0)
        found = descend(problem, best, lambda g, link=link: link.reduce_(g[None].to(torch.float32)))
        for i, mark in enumerate(MARKS):
            others = {t: spent(marks[i], cost, bits) for t, marks in fixed.items()}
            reached = {t: bytes_ for t, bytes_ in others.items() if bytes_ is not None}
            winner = min(reached, key=lambda t: reached[t], default=None)
            least, ours = None if winner is None else reached[winner], spent(found[i], cost, bits)
            row = {
                "data": name,
                "features": d,
                "scheme": scheme,
                "cost": told,
                "fixed_bytes": cost.fixed,
                "packet_bytes": cost.packet,
                "mark": mark,
                "cat_rounds": found[i] and found[i][0],
                "cat_cost_bytes": ours,
                "best_fixed_elements": winner,
                "best_fixed_cost_bytes": least,
                "cat_over_best_fixed": ours and least and ours / least,
                "fixed_cost_bytes": {str(t): others[t] for t in numbers},
            }
            rows.append(row)
            print({k: v for k, v in row.items() if k != "fixed_cost_bytes"}, flush=True)
    return rows


def main() -> None:
    """Run all, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the LIBSVM files")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--keep", action="store_true", help="do not measure again what is in the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = {}
    for file in FILES:
        rows_read = read_libsvm(options.data / file)
        data[file.removesuffix(".txt")] = rows_read.dense(torch.float64)[:ROWS], rows_read.labels[:ROWS]
    data["like w8a"] = like_w8a(ROWS)
    rows = earlier(options.json, "rows") if options.keep else []
    done = {(row["scheme"], row["data"]) for row in rows}
    for scheme in SCHEMES:
        for name, (inputs, labels) in data.items():
            if (scheme, name) not in done:
                rows += measure(name, LogisticProblem.from_rows(inputs, labels, workers=1, l2=options.l2), scheme)
                write(options.json, command="benchmarks/claims/cat_budget.py", l2=options.l2, rows_read=ROWS, rows=rows)


if __name__ == "__main__":
    main()
