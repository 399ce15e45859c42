"""What ``method="auto"`` chose in the committed grid's cells, and whether that was right.

    python benchmarks/speed/auto_cells.py

A cell is kept if auto is slower than the best cast by no more than 3 % or two standard errors of the pairs, and faster
than DDP's fp32 wherever bytes / bandwidth exceeds a third of the fp32 step. The stricter reading of the second half,
faster than the best cast, is counted too: no choice that is itself a cast can meet it.

Reads the rows of ``gradwire bench step`` in which ``gradwire auto`` took turns with the casts and TernGrad. Writes
``benchmarks/results/speed/auto.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.page_parts import relative
from benchmarks.lib.results import RESULTS
from gradwire.tools.bench.step import read_rows

CASTS = ("ddp fp32", "ddp fp16", "gradwire bf16")
AUTO = "gradwire auto"
ALLOWED = 0.03


def judge(cell: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare auto with the best cast of its cell, and with the very method that it chose."""
    best = min(CASTS, key=lambda v: cell[v]["step_time_s"])
    auto = cell[AUTO]
    chosen = auto["record"]["choice"]["chosen"]
    slower, error = relative(cell, AUTO, best)
    to_fp32, _ = relative(cell, AUTO, "ddp fp32")
    itself = relative(cell, AUTO, f"gradwire {chosen}") if f"gradwire {chosen}" in cell else (None, None)
    rate = auto["bandwidth_bits_per_s"]
    wire_s = 8 * cell["ddp fp32"]["sent_bytes_per_step"] / rate if rate else 0.0
    must_win = wire_s > cell["ddp fp32"]["step_time_s"] / 3
    allowed = max(ALLOWED, 2 * error)
    return {
        "model": auto["model"],
        "hosts": auto["hosts"],
        "bandwidth_bits_per_s": rate,
        "chosen": chosen,
        "best_cast": best,
        "best_cast_s": cell[best]["step_time_s"],
        "auto_s": auto["step_time_s"],
        "terngrad_s": cell["gradwire terngrad"]["step_time_s"],
        "relative_to_best_cast": slower,
        "standard_error": error,
        "allowed": allowed,
        "relative_to_fp32": to_fp32,
        "relative_to_the_chosen_alone": itself[0],
        "must_win": must_win,
        "kept": slower <= allowed and (not must_win or to_fp32 < 0),
        "kept_strictly": slower <= allowed and (not must_win or slower < 0),
    }


def main() -> int:
    """Judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS / "speed/step_grid.jsonl")
    parser.add_argument("--json", type=Path, default=RESULTS / "speed/auto.json")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["lab"]), {})[row["variant"]] = row
    found = [judge(cell) for cell in cells.values() if AUTO in cell]
    for c in found:
        itself = c["relative_to_the_chosen_alone"]
        print(f"{c['model']:12s}{c['hosts']} {(c['bandwidth_bits_per_s'] or 0) / 1e6:6.0f} {c['chosen']:9s}"
              f" {100 * c['relative_to_best_cast']:+6.1f} % of {c['best_cast']:14s} allowed {100 * c['allowed']:5.1f} %"
              f" itself {'' if itself is None else f'{100 * itself:+.1f} %':8s}"
              f"{' must win' if c['must_win'] else ''} {'' if c['kept'] else 'BROKEN'}")  # fmt: skip
    print(
        f"kept in {sum(c['kept'] for c in found)} of {len(found)} cells, strictly in {sum(c['kept_strictly'] for c in found)}"
    )
    first = rows[0]
    record = {
        "date_utc": max(row["date_utc"] for row in rows),
        "cpu": first["processor"],
        "cores": first["cores"],
        "versions": {name: first[f"{name}_version"] for name in ("python", "gradwire", "torch", "numpy", "numba")},
        "cells": found,
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
