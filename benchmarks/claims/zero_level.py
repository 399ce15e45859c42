"""What a level at zero is worth: variance of three bits with and without it, on gradients of ResNet-8.

    python benchmarks/claims/zero_level.py --data FOLDER --json benchmarks/results/claims/zero_level.json

Seven even levels j / 3 of a block's maximum (``QSGDinf(levels=3)``), and the eight +-1/7 .. +-7/7 of the AQSGD program:
exact relative variance sum_k (h_k - r_k) (r_k - l_k) R^2 / |g|^2 of the whole network's gradient, in blocks cut across
parameters, before training and after some steps of SGD.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.claims.cifar_gradients import gradients, parser
from benchmarks.lib.runs import write

BLOCKS = (64, 1024, 8192, 32768)
STEPS = (0, 50, 200)
GRIDS = {
    "with_zero": torch.arange(-3, 4, dtype=torch.float64) / 3,
    "without_zero": torch.arange(-7, 8, 2, dtype=torch.float64) / 7,
}


def of_block(levels: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the exact variance of unbiased rounding of values over their scale to levels."""
    r = v / scale.clamp(min=1e-300)
    upper = torch.searchsorted(levels, r, right=True).clamp(1, len(levels) - 1)
    return float(((levels[upper] - r) * (r - levels[upper - 1])).clamp(min=0).sum() * scale**2)


def variance(levels: torch.Tensor, g: torch.Tensor, block_size: int, norm: float = torch.inf) -> float:
    """Return the exact relative variance of unbiased rounding to levels of each block's norm (2 or inf)."""
    blocks = g.split(block_size)
    return sum(of_block(levels, v, v.abs().norm(norm)) for v in blocks) / float(g.square().sum())


def main() -> int:
    """Train, measure, print."""
    chosen = parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for step, (g,) in gradients(chosen.data, workers=1):
        for block_size in BLOCKS if step in STEPS else ():
            found = {name: variance(levels, g.double(), block_size) for name, levels in GRIDS.items()}
            rows.append({"step": step, "block_size": block_size, "elements": g.numel(), **found})
            print(f"step {step:4d}, blocks of {block_size:6d}: " + ", ".join(f"{n} {v:.3g}" for n, v in found.items()))
        if step == max(STEPS):
            break
    write(chosen.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
