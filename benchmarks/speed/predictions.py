"""Predicted against measured steps over the committed grid: calibrate on a third of the cells, judge on the others.

    python benchmarks/speed/predictions.py
    python benchmarks/speed/predictions.py --rows benchmarks/results/speed/step_long_links.jsonl

The second judges links with delay and loss, and all variants that were measured there. Codecs are rehearsed on this
machine, so run it where the grid was measured, with nothing beside it. Writes
``benchmarks/results/speed/predictions.json`` and ``docs/figures/predicted.png``, or the same of long links with
``_long_links`` at the end of the names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS, ROOT
from gradwire.model.forecast import WORTH
from gradwire.tools.bench.predict import judge
from gradwire.tools.bench.step import read_rows
from gradwire.tools.bench.variants import VARIANTS
from gradwire.tools.experiments.run_record import hardware, versions

FIGURES = ROOT / "docs" / "figures"
LONG = "step_long_links"
CLEAR = 0.05
"""A measured difference that counts when the sign of the advice is judged."""

GRID = (*VARIANTS, "gradwire auto", "gradwire fp16")
CASTS = ("ddp fp32", "ddp fp16", "gradwire bf16")


def advises(cell: dict[str, dict[str, Any]], names: Sequence[str]) -> bool:
    """Return whether ``gradwire plan`` would advise TernGrad: as in :func:`gradwire.model.forecast.recommend`.

    A cast takes the place of DDP alone, and TernGrad that of either, where it is predicted to be so many times as fast.
    """
    first, *casts = (cell[name]["predicted_s"] for name in names if name in cell)
    fastest = min(casts, default=first)
    base = fastest if first / fastest >= WORTH else first
    return bool(base / cell["gradwire terngrad"]["predicted_s"] >= WORTH)


def advice(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare TernGrad with DDP alone, and with the best cast, in each judged cell: measured and predicted."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "judged":
            cells.setdefault((row["model"], row["lab"]), {})[row["variant"]] = row
    found = []
    for (model, lab), cell in cells.items():
        one = cell["gradwire terngrad"]
        for against, names in (("DDP fp32", CASTS[:1]), ("the best cast", CASTS)):
            ratios: dict[str, float] = {}
            for kind in ("measured_s", "predicted_s"):
                ratios[kind] = min(cell[n][kind] for n in names if n in cell) / one[kind]
            found.append(
                {
                    "model": model,
                    "lab": lab,
                    "hosts": one["hosts"],
                    "bandwidth_bits_per_s": one["bandwidth_bits_per_s"],
                    "against": against,
                    "measured_speedup": ratios["measured_s"],
                    "predicted_speedup": ratios["predicted_s"],
                    "clear": abs(ratios["measured_s"] - 1) > CLEAR,
                    "right": (ratios["measured_s"] > 1) == (ratios["predicted_s"] > 1),
                    "advised": advises(cell, names),
                }
            )
    return found


def summary(rows: list[dict[str, Any]], advised: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the page states."""
    errors = sorted(abs(r["relative_error"]) for r in rows if r["role"] == "judged")
    out: dict[str, Any] = {
        "judged_steps": len(errors),
        "median_absolute_error": median(errors),
        "percentile_90_absolute_error": quantiles(errors, n=10)[-1],
        "worst_absolute_error": errors[-1],
    }
    for against in ("DDP fp32", "the best cast"):
        clear = [a for a in advised if a["against"] == against and a["clear"]]
        out[f"clear_cells_against_{against}"] = len(clear)
        out[f"right_against_{against}"] = sum(a["right"] for a in clear)
        out[f"well_advised_against_{against}"] = sum(a["advised"] == (a["measured_speedup"] > 1) for a in clear)
    return out


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw predicted against measured, filled where judged."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(r["variant"] for r in rows))
    colours = dict(zip(variants, ("#444444", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")))
    drawing = Figure(figsize=(5.4, 5.0), layout="constrained")
    panel = drawing.subplots()
    low, high = (f(r["measured_s"] for r in rows) * 1e3 for f in (min, max))
    ends = [low * 0.8, high * 1.25]
    panel.plot(ends, ends, color="#888888", linewidth=1)
    for share in (1.1, 1.25):
        for factor in (share, 1 / share):
            panel.plot(ends, [e * factor for e in ends], ":", color="#bbbbbb", linewidth=1)
    for variant in variants:
        for role, face in (("judged", colours[variant]), ("calibration", "none")):
            mine = [r for r in rows if r["variant"] == variant and r["role"] == role]
            label = variant if role == "judged" else None
            panel.scatter(
                [1e3 * r["measured_s"] for r in mine],
                [1e3 * r["predicted_s"] for r in mine],
                s=22,
                facecolors=face,
                edgecolors=colours[variant],
                label=label,
            )
    panel.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms", xlim=ends, ylim=ends)
    panel.set_title("Filled: judged. Hollow: used to calibrate. Dotted: 10 % and 25 %.", fontsize=8.5)
    panel.legend(fontsize=8)
    panel.grid(alpha=0.25)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, dpi=150)


def main() -> int:
    """Judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS / "speed/step_grid.jsonl")
    arguments = parser.parse_args()
    long = arguments.rows.stem == LONG
    name = "_long_links" if long else ""
    # Of the grid: methods with one row each would be calibrated on, or judged by, a single cell.
    measured = [row for row in read_rows(arguments.rows) if long or row["variant"] in GRID]
    machine, rows = judge(measured, lambda text: print(text, file=sys.stderr, flush=True))
    advised = advice(rows)
    found = summary(rows, advised)
    for row in sorted(rows, key=lambda r: abs(r["relative_error"]))[-15:]:
        print(f"{row['model']:12s}{row['lab']:50s} {row['variant']:26s}"
              f"{1e3 * row['measured_s']:9.1f}{1e3 * row['predicted_s']:9.1f} {row['relative_error']:+.2f} {row['role']}")  # fmt: skip
    for key, value in found.items():
        print(f"{key}: {value}")
    draw(rows, FIGURES / f"predicted{name}.png")
    record = {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": hardware()["processor"],
        "cores": hardware()["cores"],
        "versions": versions(),
        "machine": machine.to_json(),
        "summary": found,
        "advice": advised,
        "rows": rows,
    }
    (RESULTS / f"speed/predictions{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
