"""The report's figures: SVG panels beside each other, below each other on a narrow page, and a legend."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gradwire.tools.report.load import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours by Okabe and Ito, which colour-blind readers can distinguish."""

STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_INCH = (3.6, 2.75)
"""Width and height. A telephone shows a panel about so wide, so that letters keep their size."""

SAMPLE_INCH, FONT_POINTS = (0.42, 0.15), 9.5
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


def progress_panels(runs: Sequence[Run]) -> Iterator[str]:
    """Draw loss, then accuracy, against step, time and bytes, and yield an ``<svg>`` element for each panel.

    Time is left out if all workers were simulated, and bytes if none were sent.
    """
    timed = not all(run.config["simulated"] for run in runs)
    sent = any(row["sent_bytes"] for run in runs for row in run.of("eval"))
    chosen = [axis for axis, wanted in zip(AXES, (True, timed, sent)) if wanted]
    decades, lowest = spans_decades(runs), lowest_accuracy(runs)
    for field, (name, horizontal) in itertools.product(("loss", "accuracy"), chosen):
        log = name.startswith("MB")
        with matplotlib.rc_context(SETTINGS):
            figure, axes = panel()
            draw(axes, runs, field, horizontal, log=log)
            axes.set_xlabel(name + (" (logarithmic)" if log else ""))
            axes.set_ylabel("loss" if field == "loss" else "accuracy, %")
            if log:
                scale_bytes(axes)
            if field == "accuracy":
                axes.set_ylim(lowest, 100.0 + 0.02 * (100.0 - lowest))
            elif decades:
                axes.set_yscale("log")
            drawn = svg(figure, f"{field} of each run by {name}")
        yield drawn


def gauge_panels(runs: Sequence[Run]) -> Iterator[str]:
    """Draw the methods' gauges, and yield an ``<svg>`` element for each.

    Lines are means over the steps and workers of a row, pale bands one deviation to both sides.
    """
    for name in dict.fromkeys(name for run in runs for name in run.gauges):
        with matplotlib.rc_context(SETTINGS):
            figure, axes = panel()
            for index, run in enumerate(runs):
                rows, look = run.gauge(name), style(index)
                if rows:
                    steps, means, deviations = zip(*rows)
                    axes.plot(steps, means, label=run.label, **look)
                    low, high = zip(*((mean - off, mean + off) for mean, off in zip(means, deviations)))
                    axes.fill_between(steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
            axes.set_xlabel("step")
            axes.set_ylabel(name)
            drawn = svg(figure, f"{name} by step")
        yield drawn


def panel() -> tuple[Figure, Axes]:
    """Return a new figure with one pair of axes."""
    figure = Figure(figsize=PANEL_INCH, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def line_sample(index: int) -> str:
    """Return an ``<svg>`` element with the line of the ``index``-th run, for a legend."""
    figure = Figure(figsize=SAMPLE_INCH)
    figure.add_artist(Line2D([0.0, 0.5, 1.0], [0.5, 0.5, 0.5], markevery=[1], **style(index)))
    return svg(figure, "")


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
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=False, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)

    def responsive(found: re.Match[str]) -> str:
        return f'{found.group(1) or found.group(2)} role="img" aria-label="{html.escape(label)}"'

    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg)', responsive, text, count=1)
