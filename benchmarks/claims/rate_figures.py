"""Numbers of iterations and of bits beside the formulas of papers, each by a function of its own.

    python benchmarks/claims/rate_figures.py --json benchmarks/results/claims/rate_figures.json

Where this library has the operator, it is run. A form that it does not offer is written down here, in float64.
``said`` is the figure of the claim: 1.0 for a formula, of which ``measured`` is a share.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of

Rows = Iterator[dict[str, Any]]


def cat_rates() -> Rows:
    """Count steps of 1 / L by the T largest elements to a goal, beside the bounds with a_min = T / d.

    Convex: least squares with more unknowns than equations, f - f* at most eps; R is the largest distance of an iterate
    to the limit. Not convex: a sum of x^2 / (1 + x^2), with the squared norm of a gradient at most eps.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 100, generator=generator, dtype=torch.float64) / 10
    start = torch.randn(100, generator=generator, dtype=torch.float64)
    target = inputs @ torch.randn(100, generator=generator, dtype=torch.float64)
    steepest = float(torch.linalg.matrix_norm(inputs, 2)) ** 2
    for density, eps in itertools.product((0.01, 0.05, 0.2), (1e-1, 1e-2)):
        link = gw.SimulatedLink([("x", torch.empty(100))], f"TopK(density={density})", 1, min_numel=0)

        def chosen(gradient: torch.Tensor, link: gw.SimulatedLink = link) -> torch.Tensor:
            return link.reduce_(gradient.float()[None]).double()

        x, path = start.clone(), [start]
        while float((inputs @ x - target).square().sum()) / 2 > eps:
            x = x - chosen(inputs.T @ (inputs @ x - target)) / steepest
            path.append(x)
        steps = len(path) - 1
        limit = x + torch.linalg.pinv(inputs) @ (target - inputs @ x)
        radius = max(float((point - limit).square().sum()) for point in path)
        yield {"case": f"convex, T = {100 * density:g} of 100, eps {eps:g}: steps over 2 L R^2 / (eps a_min)",
               "measured": steps * eps * density / (2 * steepest * radius), "said": 1.0}  # fmt: skip
        x, steps = 2 * start, 0
        first = float((x.square() / (1 + x.square())).sum())
        while float((gradient := 2 * x / (1 + x.square()).square()).square().sum()) > eps:
            x, steps = x - chosen(gradient) / 2, steps + 1
        yield {"case": f"not convex, T = {100 * density:g} of 100, eps {eps:g}: steps over 2 L (F0 - F*) / (eps a_min)",
               "measured": steps * eps * density / (4 * first), "said": 1.0}  # fmt: skip


def quantised(x: np.ndarray, levels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round values from 0 to 1 at random to the numbers of neighbouring levels, which begin with 0 and end with 1."""
    below = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, len(levels) - 2)
    share = (x - levels[below]) / (levels[below + 1] - levels[below])
    return below + (rng.uniform(size=x.shape) < share)


def entropy(symbols: np.ndarray) -> float:
    """Return the bits a symbol that no code of single symbols beats."""
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(share * np.log2(share)).sum())


def qsgd_exponent() -> Rows:
    """Compare the entropy of QSGD's values of a normal vector with both readings of the bound on its code's length."""
    rng, numel = np.random.default_rng(0), 10_000
    for s in (1, 3, 10, 30, 100):
        x = rng.normal(size=(20, numel))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        symbols = quantised(np.abs(x), np.arange(s + 1) / s, rng) * np.sign(x).astype(int)
        bits = numel * entropy(symbols)
        for name, nonzero in (
            ("s (s + sqrt(n))", s * (s + math.sqrt(numel))),
            ("s^2 + sqrt(n)", s * s + math.sqrt(numel)),
        ):
            bound = (3 + 1.5 * math.log2(2 * (s * s + numel) / nonzero)) * nonzero + 32
            yield {"case": f"n = {numel}, s = {s}: entropy over the bound with {name}", "measured": bits / bound,
                   "said": 1.0}  # fmt: skip


def huffman(symbols: np.ndarray) -> float:
    """Return the mean length of a Huffman code of some symbols, in bits."""
    counts = np.unique(symbols, return_counts=True)[1]
    heap, total = [int(count) for count in counts], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total / symbols.size


def alq_bits() -> Rows:
    """Measure a block's bits by a Huffman code of levels and a sign where the level is not 0, beside the bound."""
    rng = np.random.default_rng(0)
    kinds = {"uniform": np.arange(8) / 7, "powers of two": np.array([0.0, *(2.0**-k for k in range(6, -1, -1))])}
    for (kind, levels), numel in itertools.product(kinds.items(), (64, 512, 8192)):
        x = np.abs(rng.normal(size=(100, numel)))
        symbols = quantised(x / np.linalg.norm(x, axis=1, keepdims=True), levels, rng)
        bits = 32 + (symbols > 0).sum() / 100 + numel * huffman(symbols)
        nonzero = min(levels[1] ** -2 + math.sqrt(numel) / levels[1], numel)
        bound = 32 + nonzero + numel * (entropy(symbols) + 1)
        yield {"case": f"{kind}, blocks of {numel}: bits over the bound", "measured": bits / bound, "said": 1.0}
        yield {"case": f"{kind}, blocks of {numel}: values that are not zero over n",
               "measured": float((symbols > 0).sum() / 100 / nonzero), "said": 1.0}  # fmt: skip


def gtopk_numbers() -> Rows:
    """Measure the numbers that a worker of gTop-k sends, over 2 k log2(P)."""
    numel, density = 100_000, 0.01
    for workers in (2, 4, 8, 16):
        link = gw.SimulatedLink([("x", torch.empty(numel))], f"GTopK(density={density})", workers, min_numel=0)
        link.reduce_(torch.randn(workers, numel, generator=torch.Generator().manual_seed(0)))
        numbers = link.traffic().sent_bytes / 4
        yield {"case": f"{workers} workers: words of 32 bits over 2 k log2(P)",
               "measured": numbers / (2 * numel * density * math.log2(workers)), "said": 1.0}  # fmt: skip


def dithering() -> Rows:
    """Measure bias and variance of natural dithering with 8 levels, by the norm that scales values."""
    rng, numel, draws = np.random.default_rng(0), 64, 100_000
    levels = np.array([0.0, *(2.0**-k for k in range(7, -1, -1))])
    x = rng.normal(size=numel)
    for p in (1, 2, np.inf):
        norm = np.linalg.norm(x, p)
        got = levels[quantised(np.tile(np.abs(x) / norm, (draws, 1)), levels, rng)] * norm * np.sign(x)
        off = np.abs(got.mean(axis=0) - x) / np.maximum(got.std(axis=0), 1e-6) * math.sqrt(draws)
        yield {"case": f"p = {p:g}: largest bias of {numel} elements, in standard errors", "measured": float(off.max()),
               "said": None}  # fmt: skip
        spread = float(np.square(got - x).sum(axis=1).mean() / np.square(x).sum())
        yield {"case": f"p = {p:g}: variance over the square", "measured": spread, "said": None}


CLAIMS = {
    "cat-rates-convex-and-nonconvex": cat_rates,
    "qsgd-theorem-3-4-exponent": qsgd_exponent,
    "alq-bound-of-bits": alq_bits,
    "gtopk-time-model": gtopk_numbers,
    "naturaldithering-p-1": dithering,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
