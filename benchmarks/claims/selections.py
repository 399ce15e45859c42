"""Figures about which elements, atoms, levels and signs are chosen, each by a function of its own; seconds each.

    python benchmarks/claims/selections.py --json benchmarks/results/claims/selections.json

Where a claim is about an operator of this library, the operator is run. Where it is about a form that the library does
not offer, the form is written down here. ``said`` is the figure of the claim.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of

Floats = npt.NDArray[np.float64]


def approximate_gamma() -> Iterator[dict[str, Any]]:
    """Compute the share of the aim that passes the threshold -beta (ln delta + ln Gamma(alpha)) of a gamma law."""
    for shape, density in itertools.product((0.3, 0.5, 0.7, 0.9), (0.001, 0.01)):
        threshold = -(math.log(density) + math.lgamma(shape))
        passed = float(torch.special.gammaincc(torch.tensor(shape).double(), torch.tensor(threshold).double()))
        yield {"case": f"shape {shape}, density {density}", "measured": passed / density, "said": None}


def forced_rank() -> Iterator[dict[str, Any]]:
    """Compute by how much atoms are over- and underrated that are kept only where two of four were drawn."""
    values, budget = (5.0, 3.0, 2.0, 1.0), 2
    chances = [budget * value / sum(values) for value in values]
    kept, weight = [0.0] * 4, 0.0
    for drawn in itertools.product((0, 1), repeat=4):
        if sum(drawn) == budget:
            chance = math.prod(p if here else 1 - p for p, here in zip(chances, drawn))
            weight += chance
            kept = [total + chance * here for total, here in zip(kept, drawn)]
    for value, total, p, said in zip(values, kept, chances, (1.04, 1.13, 0.85, 0.68)):
        yield {"case": f"singular value {value:g}", "measured": total / weight / p, "said": said}


def _descend(gradient: Any, steps: int, rate: float) -> torch.Tensor:
    """Take sign steps from (1, 1), or from 0 in one dimension."""
    x = gradient(None)
    link = gw.SimulatedLink([("x", torch.empty(x.numel()))], "signsgd", 1, min_numel=0)
    for _ in range(steps):
        x = (x - rate * link.reduce_(gradient(x)[None].clone())).clamp(-10, 10)
    return x


def signs() -> Iterator[dict[str, Any]]:
    """Run the three convex examples on which signs do not descend; told are objectives at the start and at the end."""
    generator, eps = torch.Generator().manual_seed(0), 0.1

    def skewed(x: torch.Tensor | None) -> torch.Tensor:
        if x is None:
            return torch.zeros(1)
        # Its mean is 1/4, and three in four draws are negative.
        return torch.where(torch.rand(1, generator=generator) < 0.25, 4.0, -1.0)

    def kink(x: torch.Tensor | None) -> torch.Tensor:
        if x is None:
            return torch.ones(2)
        across = torch.sign(x[0] - x[1]) if x[0] != x[1] else torch.tensor(1.0)
        return eps * torch.sign(x.sum()) * torch.ones(2) + across * torch.tensor([1.0, -1.0])

    def squares(x: torch.Tensor | None) -> torch.Tensor:
        if x is None:
            return torch.ones(2)
        sign = 1.0 if torch.rand((), generator=generator) < 0.5 else -1.0
        row = sign * torch.tensor([1.0, -1.0]) + eps * torch.ones(2)
        return 2 * (row @ x) * row

    def of_squares(x: torch.Tensor) -> float:
        rows = [sign * torch.tensor([1.0, -1.0]) + eps * torch.ones(2) for sign in (1, -1)]
        return sum(float(row @ x) ** 2 for row in rows)

    yield {
        "case": "x / 4 with skewed noise: from 0 to",
        "measured": float(_descend(skewed, 1000, 0.01)) / 4,
        "said": None,
    }
    x = _descend(kink, 1000, 0.01)
    found = eps * abs(float(x.sum())) + abs(float(x[0] - x[1]))
    yield {"case": "0.1 |x + y| + |x - y|: from 0.2 to", "measured": found, "said": None}
    found = of_squares(_descend(squares, 1000, 0.01))
    yield {"case": f"two squares: from {of_squares(torch.ones(2)):.2f} to", "measured": found, "said": None}


def tree() -> Iterator[dict[str, Any]]:
    """Measure in how many rounds gTop-k's tree keeps the elements that the sum of all lists would."""
    rounds, numel, kept = 100, 10_000, 100
    for workers, common in itertools.product((4, 8), (0.5, 1.0, 2.0)):
        equal, shared = 0, 0.0
        for seed in range(rounds):
            generator = torch.Generator().manual_seed(seed)
            x = common * torch.randn(numel, generator=generator) + torch.randn(workers, numel, generator=generator)
            lists = torch.zeros_like(x)
            for row, own in zip(lists, x):
                chosen = own.abs().topk(kept).indices
                row[chosen] = own[chosen]
            exact = set(lists.sum(dim=0).abs().topk(kept).indices.tolist())
            link = gw.SimulatedLink([("x", torch.empty(numel))], f"GTopK(density={kept / numel})", workers, min_numel=0)
            found = set(link.reduce_(x.clone()).nonzero()[:, 0].tolist())
            equal, shared = equal + (found == exact), shared + len(found & exact) / kept / rounds
        case = f"{workers} workers, common part {common:g} times their own"
        yield {"case": f"{case}: rounds with the same elements", "measured": equal / rounds, "said": None}
        yield {"case": f"{case}: elements in common", "measured": shared, "said": None}


def ratio() -> Iterator[dict[str, Any]]:
    """Read the ratio that AMQ fits to normal values."""
    for bits in (3, 4, 6, 8):
        spec = f"AMQ(bits={bits}, block_size=512, updates=(0,), every=1000000)"
        link = gw.SimulatedLink([("x", torch.empty(512 * 256))], spec, 1, min_numel=0)
        link.reduce_(torch.randn(1, 512 * 256, generator=torch.Generator().manual_seed(0)))
        magnitudes = link.state_dict()["global"]["levels"].abs().flatten().unique()
        found = float(magnitudes[-2] / magnitudes[-1])
        yield {"case": f"{bits} bits", "measured": found, "said": 0.94 if bits == 8 else None}


def _variance(levels: Floats, places: Floats, weights: Floats) -> float:
    upper = np.clip(np.searchsorted(levels, places, side="right"), 1, len(levels) - 1)
    return float((weights * (levels[upper] - places) * (places - levels[upper - 1])).sum())


def local_optima() -> Iterator[dict[str, Any]]:
    """Count the optima that descent by one level at a time ends in, from 200 starts, for a law with five bumps."""
    places = np.linspace(0, 1, 4001)
    weights = sum(np.exp(-0.5 * ((places - at) / 0.01) ** 2) for at in (0.1, 0.25, 0.45, 0.6, 0.85))
    weights = np.asarray(weights / weights.sum())
    mass, moment = np.cumsum(weights), np.cumsum(weights * places)
    rng = np.random.default_rng(0)
    for free in (2, 3, 4, 5):
        ends = []
        for _ in range(200):
            index = np.concatenate([[0], np.sort(rng.choice(np.arange(1, 4000), free, replace=False)), [4000]])
            for _ in range(400):
                before = index.copy()
                for j in range(1, free + 1):
                    low, high = index[j - 1], index[j + 1]
                    # The best place between two neighbours has as much mass above it, by distance, as they hold.
                    held = (moment[high] - moment[low]) - places[low] * (mass[high] - mass[low])
                    above = (mass[high] - mass[low : high + 1]) * (places[high] - places[low])
                    index[j] = min(max(low + int((above > held).sum()), low + 1), high - 1)
                if (index == before).all():
                    break
            ends.append(_variance(places[index], places, weights))
        distinct = np.unique(np.round(np.log(np.array(ends)) / 0.02))
        yield {"case": f"{free} free levels: optima", "measured": len(distinct), "said": None}
        yield {"case": f"{free} free levels: worst over best", "measured": max(ends) / min(ends), "said": None}


CLAIMS = {
    "sidco-approximate-gamma-under-selects": approximate_gamma,
    "atomo-forced-rank-is-biased": forced_rank,
    "signsgd-other-counter-examples": signs,
    "gtopk-agreement-in-half-of-rounds": tree,
    "amq-best-ratio-at-8-bits": ratio,
    "alq-local-optimum": local_optima,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
