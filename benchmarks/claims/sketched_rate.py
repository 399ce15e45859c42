"""SketchedAMSGrad's error by workers and steps, and the numbers that a step needs by the size of the model.

    python benchmarks/claims/sketched_rate.py --json benchmarks/results/claims/sketched_rate.json

The rate. Workers minimise the mean of smooth functions that are not convex, sum_j h_ij u^2 / (1 + u^2) with
u = (x_j - b_ij) / 4, whose h_ij and b_ij differ from worker to worker, with noise of deviation 1 in each element of a
gradient. The learning rate of T steps of N workers is RATE sqrt(N / T), as in the theorem. ``squared`` is the mean over
the steps of the squared gradient of the whole function. The first term of the rate is the same wherever N T is, the
second falls with T alone. ``measured`` is ``squared`` over that of AMSGrad on all elements by one worker after N T
steps, which is 1 in the limit.

The numbers. K elements hold half of the energy of a vector of d elements, normal values the other half. ``measured`` is
the smallest number of sums in a sketch, of 3 to 9 rows, from which the K are among the 4 K candidates, on average over
draws for 99 % of them, divided by K log2(d): it must not grow if O(K log d) numbers are enough. A sketch of
normal values alone has no such elements; that is what the assumption excludes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of

Rows = Iterator[dict[str, Any]]

ELEMENTS, NOISE, RATE = 400, 1.0, 1.0
WORKERS, STEPS = (1, 4, 16), (250, 1000, 4000, 16_000)
MOST = 16_000
"""Largest number of gradients, workers times steps."""
DENSITIES = (1.0, 0.05)
SEEDS = (0, 1)

K, DRAWS, FOUND = 32, 8, 0.99
SIZES = (2**10, 2**12, 2**14, 2**16, 2**18)


class Problem:
    """The functions of all workers."""

    def __init__(self, workers: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.height = 8 * (0.5 + torch.rand(workers, ELEMENTS, generator=draw))
        # The mean function is the same for all numbers of workers, up to what the differences leave.
        middle = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed + 1)) * 2
        self.at = middle + torch.randn(workers, ELEMENTS, generator=draw)
        self._noise = torch.Generator().manual_seed(seed + 1000)

    def gradients(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradients of all workers at a point, without noise."""
        u = (x - self.at) / 4
        return self.height * u / (2 * (1 + u.square()).square())

    def noise(self) -> torch.Tensor:
        """Return the noise of a step."""
        return NOISE * torch.randn(self.at.shape, generator=self._noise)


def squared_gradient(workers: int, steps: int, density: float, seed: int) -> float:
    """Train, and return the mean of the squared gradient over the steps."""
    problem = Problem(workers, seed)
    method = gw.SketchedAMSGrad(density=density, eps=1.0)
    link = gw.SimulatedLink([("x", torch.empty(ELEMENTS))], method, workers, min_numel=0, seed=seed)
    x, rate, total = torch.zeros(ELEMENTS), RATE * math.sqrt(workers / steps), 0.0
    for _ in range(steps):
        exact = problem.gradients(x)
        total += float(exact.mean(0).square().sum())
        x -= rate * link.reduce_(exact + problem.noise())
    return total / steps


def rate() -> Rows:
    """Yield the mean squared gradients by density, workers and steps, over those of one worker's AMSGrad."""
    for seed in SEEDS:
        alone = {steps: squared_gradient(1, steps, 1.0, seed) for steps in STEPS if steps <= MOST}
        for density in DENSITIES:
            for workers in WORKERS:
                for steps in STEPS:
                    gradients = workers * steps
                    if gradients not in alone:
                        continue
                    if (workers, density) == (1, 1.0):
                        found = alone[steps]
                    else:
                        found = squared_gradient(workers, steps, density, seed)
                    named = f"density {density}, {workers} workers, {steps} steps, seed {seed}"
                    yield {"case": named, "measured": found / alone[gradients], "said": 1.0, "squared": found}


def share_found(numel: int, rows: int, columns: int) -> float:
    """Return the share of the K elements that is among the candidates, over draws."""
    found = 0
    for seed in range(DRAWS):
        draw = torch.Generator().manual_seed(seed)
        places = torch.randperm(numel, generator=draw)[:K]
        tail = torch.randn(numel, generator=draw)
        tail[places] = 0
        g = tail / tail.norm() * math.sqrt(K)
        g[places] = torch.randn(K, generator=draw).sign()
        method = gw.SketchedSGD(density=K / numel, rows=rows, columns=columns, candidates=4)
        mean = gw.simulate(g[None], method, seed=seed).mean
        found += int((mean[places] != 0).sum())
    return found / (K * DRAWS)


def numbers_needed(numel: int, rows: int) -> int:
    """Return rows times the smallest number of columns, in steps of a tenth, that find the elements."""
    columns = K // 2
    while share_found(numel, rows, columns) < FOUND:
        columns = math.ceil(1.1 * columns)
    return rows * columns


def numbers() -> Rows:
    """Yield the numbers that a sketch needs by the size of the vector."""
    for numel in SIZES:
        needed = {rows: numbers_needed(numel, rows) for rows in (3, 5, 7, 9)}
        rows = min(needed, key=lambda r: needed[r])
        measured = needed[rows] / (K * math.log2(numel))
        yield {"case": f"{numel} elements", "measured": measured, "said": None, "rows": rows, "needed": needed}


if __name__ == "__main__":
    claims = {"sketched-amsgrad-rate": rate, "sketched-amsgrad-log-d-communication": numbers}
    figures_of(claims, __doc__, elements=ELEMENTS, noise=NOISE, rate=RATE, eps=1.0, k=K)
