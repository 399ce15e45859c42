"""The measured part of ``docs/membership.md``: workers of unlike speed."""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks.lib.page_parts import where
from benchmarks.lib.results import result

__all__ = ["measured"]

MODES = {
    "synchronous": "none: a round waits for all",
    "quorum": "1, more time than a step takes",
    "quorum, little time": "1, less time than a slow step takes",
}


def measured() -> str:
    """Return the measured part of the page; a sentence where nothing has been measured."""
    found = result("trials/speeds")
    if not found:
        return "Nothing has been measured yet."
    rows = found["rows"]
    first, seeds = rows[0], sorted({row["seed"] for row in rows})
    periods = ", ".join(f"{period:g}" for period in first["periods_s"])
    lines = [
        f"Workers of speeds 1 : 1 : 2 : 4 train a byte-level network by `{first['method']}`. A step takes {periods} s, of which most is "
        "slept, so that four workers have room on two cores. The summed rate is that of the same workers side by side without an "
        "exchange, measured before each seed; the pace is the rate at which steps would follow each other if nothing but their "
        "own sleep took time. The loss is that of the global parameters on held-out text, when about as many samples were merged: "
        f"{min(row['samples'] for row in rows):,} to {max(row['samples'] for row in rows):,}. Means of {len(seeds)} seeds, and the range. "
        f"`python benchmarks/trials/speeds.py`. {where(found)}. Others used the machine meanwhile.",
        "",
        "| quorum | `late_s` | local steps a second | of the summed rate, % | of the pace, % | loss | half way | rounds | late contributions | missed | sent by the fastest, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, told in MODES.items():
        these = [row for row in rows if row["mode"] == mode]
        if not these:
            continue
        lines.append(
            f"| {told} | {'-' if these[0]['late_s'] is None else format(these[0]['late_s'], 'g')} "
            f"| {mean(sum(row['steps_per_s']) for row in these):.1f} "
            f"| {_range([100 * row['share_of_summed_rate'] for row in these], 1)} "
            f"| {_range([100 * _of_pace(row) for row in these], 1)} "
            f"| {_range([row['loss'] for row in these], 3)} "
            f"| {_range([row['loss_at_quarters'][1] for row in these], 3)} "
            f"| {mean(row['rounds'] for row in these):.0f} | {_late(these)} "
            f"| {mean(row['rounds_missed'] for row in these):.0f} | {mean(row['sent_bytes'] for row in these) / 1e6:.2f} |"
        )
    return "\n".join(lines)


def _of_pace(row: dict[str, Any]) -> float:
    """Return the share of the rate that the workers' pace would give."""
    rate: float = sum(row["steps_per_s"]) / sum(1 / period for period in row["periods_s"])
    return rate


def _range(values: list[float], digits: int) -> str:
    """Write a mean with the smallest and the largest value."""
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _late(rows: list[dict[str, Any]]) -> str:
    """Write how many contributions were late, and the largest age."""
    late, all_ = (mean(row[key] for row in rows) for key in ("late_contributions", "contributions"))
    oldest = max((int(age) for row in rows for age in row["ages"]), default=0)
    return f"{late:.0f} of {all_:.0f}, up to {oldest} rounds" if late else "0"
