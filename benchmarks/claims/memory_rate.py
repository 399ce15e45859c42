r"""Error of SGD with the k largest elements and a memory, by steps and by k, with the step sizes of its paper.

    python benchmarks/claims/memory_rate.py --json benchmarks/results/claims/memory_rate.json

Stich, Cordonnier, Jaggi 2018 (Mem-SGD), one worker::

    p = m + eta_t g_t        s = the k largest of p        x <- x - s        m <- p - s        eta_t = 8 / (mu (a + t))
    x_mean = sum_t w_t x_t / S,    w_t = (a + t)^2,    S = sum_t w_t,    a = 7 d / k

Of this, the sheet has the algorithm, the weights and the orders of the error: G^2 / (mu T) once T is above
(d/k) sqrt(L / mu), with further terms that fall as (d/k)^2 / T^2 and (d/k)^3 / T^3. The 8, the shift 7 d / k and this
bound are recalled from theorem 2.4 with alpha = 5, not traced to the text::

    E f(x_mean) - f* <= 4 T (T + 2 a) G^2 / (mu S) + mu a^3 |x_0 - x*|^2 / (8 S)
                        + 64 T (1 + 2 L / mu) 20 (d/k)^2 G^2 / (mu S)

The objective is f(x) = sum_j h_j x_j^2 / 2 with h_j from mu to L, geometrically; gradients have normal noise of a total
variance of 1, and x_0 has the squared norm 1. G^2 is the largest mean of |g_t|^2 over a hundred steps; the first steps
overshoot and set it, while at the optimum the mean of |g_t|^2 is 1, so that the error times mu T is given as well.
Plain SGD (k = d) uses the step sizes of each k. Measured for each k: the error in these two units, its ratio to plain
SGD's with the same steps and draws, what it is above plain SGD's times T^2 / (d/k)^2, the slope of the error by T over
the last factor of ten, and the bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write

SIZE = 256
CONVEXITY, SMOOTHNESS = 1.0, 10.0
KEPT = (4, 16, 64)
MARKS = (100, 600, 2000, 6000)
CURVATURE = torch.logspace(math.log10(CONVEXITY), math.log10(SMOOTHNESS), SIZE, dtype=torch.float64)


def errors(method: gw.Method, shift: float, seed: int) -> tuple[list[float], float]:
    """Train; return the weighted mean's error at each mark, and the largest mean of a hundred squared gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    x /= x.norm()
    link = gw.SimulatedLink([("x", torch.empty(SIZE))], method, 1, min_numel=0, seed=seed)
    total, weights, found = torch.zeros(SIZE, dtype=torch.float64), 0.0, []
    squares: list[float] = []
    for t in range(MARKS[-1]):
        weight = (shift + t) ** 2
        total.add_(x, alpha=weight)
        weights += weight
        if t + 1 in MARKS:
            mean = total / weights
            found.append(float((CURVATURE * mean.square()).sum() / 2))
        noise = torch.randn(SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
        g = CURVATURE * x + noise
        squares.append(float(g.square().sum()))
        # The paper's memory is that of steps: gradients are multiplied by the step size before the exchange.
        step = 8 / (CONVEXITY * (shift + t))
        x -= link.reduce_((step * g).float()[None]).double()
    blocks = [sum(squares[i : i + 100]) / 100 for i in range(0, len(squares), 100)]
    return found, max(blocks)


def bound(shift: float, share: float, steps: int, second_moment: float) -> list[float]:
    """Return the three terms of the recalled bound; ``share`` is d/k."""
    weights = sum((shift + t) ** 2 for t in range(steps))
    condition = SMOOTHNESS / CONVEXITY
    return [
        4 * steps * (steps + 2 * shift) * second_moment / (CONVEXITY * weights),
        CONVEXITY * shift**3 / (8 * weights),
        64 * steps * (1 + 2 * condition) * 20 * share**2 * second_moment / (CONVEXITY * weights),
    ]


def summary(values: list[float]) -> dict[str, float]:
    """Return mean, least and largest."""
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kept in KEPT:
        share = SIZE / kept
        shift = 7 * share
        ours = [errors(gw.ErrorFeedback(gw.TopK(density=kept / SIZE)), shift, seed) for seed in range(chosen.draws)]
        plain = [errors(gw.FP32(), shift, seed) for seed in range(chosen.draws)]
        moment = max(square for _, square in ours)
        slopes = [math.log10(found[-1] / found[MARKS.index(600)]) for found, _ in ours]
        rows.append({"kept": kept, "shift": shift, "second_moment": moment, "slope": summary(slopes), "marks": []})
        for i, steps in enumerate(MARKS):
            terms = bound(shift, share, steps, moment)
            mark: dict[str, Any] = {
                "steps": steps,
                "of_threshold": steps / (share * math.sqrt(SMOOTHNESS / CONVEXITY)),
                "error": summary([found[i] for found, _ in ours]),
                "of_leading_order": summary([found[i] * CONVEXITY * steps / moment for found, _ in ours]),
                "of_noise_order": summary([found[i] * CONVEXITY * steps for found, _ in ours]),
                "of_plain": summary([a[i] / b[i] for (a, _), (b, _) in zip(ours, plain)]),
                "above_plain_of_second_order": summary(
                    [(a[i] - b[i]) * steps**2 / share**2 for (a, _), (b, _) in zip(ours, plain)]
                ),
                "bound_terms": terms,
                "most_of_bound": max(found[i] for found, _ in ours) / sum(terms),
            }
            rows[-1]["marks"].append(mark)
            print(
                f"k={kept:<3} T={steps:<6} T/threshold {mark['of_threshold']:7.1f} "
                f"error {mark['error']['mean']:.2e} ({mark['error']['least']:.2e} to {mark['error']['most']:.2e}), "
                f"times mu T / G^2 {mark['of_leading_order']['mean']:.4f}, "
                f"times mu T {mark['of_noise_order']['mean']:.3f}, "
                f"of plain {mark['of_plain']['mean']:.2f}, "
                f"above it times (T k / d)^2 {mark['above_plain_of_second_order']['mean']:.4f}, "
                f"of the bound {mark['most_of_bound']:.1e}",
                flush=True,
            )
        print(f"k={kept}: slope {rows[-1]['slope']}, G^2 {moment:.2f}", flush=True)
    write(chosen.json, draws=chosen.draws, size=SIZE, convexity=CONVEXITY, smoothness=SMOOTHNESS, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
