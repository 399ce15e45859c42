"""The convex problems that methods with memory are judged on: their constants, optimum, and what float32 permits.

    python benchmarks/claims/diana.py --data a9a.txt --data mushrooms.txt --l2 0.01 --l2 0.001 --json FILE

Logistic regression over 8 workers, rows sorted by label. Descent with the exact mean in float64 shows the rate; with
every worker's gradient rounded to float32, as a link takes it, where it stops.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.convex import LogisticProblem
from benchmarks.lib.descent import descend, exact_mean, float32_floor, rounded_mean
from benchmarks.lib.optimum import find_optimum


def row(name: str, problem: LogisticProblem, steps: int) -> dict[str, Any]:
    """Solve one problem, then descend to it."""
    optimum = find_optimum(problem)
    # From near by, so that the floor is reached before patience ends.
    start = optimum.x + 1e-5
    settings: dict[str, Any] = {"lr": 1 / optimum.smoothness, "steps": steps, "start": start}
    rounded = descend(problem, optimum, exchange=rounded_mean, **settings)
    return {
        "data": name,
        "workers": problem.workers,
        "rows": problem.labels.numel(),
        "features": problem.features,
        "l2": problem.l2,
        "l1": problem.l1,
        "smoothness": optimum.smoothness,
        "smoothness_max": optimum.smoothness_max,
        "condition": optimum.condition,
        "curvature_at_optimum": list(optimum.curvature),
        "heterogeneity": optimum.heterogeneity,
        "optimum_norm": float(optimum.x.norm()),
        "support": int(optimum.support.sum()),
        "residual": optimum.residual,
        "steps": steps,
        "float64_distance_sq": descend(problem, optimum, exchange=exact_mean, **settings)[-1],
        "float32_distance_sq": rounded[-1],
        "float32_predicted_floor_sq": float32_floor(problem, optimum),
    }


def main() -> None:
    """Print one row a problem; write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True, help="LIBSVM file; repeatable")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--l2", type=float, action="append", help="repeatable; by default 0.01")
    parser.add_argument("--l1", type=float, action="append", help="repeatable; by default 0")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="where the rows go")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in chosen.data:
        loaded = LogisticProblem.from_file(path, workers=chosen.workers, l2=1.0)
        for l2 in chosen.l2 or [0.01]:
            for l1 in chosen.l1 or [0.0]:
                rows.append(row(path.stem, loaded.regularised(l2=l2, l1=l1), chosen.steps))
                print(json.dumps(rows[-1]), flush=True)
    if chosen.json:
        made = {"torch": torch.__version__, "python": platform.python_version()}
        made["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        chosen.json.write_text(json.dumps({**made, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
