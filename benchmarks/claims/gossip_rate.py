"""PowerGossip beside exact averaging in the limit: how far the mean model is from the optimum, by network and rank.

    python benchmarks/claims/gossip_rate.py --json benchmarks/results/claims/gossip_rate.json

Workers minimise the mean of f_i(X) = <H_i, (X - B_i)^2> / 2 over matrices of 24 by 16, whose H_i (from 0.5 to 1.5) and
B_i differ, with noise in each gradient and steps 2 / (t + 40). An asymptotic rate that depends neither on network nor
on compression is that of exact averaging, sigma^2 / (n T): with the same noise the excess of the mean model over the
optimum, divided by that of exact averaging, falls to one. ``measured`` is that ratio around step T, over a fifth of the
steps. The largest distance of a worker from the mean model, relative to the distance of the mean model from the
optimum, stands beside it: it need not vanish for the rate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of

Rows = Iterator[dict[str, Any]]

SHAPE, WORKERS, NOISE = (24, 16), 8, 1.0
HORIZONS = (250, 1000, 4000)
METHODS = {
    "ring, all elements": "DPSGD(graph='ring')",
    "ring, rank 1": "PowerGossip(graph='ring')",
    "ring, rank 4": "PowerGossip(graph='ring', matrix_rank=4)",
    "exponential graph, rank 1": "PowerGossip(graph='exponential')",
}
SEEDS = (0, 1)


class Problem:
    """The functions of all workers, in float64."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.curvature = 0.5 + torch.rand(WORKERS, *SHAPE, generator=draw, dtype=torch.float64)
        self.own = torch.randn(WORKERS, *SHAPE, generator=draw, dtype=torch.float64)
        self.optimum = (self.curvature * self.own).mean(0) / self.curvature.mean(0)
        self._noise = torch.Generator().manual_seed(seed + 1000)

    def noise(self) -> torch.Tensor:
        """Return the noise of a step, float64 ``[workers, n, m]``."""
        return NOISE * torch.randn(WORKERS, *SHAPE, generator=self._noise, dtype=torch.float64)

    def gradients(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradients at each worker's point, without noise."""
        return self.curvature * (x - self.own)

    def excess(self, x: torch.Tensor) -> float:
        """Return f(x) - f(optimum)."""
        return float((self.curvature.mean(0) * (x - self.optimum).square()).sum()) / 2


def trained(method: str | None, seed: int) -> tuple[dict[int, float], float]:
    """Train, by exact averaging if there is no method.

    Returns:
        The mean excess around each horizon, and at the end the largest distance of a worker from the mean model over
        that of the mean model from the optimum.
    """
    problem = Problem(seed)
    workers = [torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for _ in range(WORKERS)]
    exchange = method and gw.SimulatedLocalSteps([[("x", x)] for x in workers], method, min_numel=0, seed=seed)
    x = torch.stack([w.detach() for w in workers])
    sums: dict[int, list[float]] = {t: [] for t in HORIZONS}
    for step in range(max(HORIZONS)):
        x = x - 2 / (step + 40) * (problem.gradients(x) + problem.noise())
        if exchange:
            with torch.no_grad():
                for worker, row in zip(workers, x):
                    worker.copy_(row)
            exchange.after_step()
            x = torch.stack([w.detach() for w in workers])
        else:
            x = x.mean(0).expand_as(x).clone()
        for t, found in sums.items():
            if 0.8 * t <= step < t:
                found.append(problem.excess(x.mean(0)))
    middle = x.mean(0)
    apart = max(float((row - middle).norm()) for row in x) / float((middle - problem.optimum).norm())
    return {t: sum(found) / len(found) for t, found in sums.items()}, apart


def rates() -> Rows:
    """Yield the ratios of every method, seed by seed."""
    for seed in SEEDS:
        exact, _ = trained(None, seed)
        for name, method in METHODS.items():
            found, apart = trained(method, seed)
            for t in HORIZONS:
                row = {"case": f"{name}, {t} steps, seed {seed}", "measured": found[t] / exact[t], "said": 1.0}
                yield row | {"excess": found[t], "workers_apart": apart if t == max(HORIZONS) else None}


if __name__ == "__main__":
    figures_of({"powergossip-rate": rates}, __doc__, workers=WORKERS, shape=SHAPE, noise=NOISE)
