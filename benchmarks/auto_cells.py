"""What ``method="auto"`` chooses over the grid's cells, and whether that was right.

    python benchmarks/auto_cells.py --rows FILE.jsonl

Measures ``gradwire auto`` in turns with the casts and TernGrad in every cell of the grid (``gradwire bench step``, so it
resumes), then judges. Needs what ``gradwire lab`` needs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gradwire.bench.models import MODELS
from gradwire.bench.step import Grid, measure_grid
from gradwire.experiments.machine import hardware, versions
from gradwire.lab import Topology, parse_rate

RESULTS = Path(__file__).resolve().parent / "results"
CASTS = ("ddp fp32", "ddp fp16", "gradwire bf16")
AUTO = "gradwire auto"
VARIANTS = ("compute", *CASTS, "gradwire terngrad", AUTO)
ALLOWED = 0.03


def judge(cell: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare auto with the best cast of its cell."""
    best = min(CASTS, key=lambda v: cell[v]["step_time_s"])
    auto, base = cell[AUTO], cell[best]
    pairs = [a / b - 1 for a, b in zip(auto["turn_medians_s"], base["turn_medians_s"])]
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    relative = mean(pairs)
    rate = auto["bandwidth_bits_per_s"]
    wire_s = 8 * cell["ddp fp32"]["sent_bytes_per_step"] / rate if rate else 0.0
    must_win = wire_s > cell["ddp fp32"]["step_time_s"] / 3
    allowed = max(ALLOWED, 2 * error)
    return {
        "model": auto["model"],
        "hosts": auto["hosts"],
        "bandwidth_bits_per_s": rate,
        "chosen": auto["record"]["choice"]["chosen"],
        "best_cast": best,
        "best_cast_s": base["step_time_s"],
        "auto_s": auto["step_time_s"],
        "terngrad_s": cell["gradwire terngrad"]["step_time_s"],
        "relative": relative,
        "standard_error": error,
        "allowed": allowed,
        "must_win": must_win,
        "kept": relative <= allowed and (not must_win or relative < 0),
    }


def main() -> int:
    """Measure, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="where the rows go; what is there is kept")
    parser.add_argument("--json", type=Path, default=RESULTS / "auto.json")
    parser.add_argument("--model", nargs="*", default=list(MODELS))
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--bandwidth", nargs="*", default=["50mbit", "100mbit", "1gbit", "5gbit", "unlimited"])
    parser.add_argument("--budget", type=float, default=2.5)
    arguments = parser.parse_args()
    rates = [parse_rate(text) for text in arguments.bandwidth]
    topologies = [Topology(hosts=n, bandwidth=rate) for n in arguments.hosts for rate in rates]
    grid = Grid(models=arguments.model, topologies=topologies, variants=VARIANTS, budget_s=arguments.budget)
    rows = measure_grid(grid, arguments.rows, lambda line: print(line, flush=True))
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["lab"]), {})[row["variant"]] = row
    found = [judge(cell) for cell in cells.values()]
    for c in found:
        print(f"{c['model']:12s}{c['hosts']} {(c['bandwidth_bits_per_s'] or 0) / 1e6:6.0f} {c['chosen']:9s}"
              f" {100 * c['relative']:+6.1f} % of {c['best_cast']} (allowed {100 * c['allowed']:.1f} %)"
              f"{' must win' if c['must_win'] else ''} {'kept' if c['kept'] else 'BROKEN'}")  # fmt: skip
    record = {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": hardware()["processor"],
        "cores": hardware()["cores"],
        "versions": versions(),
        "cells": found,
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
