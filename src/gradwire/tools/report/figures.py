"""Figures of ``plan`` and ``bench``: PNG or SVG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.legend import Legend

from gradwire.errors import IncompatibleError
from gradwire.tools.report.load import ReportError
from gradwire.tools.report.verdict import rate_text

METHOD_COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

BASE = "ddp fp32"
VARIANT_COLOURS = ("#0072b2", "#999999", "#444444", "#009e73", "#d55e00", "#cc79a7", "#e69f00")
TICKS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50)
UNLIMITED = float("inf")

WORK_COLOURS = {
    "forward": "#999999",
    "backward": "#cccccc",
    "update": "#666666",
    "encode": "#0072b2",
    "wait for turn": "#f0e442",
    "send rows": "#009e73",
    "small message": "#d55e00",
    "decode": "#cc79a7",
}


def _as_written(figure: Figure) -> None:
    """Let titles and legends be drawn as they are: between two dollar signs of a path, Matplotlib reads a formula."""
    titles = [axes.title for axes in figure.axes]
    for text in (*titles, *(text for found in figure.findobj(Legend) for text in found.get_texts())):
        text.set_parse_math(False)


def draw_scaling(path: Path, points: Sequence[tuple[str, str, int, float]]) -> None:
    """Draw one panel for each network link, with one line for each method.

    Args:
        path: PNG or SVG, by its suffix.
        points: Tuples of network link, method, number of workers, and worker steps a second.

    Raises:
        IncompatibleError: there is only one number of workers.
    """
    if len({workers for _, _, workers, _ in points}) < 2:
        raise IncompatibleError("a curve needs two numbers of workers: give --hosts more than once")
    links = list(dict.fromkeys(link for link, *_ in points))
    methods = list(dict.fromkeys(method for _, method, *_ in points))
    drawing = Figure(figsize=(4.2 * len(links), 3.6), layout="constrained")
    panels = drawing.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for panel, link in zip(panels, links):
        for method, colour in zip(methods, METHOD_COLOURS * len(methods)):
            line = sorted((n, rate) for place, name, n, rate in points if place == link and name == method)
            panel.plot(*zip(*line), marker="o", markersize=4, color=colour, label=method)
        base = [(n, rate) for place, name, n, rate in points if place == link and name == methods[0]]
        first_n, first = min(base)
        counts = sorted({n for n, _ in base})
        panel.plot(counts, [first * n / first_n for n in counts], ":", color="#999999", label=f"{methods[0]}, linear")
        panel.set(title=link, xlabel="workers", xscale="log", yscale="log")
        panel.set_xticks(counts, [str(n) for n in counts])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("worker steps a second")
    panels[-1].legend(fontsize=8)
    _save(drawing, path, dpi=130)


def draw_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one panel for each model, number of hosts, and what links do, with one line for each exchange.

    Args:
        path: PNG or SVG, by its suffix.
        rows: Rows of the step benchmark.

    Raises:
        IncompatibleError: DDP alone, or an exchange to compare with it, is missing.
    """
    cells: dict[tuple[str, int, str], dict[float, dict[str, float]]] = {}
    for row in rows:
        rate = row["bandwidth_bits_per_s"] or UNLIMITED
        panel_of = (row["model"], row["hosts"], _impairments(row))
        cells.setdefault(panel_of, {}).setdefault(rate, {})[row["variant"]] = row["step_time_s"]
    variants = list(dict.fromkeys(r["variant"] for r in rows if r["variant"] not in ("compute", BASE)))
    if not variants or not any(BASE in cell for links in cells.values() for cell in links.values()):
        raise IncompatibleError(
            f"the figure compares exchanges with {BASE!r}: measure it and at least one other variant"
        )
    # Two beside each other, so that the text can be read on a telephone.
    across = min(2, len(cells))
    down = -(-len(cells) // across)
    drawing = Figure(figsize=(2.75 * across, 2.4 * down + 0.8), layout="constrained")
    places = drawing.subplots(down, across, squeeze=False)
    panels = list(places.flat)
    for spare in panels[len(cells) :]:
        spare.remove()
    for panel, ((model, hosts, impaired), links) in zip(panels, cells.items()):
        rates = sorted(rate for rate, cell in links.items() if BASE in cell)
        for variant, colour in zip(variants, VARIANT_COLOURS * len(variants)):
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
        alike = [other[2] for other in cells if other[:2] == (model, hosts)]
        panel.set_title("\n".join([f"{model}, {hosts} hosts", *_differing(impaired, alike)]), fontsize=10)
        panel.grid(alpha=0.25)
    for row in places:
        row[0].set_ylabel(f"times as fast as {BASE}", fontsize=9)
    lines = {str(line.get_label()): line for panel in panels for line in panel.get_lines()}
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    drawing.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=2 if across > 1 else 1, fontsize=9
    )
    _save(drawing, path, dpi=150)


def _save(drawing: Figure, path: Path, *, dpi: int) -> None:
    _as_written(drawing)
    try:
        drawing.savefig(path, dpi=dpi)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def _speed(rate: float) -> str:
    return rate_text(None if rate == UNLIMITED else rate)


def _impairments(row: Mapping[str, Any]) -> str:
    """Return a row's cluster without its hosts and bandwidth, such as ``delay=20ms,loss=1%``."""
    parts = row.get("lab", "").split(",")
    return ",".join(part for part in parts if part.partition("=")[0] not in ("hosts", "bandwidth", "loopback"))


def _differing(impaired: str, alike: Sequence[str]) -> list[str]:
    """Return a line of what a cluster has that is not the same in all of those like it, itself among them, or none."""
    read = [dict(part.split("=", 1) for part in filter(None, one.split(","))) for one in alike]
    keys = dict.fromkeys(key for one in read for key in one if len({other.get(key) for other in read}) > 1)
    own = read[alike.index(impaired)]
    told = ", ".join(f"{key}={own[key]}" if key in own else f"no {key}" for key in keys)
    return [told] if told else []


def draw_timeline(path: Path, spans: Sequence[tuple[str, str, float, float]], title: str) -> None:
    """Draw one bar for each span, on one line for each track.

    Args:
        path: PNG or SVG, by its suffix.
        spans: Tuples of track, name, begin and end in seconds; the first track is drawn at the top.
        title: Title above the figure.
    """
    tracks = list(dict.fromkeys(track for track, *_ in spans))
    origin_s = min((begin for _, _, begin, _ in spans), default=0.0)
    drawing = Figure(figsize=(5.8, 1.7 + 0.5 * len(tracks)), layout="constrained")
    panel = drawing.subplots()
    for name, colour in WORK_COLOURS.items():
        for row, track in enumerate(tracks):
            bars = [(1e3 * (b - origin_s), 1e3 * (e - b)) for t, n, b, e in spans if t == track and n == name]
            if bars:
                panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, label=name)
    panel.set_yticks(range(len(tracks)), tracks)
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds")
    panel.set_title(title, fontsize=9)
    shown = dict(zip(*reversed(panel.get_legend_handles_labels())))
    drawing.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=4, fontsize=8)
    _save(drawing, path, dpi=150)
