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
from gradwire.kernels.entropy.elias import elias_bits

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


def variance_reduced_bits() -> Rows:
    """Sum the bits of epochs of QSVRG, dense codes with s = sqrt(n), over the bound (32 + 2.8 n)(T + 1) + 32 n.

    Least squares of 400 samples that two workers share. An epoch sends the whole gradient in float32, and T vectors
    Q(g_j(x) - g_j(y) + g(y)).
    """
    rows, steps = 200, 60
    for numel in (256, 1024, 4096):
        s = math.isqrt(numel)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.nn.functional.normalize(torch.randn(2, rows, numel, generator=generator), dim=2)
        target, y = torch.randn(2, rows, generator=generator), torch.zeros(numel)
        link = gw.SimulatedLink([("x", y)], f"QSGD(levels={s}, block_size={numel})", 1, min_numel=0)
        for epoch in range(3):
            whole = torch.einsum("wri,wr->i", inputs, inputs @ y - target) / (2 * rows) + y / 2
            x, bits, first = y.clone(), 32 * numel, float(whole.norm())
            for _ in range(steps):
                j = int(torch.randint(rows, (), generator=generator))
                vector = inputs[0, j] * (inputs[0, j] @ (x - y)) + (x - y) / 2 + whole
                sent = link.reduce_(vector[None].clone())
                levels = (sent * s / vector.norm()).round().int()
                bits += 32 + elias_bits(levels, "dense")
                x = x - 0.1 * sent
            y = x
            bound = (32 + 2.8 * numel) * (steps + 1) + 32 * numel
            yield {"case": f"n = {numel}, epoch {epoch + 1} of {steps} steps, gradient of norm {first:.3g}: bits over "
                   "the bound", "measured": bits / bound, "said": 1.0}  # fmt: skip


def signum_warm_up() -> Rows:
    """Compute C(beta): the first step from which (t / 2) b^t <= 1 / ((1 - b^2)(t + 1)) and b^(t + 1) <= 1 / 2."""
    for beta, said in ((0.5, None), (0.9, 54), (0.99, None)):
        wrong = [t for t in range(10_000) if t / 2 * beta**t > 1 / ((1 - beta**2) * (t + 1)) or beta ** (t + 1) > 1 / 2]
        yield {"case": f"C({beta:g})", "measured": max(wrong, default=-1) + 1, "said": said}


def exact_coordinates() -> Rows:
    """Count rotated coordinates above QUIC-FL's bound T = 3.097, and the bits an element that the formula gives."""
    numel, rounds = 4096, 200
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "normal": lambda: torch.randn(numel, generator=generator),
        "lognormal": lambda: torch.randn(numel, generator=generator).exp(),
        "a spike": lambda: torch.nn.functional.one_hot(torch.tensor(0), numel).float(),
    }
    for kind, drawn in kinds.items():
        shares = []
        for _ in range(rounds):
            signs = torch.randint(0, 2, (numel,), generator=generator).float() * 2 - 1
            z = hadamard(drawn() * signs)
            shares.append(float((z.abs() * math.sqrt(numel) / z.norm() > 3.097).float().mean()))
        p = float(np.mean(shares))
        yield {
            "case": f"{kind} values, 4096 a block: 512 times the share sent exactly",
            "measured": 512 * p,
            "said": 1.0,
        }
        for bits in (1, 4):
            yield {"case": f"{kind} values, {bits} bits: B + p (32 + 12) + 32 / b with this share",
                   "measured": bits + 44 * p + 32 / numel, "said": bits + 44 / 512 + 32 / numel}  # fmt: skip


def clipped_errors() -> Rows:
    """Measure E|Q(x) - x|^2 / |x|^2 of TernGrad over 60 vectors, by what its clip multiplies."""
    numel = 65_536
    for rule in ("std", "rms"):
        link = gw.SimulatedLink([("x", torch.empty(numel))], f"TernGrad(clip_by={rule!r})", 1, min_numel=0)
        for kind, said in (("normal", 1.007), ("lognormal", 0.732)):
            errors = []
            for seed in range(60):
                x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
                x = x.exp() if kind == "lognormal" else x
                off = link.reduce_(x[None].clone()).double() - x
                errors.append(float(off.square().sum() / x.double().square().sum()))
            for name, measured in (("least", min(errors)), ("mean", float(np.mean(errors))), ("most", max(errors))):
                yield {"case": f"clip by {rule}, {kind} values: {name}", "measured": measured, "said": said}


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of a vector of a power of two of elements."""
    numel = x.numel()
    for width in (1 << bit for bit in range(numel.bit_length() - 1)):
        pairs = x.view(-1, 2, width)
        x = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).view(-1)
    return x / math.sqrt(numel)


CLAIMS = {
    "cat-rates-convex-and-nonconvex": cat_rates,
    "qsgd-theorem-3-4-exponent": qsgd_exponent,
    "alq-bound-of-bits": alq_bits,
    "gtopk-time-model": gtopk_numbers,
    "naturaldithering-p-1": dithering,
    "qsgd-qsvrg-bits": variance_reduced_bits,
    "signum-warm-up": signum_warm_up,
    "quic-fl-bits": exact_coordinates,
    "rotations-table-terngrad": clipped_errors,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
