"""Claims about a field of a method, decided by short trainings over three seeds.

    python benchmarks/claims/method_fields.py --json benchmarks/results/claims/method_fields.json

``measured`` is named by each case: mean over seeds, and ``spread`` the standard deviation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.figures import figures_of
from benchmarks.lib.simulated_training import trained
from gradwire.tools.experiments import tasks
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine

Rows = Iterator[dict[str, Any]]

SEEDS = (0, 1, 2)
GOAL, MOST = 0.95, 600
"""Share of right answers that a training is to reach, and the most steps for it."""
BUDGETS = (1.0, 2.0, 4.0, 8.0, 16.0)


def row(case: str, found: list[float], said: float | None = None) -> dict[str, Any]:
    """Return the row of a case."""
    return {"case": case, "measured": round(mean(found), 3), "spread": round(stdev(found), 3), "said": said}


def shared_scalers() -> Rows:
    """Train a small transformer with scalers shared by all workers, and with one for each."""
    for spec in ("TernGrad()", "TernGrad(share_scaler=False)", "fp32"):
        losses, right = zip(*(trained("text", spec, seed, model="transformer") for seed in SEEDS))
        yield row(f"{spec}, loss on held-out text", list(losses))
        yield row(f"{spec}, right next bytes, %", [100 * share for share in right])


def budgets() -> Rows:
    """Train with SpectralATOMO by its budget: steps until the goal, and what they cost."""
    for budget in BUDGETS:
        steps, sent = zip(*(to_goal(f"SpectralATOMO(budget={budget})", seed) for seed in SEEDS))
        yield row(f"budget {budget:g}, steps to {GOAL:.0%}", list(steps))
        yield row(f"budget {budget:g}, MB sent by a worker to {GOAL:.0%}", list(sent))


def to_goal(spec: str, seed: int) -> tuple[float, float]:
    """Return the steps until the goal, in tens, and the megabytes that a worker has sent until then."""
    task = dataclasses.replace(tasks.build("digits"), steps=MOST)
    engine = SimulatedEngine(RunConfig(task=task, method=spec, workers=4, simulate=True, seed=seed))
    for step in range(MOST):
        engine.backward(step)
        engine.optimizer.step()
        if step % 10 == 9 and engine.score()[1] >= GOAL:
            break
    return step + 1.0, engine.link.traffic().sent_bytes / 1e6


CLAIMS = {
    "terngrad-shared-scaler-hurts-bert": shared_scalers,
    "atomo-middle-budget-wins": budgets,
}


if __name__ == "__main__":
    figures_of(CLAIMS, __doc__)
