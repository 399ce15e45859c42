"""Figures of theorems, derivations and forms that this library does not offer, each by a function of its own.

    python benchmarks/claims/theory_figures.py --json benchmarks/results/claims/theory_figures.json

Where this library has the operator, it is run. A form that it does not offer is written down here, in float64.
``said`` is the figure of the claim.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of
from gradwire.methods.atoms.atom_codec import probabilities

Rows = Iterator[dict[str, Any]]


def simulated(shape: tuple[int, ...], spec: str, workers: int) -> gw.SimulatedLink:
    """Return a simulated exchange of one parameter."""
    return gw.SimulatedLink([("x", torch.empty(shape))], spec, workers, min_numel=0)


def atomo_floor() -> Rows:
    """Descend by ATOMO on |x + b_i|^2 / 2 of four workers, whose b_i add up to nothing.

    Near the optimum gradients are b_i, so that a constant step gamma ends where E|x|^2 = gamma / (2 - gamma) V, with
    the variance V of the mean of the compressed b_i.
    """
    workers, numel = 4, 200
    own = torch.randn(workers, numel, generator=torch.Generator().manual_seed(0))
    own -= own.mean(dim=0)
    for budget in (10, 30, 90):
        spread = sum(_lost(row, probabilities(row, budget)) for row in own) / workers**2
        link, x, found = simulated((numel,), f"ATOMO(density={budget / numel})", workers), torch.zeros(numel), []
        for step in range(4000):
            x = x - 0.05 * link.reduce_(x + own)
            found += [float(x.square().sum())] if step >= 500 else []
        case = f"{budget} of {numel} atoms, step 0.05: E|x|^2 over gamma / (2 - gamma) of the variance"
        yield {"case": case, "measured": np.mean(found) / (0.05 / 1.95 * spread), "said": 1.0}
    link, x, found = simulated((numel,), "ATOMO(density=0.15)", workers), torch.zeros(numel), []
    for step in range(4000):
        x = x - link.reduce_(x + own) / (step + 20)
        found.append(float(x.square().sum()))
    for first in (250, 1000):
        fallen = np.mean(found[first - 50 : first + 50]) / np.mean(found[4 * first - 200 : 4 * first])
        yield {"case": f"falling steps: E|x|^2 at {first} over that at {4 * first}", "measured": fallen, "said": None}


def _lost(x: torch.Tensor, p: torch.Tensor) -> float:
    """Return the variance of atoms that are kept with some probabilities."""
    x, p = x.double().flatten()[p.flatten() > 0], p.flatten()[p.flatten() > 0]
    return float((x.square() * (1 / p - 1)).sum())


def spectral_bytes() -> Rows:
    """Measure the mean bytes of Spectral ATOMO over 32 s (n + m + 1) bits."""
    for shape, budget in (((64, 48), 4.0), ((60, 200), 3.0), ((30, 30), 8.0)):
        link = simulated(shape, f"SpectralATOMO(budget={budget}, pairs=None)", 2)
        x = torch.randn(2, math.prod(shape), generator=torch.Generator().manual_seed(0))
        for _ in range(300):
            link.reduce_(x.clone())
        bits = 8 * link.traffic().sent_bytes / 300
        yield {"case": f"{shape[0]} by {shape[1]}, a budget of {budget:g}",
               "measured": bits / (32 * budget * (sum(shape) + 1)), "said": 1.0}  # fmt: skip


def spectral_or_elements() -> Rows:
    """Compare variances at equal communication: s pairs beside s (n + m) elements, of matrices of falling spectra."""
    n, m = 48, 32
    generator = torch.Generator().manual_seed(0)
    agreed = 0
    powers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
    for power, kind in itertools.product(powers, ("dense", "sparse")):
        u, v = (torch.linalg.qr(torch.randn(k, m, generator=generator).double())[0] for k in (n, m))
        x = u * torch.arange(1.0, m + 1).double() ** -power @ v.T
        if kind == "sparse":
            x = x * (torch.rand(n, m, generator=generator) < 0.05)
        values = torch.linalg.svdvals(x)
        ratio = math.sqrt(n + m) * float(values.sum()) / float(x.abs().sum())
        # Small enough that no probability is cut off at 1, for which the condition is derived.
        budget = min(1.0, float(values.sum() / values[0]), float(x.abs().sum() / x.abs().max()) / (n + m))
        pairs = _lost(values, values * budget / values.sum())
        elements = _lost(x, x.abs() * budget * (n + m) / x.abs().sum())
        agreed += (pairs <= elements) == (ratio <= 1)
        yield {"case": f"{kind}, singular values k^-{power:g}: variance of pairs over that of elements",
               "measured": pairs / elements, "said": None}  # fmt: skip
    yield {"case": "matrices for which the condition tells which is less", "measured": agreed, "said": 2 * len(powers)}


def packets() -> Rows:
    """Count what a packet holds of a vector of 47,236 elements."""
    index = math.ceil(math.log2(47_236))
    for bits, said in ((32, 245), (64, 147)):
        case = f"coordinates of {bits} bits in 1472 bytes"
        yield {"case": case, "measured": 8 * 1472 // (bits + index), "said": said}


def natural_float64() -> Rows:
    """Count the bits of a float64 without its mantissa."""
    bits = 64 - np.finfo(np.float64).nmant
    yield {"case": "bits of sign and exponent", "measured": bits, "said": 12}
    yield {"case": "times less than 64", "measured": 64 / bits, "said": 5.82}


def one_round_sketch() -> Rows:
    """Measure what a sketched exchange in one round loses: it applies estimates and clears their elements."""
    rng = np.random.default_rng(0)
    numel, kept = 20_000, 200
    x = rng.standard_t(3, size=numel)
    for columns in (500, 2000, 8000):
        estimates = []
        for _ in range(5):
            place, sign = rng.integers(columns, size=numel), rng.choice((-1.0, 1.0), numel)
            estimates.append(sign * np.bincount(place, sign * x, columns)[place])
        estimate = np.median(estimates, axis=0)
        chosen = np.argsort(-np.abs(estimate))[:kept]
        off = estimate[chosen] - x[chosen]
        case = f"5 rows of {columns} columns, {kept} of {numel} elements: |applied - cleared| over |cleared|"
        yield {"case": case, "measured": float(np.linalg.norm(off) / np.linalg.norm(x[chosen])), "said": None}


def span() -> Rows:
    """Begin to train an overparametrised least squares with residuals; measure distances to the span of gradients."""
    generator = torch.Generator().manual_seed(0)
    rows, numel, rate = 20, 100, 0.01
    inputs = torch.randn(rows, numel, generator=generator)
    target = torch.randn(rows, generator=generator)
    basis = torch.linalg.qr(inputs.double().T)[0]

    def outside(x: torch.Tensor) -> float:
        """Return the share of a vector that no combination of gradients has."""
        return float((x - basis @ (basis.T @ x)).norm() / x.norm())

    for spec in ("EFSignSGD()", "ErrorFeedback(TopK(density=0.05))"):
        link, x = simulated((numel,), spec, 1), torch.zeros(numel)
        for _ in range(30):
            x = x - rate * link.reduce_((inputs.T @ (inputs @ x - target) / rows)[None])
        corrected = x.double() - rate * link.state_dict()["rank 0"]["residual/x"].double()
        yield {"case": f"{spec}: iterate", "measured": outside(x.double()), "said": None}
        yield {"case": f"{spec}: iterate less the residual", "measured": outside(corrected), "said": 0.0}


def low_rank(own: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the means of 30 rounds of PowerSGD of rank 2, with one rule for what a worker's residual loses."""
    rng = np.random.default_rng(0)
    workers, shape = 4, (30, 20)
    right, residual, means = rng.normal(size=(shape[1], 2)), np.zeros((workers, *shape)), []
    for _ in range(30):
        wanted = rng.normal(size=(workers, *shape)) + residual
        left = np.linalg.qr((wanted @ right).mean(axis=0))[0]
        right = (wanted.transpose(0, 2, 1) @ left).mean(axis=0)
        means.append(left @ right.T)
        residual = wanted - own(wanted, left, right, means[-1])
    return np.array(means)


def low_rank_errors() -> Rows:
    """Compare PowerSGD's means where residuals lose what the worker sent, and where they lose the common mean."""
    local = low_rank(lambda wanted, left, right, mean: left @ (wanted.transpose(0, 2, 1) @ left).transpose(0, 2, 1))
    aggregated = low_rank(lambda wanted, left, right, mean: mean)
    apart = float(np.abs(local - aggregated).max() / np.abs(local).max())
    yield {"case": "largest difference of means over the largest value, 30 rounds", "measured": apart, "said": 0.0}


def rounding_at_random() -> Rows:
    """Measure the lattice with random rounding instead of a shared offset, in units of the distance of its points."""
    rng = np.random.default_rng(0)
    place = rng.uniform(size=1_000_000)
    for case, variance, said in (
        ("variance at random, mean over places", (place * (1 - place)).mean(), 1 / 6),
        ("variance at random, at worst", 0.25, 0.25),
        ("variance with the shared offset", np.square(rng.uniform(-0.5, 0.5, place.size)).mean(), 1 / 12),
    ):
        yield {"case": case, "measured": float(variance), "said": said}
    colours = 8
    for share in (0.999, 1.05):
        near = share * (colours - 2) / 2 * rng.choice((-1.0, 1.0), place.size) + place
        point = np.floor(place + rng.uniform(size=place.size))
        # The nearest point of the same colour to what the receiver has.
        decoded = point + colours * np.round((near - point) / colours)
        case = f"wrong points at y = {share} (q - 2) s / 2, of a million"
        yield {"case": case, "measured": int((decoded != point).sum()), "said": 0 if share < 1 else None}


def rotated_distance() -> Rows:
    """Measure the largest coordinate after random signs and a Hadamard transform, over sqrt(log d / d)."""
    rng, numel = np.random.default_rng(0), 4096
    spike = np.zeros(numel)
    spike[7] = 1.0
    for kind, x in (("one spike", spike), ("normal", rng.normal(size=numel)), ("heavy", rng.standard_cauchy(numel))):
        found = []
        for _ in range(200):
            y = (x / np.linalg.norm(x) * rng.choice((-1.0, 1.0), numel))[None]
            while y.shape[1] > 1:
                half = y.shape[1] // 2
                y = np.concatenate([y[:, :half] + y[:, half:], y[:, :half] - y[:, half:]]) / math.sqrt(2)
            found.append(float(np.abs(y).max()) / math.sqrt(math.log(numel) / numel))
        case = f"{kind}, d = {numel}: mean of 200 rotations"
        yield {"case": case, "measured": float(np.mean(found)), "said": None}
    yield {"case": "sqrt(2), of the largest of many normal values", "measured": math.sqrt(2), "said": None}


def escapes() -> Rows:
    """Compute rANS sizes of TernGrad's trits, five a byte, with rare bytes in slots of their own and escaped.

    A trit is not zero with the probability E|x| / c: c is 2.5 deviations of normal values, or the largest of a million.
    """
    slots, rare, largest = 4096, 1 / 8192, 4.87
    clipped = math.erf(2.5 / math.sqrt(2))
    for kind, filled in (
        ("clipped at 2.5 sigma", math.sqrt(2 / math.pi) * (1 - math.exp(-(2.5**2) / 2)) / 2.5 + 1 - clipped),
        ("maximum of a million", math.sqrt(2 / math.pi) / largest),
    ):
        trit = np.array([1 - filled, filled / 2, filled / 2])
        share = np.array([math.prod(trit[list(digits)]) for digits in itertools.product(range(3), repeat=5)])
        few = share < rare
        together = float(share[few].sum())
        # The escape has a share of the slots like any symbol; its byte follows.
        escape = max(together, 1 / slots)
        own = np.where(few, 1 / slots, share / (1 - together) * (1 - few.sum() / slots))
        shared = np.where(few, escape, share / (1 - together) * (1 - escape))
        sizes = [float((share * -np.log2(given)).sum()) for given in (own, shared)]
        sizes[1] += 8 * together
        yield {"case": f"{kind}: bytes rarer than 1 in 8192", "measured": int(few.sum()), "said": 112}
        yield {"case": f"{kind}: their slots, %", "measured": 100 * float(few.sum()) / slots, "said": 2.5}
        yield {"case": f"{kind}: size with slots of their own over that with escapes, %",
               "measured": 100 * (sizes[0] / sizes[1] - 1), "said": 1.0}  # fmt: skip


def warm_up() -> Rows:
    """Compute the densities of the warm-up of DGC's program, c^(epoch + 1) with c = 0.001^(1/6)."""
    for epoch, said in enumerate((0.316, 0.1, 0.0316, 0.01, 0.00316)):
        yield {"case": f"epoch {epoch}", "measured": 0.001 ** ((epoch + 1) / 6), "said": said}


def sampled_threshold() -> Rows:
    """Count what passes DGC's threshold from a sample of 1 %, adapted in up to ten rounds."""
    rng, density = np.random.default_rng(0), 0.001
    kinds: dict[str, Callable[[int], np.ndarray]] = {
        "normal": rng.standard_normal,
        "heavy tails": lambda numel: rng.standard_t(3, numel),
        "half of them zero": lambda numel: rng.standard_normal(numel) * (rng.uniform(size=numel) < 0.5),
        "one value in 3000 not zero": lambda numel: 1.0 * (rng.uniform(size=numel) < 1 / 3000),
    }
    for kind, draw in kinds.items():
        least, exhausted = math.inf, 0
        for _ in range(100):
            x = np.abs(draw(200_000))
            wanted = math.ceil(x.size * density)
            stride = x.size // max(x.size // 100, math.ceil(2 / density))
            sample = x[rng.integers(stride) :: stride]
            threshold = np.sort(sample)[-math.ceil(sample.size * density)]
            rounds = 0
            while (passed := int((x >= threshold).sum())) < 0.8 * wanted and rounds < 10:
                threshold, rounds = 0.8 * threshold, rounds + 1
            exhausted += rounds == 10
            least = min(least, passed / wanted) if rounds < 10 else least
        yield {"case": f"{kind}: least share of k that passed in 100 draws", "measured": least, "said": 0.8}
        yield {"case": f"{kind}: draws whose rounds were exhausted", "measured": exhausted, "said": None}


def rounded_descent() -> Rows:
    """Descend by nearest levels of a maximum, a deterministic quantiser, on quadratics of eight workers."""
    rng = np.random.default_rng(0)
    workers, numel, levels = 8, 50, 3
    curvature = rng.uniform(0.5, 1.5, size=(workers, numel))
    centre = rng.normal(size=(workers, numel))
    best, x = (curvature * centre).sum(axis=0) / curvature.sum(axis=0), np.full(numel, 100.0)
    for step in range(1, 801):
        gradient = curvature * (x - centre)
        scale = np.abs(gradient).max(axis=1, keepdims=True) / levels
        x = x - 0.3 * (np.round(gradient / scale) * scale).mean(axis=0)
        if step in (1, 5, 10, 20, 100, 200, 400, 800):
            case = f"distance to the optimum after {step} steps"
            yield {"case": case, "measured": float(np.linalg.norm(x - best)), "said": None}


def second_residual() -> Rows:
    """Quantise sums again at the owner of a stripe, with a residual of its own; see that sums telescope."""
    rng = np.random.default_rng(0)
    workers, numel = 4, 1000
    own, owner = np.zeros((workers, numel)), np.zeros(numel)
    applied, wanted = np.zeros(numel), np.zeros(numel)

    def signs(x: np.ndarray) -> np.ndarray:
        """Return each sign times the mean of the values that have it."""
        return np.where(x >= 0, x[x >= 0].mean(), x[x < 0].mean())

    for _ in range(200):
        gradient = rng.normal(size=(workers, numel)) + 0.1
        target = gradient + own
        sent = np.array([signs(row) for row in target])
        own, total = target - sent, sent.mean(axis=0) + owner
        back = signs(total)
        owner, applied, wanted = total - back, applied + back, wanted + gradient.mean(axis=0)
    left = applied + own.mean(axis=0) + owner - wanted
    yield {"case": "|applied + residuals - gradients| over |gradients|, 200 rounds",
           "measured": float(np.linalg.norm(left) / np.linalg.norm(wanted)), "said": 0.0}  # fmt: skip


def stripes() -> Rows:
    """Compute a worker's bits an element with stripes, beside those of the all-gather here."""
    for workers in (2, 4, 8, 64):
        link = simulated((80_000,), "onebit", workers)
        link.reduce_(torch.randn(workers, 80_000, generator=torch.Generator().manual_seed(0)))
        gathered = 8 * link.traffic().sent_bytes / 80_000
        yield {"case": f"{workers} workers: to the owners and back", "measured": 2 * (workers - 1) / workers,
               "said": None}  # fmt: skip
        yield {"case": f"{workers} workers: by all-gather, here", "measured": gathered, "said": None}


def limited_steps() -> Rows:
    """Move sorted levels by at most half of the smaller gap to a neighbour, and count those out of order."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(20_000):
        levels = np.sort(rng.uniform(size=rng.integers(3, 12)))
        gaps = np.diff(levels)
        most = np.minimum(gaps[:-1], gaps[1:]) / 2
        moved = levels.copy()
        moved[1:-1] += np.clip(rng.standard_cauchy(most.size), -most, most)
        wrong += bool((np.diff(moved) < -1e-15).any())
    yield {"case": "level sets out of order, of 20,000", "measured": wrong, "said": 0}


CLAIMS = {
    "atomo-floor-scales-with-variance": atomo_floor,
    "atomo-spectral-bytes": spectral_bytes,
    "atomo-spectral-at-equal-communication": spectral_or_elements,
    "cat-packet-constants": packets,
    "natural-bits-of-float64": natural_float64,
    "sketched-sgd-one-round-loses-mass": one_round_sketch,
    "ef-signsgd-span-of-gradients": span,
    "powersgd-local-and-aggregated-errors": low_rank_errors,
    "lattice-stochastic-rounding": rounding_at_random,
    "lattice-rlqsgd": rotated_distance,
    "coders-escapes": escapes,
    "dgc-readme-warm-up-differs-from-code": warm_up,
    "dgc-sampled-threshold-sends-0-8-k": sampled_threshold,
    "dqgd-deterministic-quantisers": rounded_descent,
    "onebit-second-residual-of-owners": second_residual,
    "onebit-traffic-is-constant": stripes,
    "alq-gradient-steps-keep-the-order": limited_steps,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
