"""The figure of ``gradwire bench timeline``: one rank's lanes in one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw_timeline"]

COLOURS = {
    "forward": "#999999",
    "backward": "#cccccc",
    "update": "#666666",
    "encode": "#0072b2",
    "wait for turn": "#f0e442",
    "send rows": "#009e73",
    "small message": "#d55e00",
    "decode": "#cc79a7",
}


def draw_timeline(path: Path, spans: Sequence[tuple[str, str, float, float]], title: str) -> None:
    """Draw one bar a span, one line a track.

    Args:
        path: PNG or SVG, by its suffix.
        spans: (track, name, begin, end), seconds; the first track is drawn at the top.
        title: Above the figure.
    """
    from matplotlib.figure import Figure

    tracks = list(dict.fromkeys(track for track, *_ in spans))
    origin_s = min((begin for _, _, begin, _ in spans), default=0.0)
    drawing = Figure(figsize=(5.8, 1.7 + 0.5 * len(tracks)), layout="constrained")
    panel = drawing.subplots()
    for name, colour in COLOURS.items():
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
    drawing.savefig(path, dpi=150)
