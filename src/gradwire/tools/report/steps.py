"""The figure of ``gradwire bench step``: how much faster than DDP alone, against bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import IncompatibleError
from gradwire.tools.report.verdict import rate_text

__all__ = ["draw_steps"]

BASE = "ddp fp32"
COLOURS = ("#0072b2", "#999999", "#444444", "#009e73", "#d55e00", "#cc79a7", "#e69f00")
TICKS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50)
UNLIMITED = float("inf")


def draw_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one panel a model and number of hosts, one line an exchange.

    Args:
        path: PNG or SVG, by its suffix.
        rows: Of the step benchmark.

    Raises:
        IncompatibleError: there is no exchange to compare with DDP alone.
    """
    cells: dict[tuple[str, int], dict[float, dict[str, float]]] = {}
    for row in rows:
        rate = row["bandwidth_bits_per_s"] or UNLIMITED
        cells.setdefault((row["model"], row["hosts"]), {}).setdefault(rate, {})[row["variant"]] = row["step_time_s"]
    variants = list(dict.fromkeys(r["variant"] for r in rows if r["variant"] not in ("compute", BASE)))
    if not variants or not any(BASE in cell for links in cells.values() for cell in links.values()):
        raise IncompatibleError(
            f"the figure compares exchanges with {BASE!r}: measure it and at least one other variant"
        )
    from matplotlib.figure import Figure

    # Two beside each other, so that the text can be read on a telephone.
    across = min(2, len(cells))
    down = -(-len(cells) // across)
    drawing = Figure(figsize=(2.75 * across, 2.4 * down + 0.8), layout="constrained")
    places = drawing.subplots(down, across, squeeze=False)
    panels = list(places.flat)
    for spare in panels[len(cells) :]:
        spare.remove()
    for panel, ((model, hosts), links) in zip(panels, cells.items()):
        rates = sorted(rate for rate, cell in links.items() if BASE in cell)
        for variant, colour in zip(variants, COLOURS * len(variants)):
            line = [(i, links[r][BASE] / links[r][variant]) for i, r in enumerate(rates) if variant in links[r]]
            if line:
                panel.plot(*zip(*line), marker="o", markersize=4, color=colour, label=variant)
        panel.axhline(1, color="#444444", linewidth=0.8, linestyle=":")
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        shown = [tick for tick in TICKS if low <= tick <= high]
        panel.set_yticks(shown, [f"{tick:g}" for tick in shown])
        panel.minorticks_off()
        panel.set_xticks(range(len(rates)), [_speed(rate) for rate in rates], fontsize=8, rotation=25)
        panel.set_title(f"{model}, {hosts} hosts", fontsize=10)
        panel.grid(alpha=0.25)
    for row in places:
        row[0].set_ylabel(f"times as fast as {BASE}", fontsize=9)
    lines = {str(line.get_label()): line for panel in panels for line in panel.get_lines()}
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    drawing.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=2 if across > 1 else 1, fontsize=9
    )
    drawing.savefig(path, dpi=150)


def _speed(rate: float) -> str:
    return rate_text(None if rate == UNLIMITED else rate)
