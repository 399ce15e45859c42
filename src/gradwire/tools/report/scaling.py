"""The figure of ``gradwire plan``: throughput against workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import IncompatibleError

__all__ = ["draw_scaling"]

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw_scaling(path: Path, points: Sequence[tuple[str, str, int, float]]) -> None:
    """Draw one panel a link and one line a method.

    Args:
        path: PNG or SVG, by its suffix.
        points: (link, method, workers, worker steps a second).

    Raises:
        IncompatibleError: one number of workers makes no curve.
    """
    if len({workers for _, _, workers, _ in points}) < 2:
        raise IncompatibleError("a curve needs two numbers of workers: give --hosts more than once")
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(link for link, *_ in points))
    methods = list(dict.fromkeys(method for _, method, *_ in points))
    drawing = Figure(figsize=(4.2 * len(links), 3.6), layout="constrained")
    panels = drawing.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for panel, link in zip(panels, links):
        for method, colour in zip(methods, COLOURS * len(methods)):
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
    drawing.savefig(path, dpi=130)
