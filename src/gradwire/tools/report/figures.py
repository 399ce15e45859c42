"""Figures: SVG text for the report, and PNG or SVG files for ``plan`` and ``bench``."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gradwire.errors import IncompatibleError
from gradwire.tools.report.load import ReportError, Run
from gradwire.tools.report.verdict import rate_text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours by Okabe and Ito, which colour-blind readers can distinguish."""

STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH_INCH, ROW_INCH, FONT_POINTS = 7.4, 2.75, 9.5
SETTINGS: Any = {
    "font.size": FONT_POINTS,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "gradwire",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Horizontal = Callable[[dict[str, Any]], float]
AXES: tuple[tuple[str, Horizontal], ...] = (
    ("step", lambda row: float(row["step"])),
    ("seconds of training", lambda row: float(row["elapsed_s"])),
    ("MB sent by each worker", lambda row: row["sent_bytes"] / 1e6),
)

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


def style(index: int) -> dict[str, Any]:
    """Return the line style of the ``index``-th run, with its own colour, dashes and marker."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[index % len(STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 3.6,
        "linewidth": 1.6,
    }


def draw(axes: Axes, runs: Sequence[Run], field: str, horizontal: Horizontal, *, log: bool) -> None:
    """Draw one panel: evaluations with markers, and the training loss pale behind them."""
    for index, run in enumerate(runs):
        look = style(index)
        if field == "loss":
            train = [row for row in run.of("train") if not log or horizontal(row) > 0]
            values = [row["loss"] for row in train]
            axes.plot([*map(horizontal, train)], values, color=look["color"], alpha=0.22, linewidth=0.9)
        rows = [row for row in run.of("eval") if not log or horizontal(row) > 0]
        factor = 100.0 if field == "accuracy" else 1.0
        axes.plot([*map(horizontal, rows)], [factor * row[field] for row in rows], label=run.label, **look)


def lowest_accuracy(runs: Sequence[Run]) -> float:
    """Return the start of the accuracy axis in percent: it spans four times the worst final error, and one at least."""
    finals = [rows[-1]["accuracy"] for run in runs if (rows := run.of("eval"))]
    return max(0.0, 100.0 - max(1.0, 400.0 * (1.0 - min(finals)))) if finals else 0.0


def spans_decades(runs: Sequence[Run]) -> bool:
    """Return whether evaluation losses span so wide a range that the axis should be logarithmic."""
    losses = [row["loss"] for run in runs for row in run.of("eval")]
    return bool(losses) and min(losses) > 0 and max(losses) / min(losses) > 12


def progress_figure(runs: Sequence[Run]) -> str:
    """Draw loss and accuracy against step, time and bytes, and return an ``<svg>`` element.

    Time is left out if all workers were simulated, and bytes if none were sent.
    """
    timed = not all(run.config["simulated"] for run in runs)
    sent = any(row["sent_bytes"] for run in runs for row in run.of("eval"))
    chosen = [axis for axis, wanted in zip(AXES, (True, timed, sent)) if wanted]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCH, ROW_INCH * len(chosen) + 0.5), layout="constrained")
        grid = figure.subplots(len(chosen), 2, squeeze=False)
        for (name, horizontal), (left, right) in zip(chosen, grid):
            log = name.startswith("MB")
            for axes, field in ((left, "loss"), (right, "accuracy")):
                draw(axes, runs, field, horizontal, log=log)
                axes.set_xlabel(name + (" (logarithmic)" if log else ""))
                axes.set_ylabel("loss" if field == "loss" else "accuracy, %")
                if log:
                    scale_bytes(axes)
                axes.grid(alpha=0.25, linewidth=0.6)
            if spans_decades(runs):
                left.set_yscale("log")
            lowest = lowest_accuracy(runs)
            right.set_ylim(lowest, 100.0 + 0.02 * (100.0 - lowest))
        legend(figure, *grid[0][1].get_legend_handles_labels())
        return svg(figure, "loss and accuracy of each run")


def gauge_figure(runs: Sequence[Run]) -> str | None:
    """Draw the methods' gauges, a panel for each, and return an ``<svg>`` element; None if there are none.

    Lines are means over the steps and workers of a row, pale bands one deviation to both sides.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.gauges))
    if not names:
        return None
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCH, ROW_INCH * len(names) + 0.5), layout="constrained")
        lines: dict[str, Any] = {}
        for name, axes in zip(names, figure.subplots(len(names), 1, squeeze=False)[:, 0]):
            for index, run in enumerate(runs):
                rows, look = run.gauge(name), style(index)
                if rows:
                    steps, means, deviations = zip(*rows)
                    (lines[run.label],) = axes.plot(steps, means, label=run.label, **look)
                    low, high = zip(*((mean - off, mean + off) for mean, off in zip(means, deviations)))
                    axes.fill_between(steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
            axes.set_xlabel("step")
            axes.set_ylabel(name)
            axes.grid(alpha=0.25, linewidth=0.6)
        legend(figure, list(lines.values()), list(lines))
        return svg(figure, f"{', '.join(names)} by step")


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Draw a legend above the panels."""
    # Columns are as wide as the longest label; about eighty letters fit side by side.
    columns = max(1, min(3, len(labels), 80 // (8 + max(map(len, labels), default=1))))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def _as_written(figure: Figure) -> None:
    """Let titles and legends be drawn as they are: between two dollar signs of a path, Matplotlib reads a formula."""
    titles = [axes.title for axes in figure.axes]
    for text in (*titles, *(text for found in figure.findobj(Legend) for text in found.get_texts())):
        text.set_parse_math(False)


def scale_bytes(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers that do not overlap."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    if decades < 0.7:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def svg(figure: Figure, label: str) -> str:
    """Return a figure as an SVG element without XML prologue, metadata or external references.

    Args:
        label: Description of the figure for screen readers.
    """
    _as_written(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=False, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)

    def responsive(found: re.Match[str]) -> str:
        return f'{found.group(1) or found.group(2)} role="img" aria-label="{html.escape(label)}"'

    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg)', responsive, text, count=1)


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
