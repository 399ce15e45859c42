"""Claims that trainings of seconds decide, on the task ``digits``, over three seeds.

    python benchmarks/claims/small_trainings.py --json benchmarks/results/claims/small_trainings.json

``measured`` is the share of right answers on held-out digits: mean and standard deviation over seeds, in %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.figures import figures_of
from benchmarks.lib.simulated_training import trained

Rows = Iterator[dict[str, Any]]


def ends(case: str, said: float | None, method: str, **settings: Any) -> dict[str, Any]:
    """Return the row of one setting."""
    found = [100 * trained("digits", method, seed, **settings)[1] for seed in (0, 1, 2)]
    return {"case": case, "measured": round(mean(found), 2), "spread": round(stdev(found), 2), "said": said}


def sketched_amsgrad() -> Rows:
    """Train SketchedAMSGrad with its own eps and a smaller one, with and without a warm-up."""
    for eps, figures in ((None, (93.9, 93.9)), (1e-8, (None, 96.9))):
        method = "SketchedAMSGrad(density=0.01)" if eps is None else f"SketchedAMSGrad(density=0.01, eps={eps})"
        for warm_up, said in zip((0, 30), figures):
            case = f"{method}, a warm-up of {warm_up}"
            yield ends(case, said, method, momentum=0.0, lr=1e-3, options={"warmup_steps": warm_up})


def bursts() -> Rows:
    """Train GRandK with error feedback, with and without momentum."""
    method = "ErrorFeedback(GRandK(compressor=QSGDMaxNorm(levels=127), cycle=8))"
    for momentum, lr, figures in ((0.0, 0.25, (95.3, 95.8)), (0.9, 0.0125, (77.5, 94.4))):
        for spec, said in zip((method, "fp32"), figures):
            case = f"{spec}, momentum {momentum:g}"
            yield ends(case, said, spec, workers=2, steps=200, momentum=momentum, lr=lr)


def warm_start() -> Rows:
    """Train 1-bit SGD with and without a start in float32."""
    for warm_up in (0, 30, 100):
        yield ends(f"onebit, {warm_up} of 300 steps in float32", None, "onebit", options={"warmup_steps": warm_up})
    yield ends("fp32", None, "fp32")


def tiny_blocks() -> Rows:
    """Train ALQ of 3 bits by size of its blocks."""
    for size in (16, 32, 64, 512, 8192):
        yield ends(f"blocks of {size}", None, f"ALQ(bits=3, block_size={size})")


CLAIMS = {
    "sketched-amsgrad-eps-and-warm-up": sketched_amsgrad,
    "grandk-momentum-on-bursts": bursts,
    "onebit-needs-a-warm-start": warm_start,
    "alq-tiny-buckets": tiny_blocks,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
