"""Figures of pages and sheets that take seconds to compute, each by a function of its own.

    python benchmarks/claims/small_figures.py --json benchmarks/results/claims/small_figures.json

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
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.figures import figures_of
from gradwire.methods.rotations.normal_levels import uniform_levels, uniform_step

NUMEL = 512 * 2048


def variance(spec: str, x: torch.Tensor, rounds: int) -> float:
    """Return E|mean - x|^2 / |x|^2 of the mean of the workers' rows ``x``."""
    link = gw.SimulatedLink([("x", torch.empty(x.shape[1]))], spec, len(x), min_numel=0)
    mean = x.double().mean(dim=0)
    size = float(mean.square().sum())
    return sum(float((link.reduce_(x.clone()).double() - mean).square().sum()) for _ in range(rounds)) / rounds / size


def dorefa() -> Iterator[dict[str, Any]]:
    """Measure the table of DoReFa beside QSGDinf: blocks of 512 of normal values, and of heavy tails.

    Blocks have one norm, so that the mean of their relative variances is the ratio of sums.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1, NUMEL, generator=generator)
    tails = normal * torch.exp(1.5 * torch.randn(1, NUMEL, generator=generator))
    said = {2: (0.814, 1.62, 19.1, 3.09), 3: (0.148, 0.200, 3.42, 0.763), 4: (0.0322, 0.0369, 0.713, 0.229),
            6: (0.00182, 0.00188, 0.0358, 0.0209)}  # fmt: skip
    for bits, figures in said.items():
        specs = (f"DoReFa(bits={bits}, block_size=512)", f"QSGDinf(levels={2 ** (bits - 1) - 1}, block_size=512)")
        for (kind, x), spec in itertools.product((("normal", normal), ("tails", tails)), specs):
            x = torch.nn.functional.normalize(x.view(-1, 512)).view(1, -1)
            place = 2 * (kind == "tails") + specs.index(spec)
            yield {"case": f"{spec}, {kind}", "measured": variance(spec, x, 3), "said": figures[place]}


def multi_scale() -> Iterator[dict[str, Any]]:
    """Measure what a second scale saves of the variance of three workers' normal gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 50_000, generator=generator)
    one, two = (variance(f"{name}", x, 20) for name in ("QSGDMaxNorm(levels=15)", "MultiScale(levels=(15, 255))"))
    yield {"case": "variance saved by the second scale, %", "measured": 100 * (1 - two / one), "said": 1.0}


def grandk() -> Iterator[dict[str, Any]]:
    """Measure the variance of GRandK over whole cycles."""
    x = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    for cycle in (4, 10):
        found = variance(f"GRandK(compressor=QSGDMaxNorm(levels=127), cycle={cycle}, rescale=True)", x, 3 * cycle)
        yield {"case": f"a cycle of {cycle}", "measured": found, "said": cycle - 1.0}


def eden_means() -> Iterator[dict[str, Any]]:
    """Compute what decoding evenly spaced levels to the means of normal values would gain, in % of the error."""

    def density(t: float) -> float:
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    def tail(t: float) -> float:
        return math.erfc(t / math.sqrt(2)) / 2

    for bits in (0.5, 1.0, 1.4, 2.0, 3.0, 4.0):
        step = uniform_step(bits)
        kept, j = 0.0, 1
        while (share := tail((j - 0.5) * step) - tail((j + 0.5) * step)) > 1e-15:
            kept += 2 * (density((j - 0.5) * step) - density((j + 0.5) * step)) ** 2 / share
            j += 1
        gain = 100 * (1 - (1 - kept) / uniform_levels(step)[1])
        yield {"case": f"{bits:g} bits, % of the error", "measured": gain, "said": 0.2}


def trits() -> Iterator[dict[str, Any]]:
    """Measure the entropy of TernGrad's trits of normal values."""
    for clip, size, said in ((2.0, 1 << 20, 1.36), (3.0, 1 << 20, 1.10), (None, 128, 1.15), (None, 512, 1.06),
                             (None, 8192, 0.92)):  # fmt: skip
        count = (1 << 20) // size
        parameters = [(str(i), torch.empty(size)) for i in range(count)]
        link = gw.SimulatedLink(parameters, f"TernGrad(clip={clip})", 1, min_numel=0)
        generator, filled = torch.Generator().manual_seed(0), 0.0
        for _ in range(3):
            filled += float((link.reduce_(torch.randn(1, size * count, generator=generator)) != 0).double().mean()) / 3
        entropy = -(1 - filled) * math.log2(1 - filled) - filled * math.log2(filled / 2)
        yield {"case": f"clip {clip}, vectors of {size}", "measured": entropy, "said": said}


def elastic() -> Iterator[dict[str, Any]]:
    """Compute from which alpha on synchronous elastic averaging of N workers grows without a gradient.

    x_i <- x_i - alpha (x_i - c), c <- c + alpha sum_i (x_i - c), both from the values before.
    """
    for workers in (2, 4, 8):
        least = math.nan
        for alpha in np.arange(0.001, 2.0, 0.001):
            step = np.zeros((workers + 1, workers + 1))
            step[:workers, :workers], step[:workers, workers] = (1 - alpha) * np.eye(workers), alpha
            step[workers, :workers], step[workers, workers] = alpha, 1 - workers * alpha
            if np.abs(np.linalg.eigvals(step)).max() > 1 + 1e-9:
                least = float(alpha)
                break
        yield {"case": f"{workers} workers", "measured": least, "said": 1 / workers}


def trained(rates: list[float], rescaled: bool | None) -> torch.Tensor:
    """Descend on a quadratic by Top-k with a memory; return the iterate.

    Args:
        rates: The step size of each step.
        rescaled: None: the memory is in units of gradients, by this library. Otherwise it is in units of steps, written
            here, and whether it is rescaled when the rate changes.
    """
    generator = torch.Generator().manual_seed(0)
    curvature, x = torch.rand(1000, generator=generator) + 0.1, torch.randn(1000, generator=generator)
    link = gw.SimulatedLink([("x", torch.empty(1000))], "ErrorFeedback(compressor=TopK(density=0.01))", 1, min_numel=0)
    memory, before = torch.zeros(1000), rates[0]
    for rate in rates:
        gradient = curvature * x
        if rescaled is None:
            x = x - rate * link.reduce_(gradient[None].clone())
            continue
        if rescaled:
            memory *= rate / before
        target = memory + rate * gradient
        step = torch.zeros(1000)
        chosen = target.abs().topk(10).indices
        step[chosen] = target[chosen]
        memory, before, x = target - step, rate, x - step
    return x


def units() -> Iterator[dict[str, Any]]:
    """Compare memories in units of gradients and of steps at a constant rate."""
    ours, theirs = trained([0.3] * 400, None), trained([0.3] * 400, False)
    yield {"case": "distance of the iterates over their length", "measured": _apart(ours, theirs), "said": 0.0}


def changing_rate() -> Iterator[dict[str, Any]]:
    """Compare them when the rate falls to a tenth half way."""
    rates = [0.3] * 200 + [0.03] * 200
    ours = trained(rates, None)
    for rescaled in (False, True):
        case = f"distance over length, in units of steps, {'' if rescaled else 'not '}rescaled"
        yield {"case": case, "measured": _apart(ours, trained(rates, rescaled)), "said": 0.0 if rescaled else None}


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


def sketches() -> Iterator[dict[str, Any]]:
    """Measure the bias of estimates by the lower of the middle rows of a count sketch, in deviations of a row."""
    rng = np.random.default_rng(0)
    numel, columns, draws = 20_000, 500, 20
    x = rng.normal(size=numel)
    for rows in (3, 4, 5, 6):
        off = np.zeros(numel)
        for _ in range(draws):
            estimates = []
            for _ in range(rows):
                place, sign = rng.integers(columns, size=numel), rng.choice((-1.0, 1.0), numel)
                estimates.append(sign * np.bincount(place, sign * x, columns)[place])
            off += np.sort(np.array(estimates), axis=0)[(rows - 1) // 2] - x
        bias = float(off.mean() / draws / math.sqrt(numel / columns))
        yield {"case": f"{rows} rows", "measured": bias, "said": 0.0 if rows % 2 else None}


def choco() -> Iterator[dict[str, Any]]:
    """Measure how far eight workers stay apart under ChocoSGD without a gradient, over how far they were."""
    for gamma in (0.1, 0.2, 0.3, 0.4, 0.6):
        spec = f"ChocoSGD(compressor=TopK(density=0.1), gamma={gamma})"
        link = gw.SimulatedLink([("x", torch.empty(2000))], spec, 8, min_numel=0)
        x = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0))
        before = float((x - x.mean(dim=0)).norm())
        for _ in range(400):
            link.exchange_(x)
        case = f"gamma {gamma}: distance after 400 rounds, over that before"
        yield {"case": case, "measured": float((x - x.mean(dim=0)).norm()) / before, "said": None}


def bf16_hook() -> Iterator[dict[str, Any]]:
    """Register PyTorch's hook for bfloat16 over Gloo."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        module.register_comm_hook(None, bf16_compress_hook)
        told = "registered"
    except TypeError as error:
        told = str(error)
    finally:
        torch.distributed.destroy_process_group()
    yield {"case": "PyTorch's bf16_compress_hook on this build", "measured": told, "said": None}


CLAIMS = {
    "dorefa-table-beside-qsgdinf": dorefa,
    "multiscale-resolution": multi_scale,
    "grandk-variance": grandk,
    "eden-decoding-to-means": eden_means,
    "terngrad-entropy-at-other-clips": trits,
    "easgd-stable-alpha": elastic,
    "residual-step-size-convention": units,
    "ef-signsgd-changing-rate": changing_rate,
    "sketch-even-rows-biased": sketches,
    "choco-gamma-must-be-tuned": choco,
    "peers-bf16-hook-on-cpu": bf16_hook,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
