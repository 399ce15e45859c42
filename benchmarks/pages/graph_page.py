"""The measured part of the page about graphs."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.page_parts import Row
from benchmarks.lib.results import result

__all__ = ["measured"]

FULL = "full"

FURTHER = {"adaptive": "Measured: adaptive tolerances", "large": "Measured: a graph of 100000 nodes"}
"""Titles of the sections with results of their own, by table of the program."""


def _key(row: Row) -> tuple[str, str, str, int, int]:
    return row["graph"], row["model"], row["partition"], row["workers"], row["steps"]


def _accuracy(row: Row) -> str:
    spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.1f}"
    return f"{100 * row['accuracy_mean']:.1f}{spread}"


def _table(rows: list[Row]) -> list[str]:
    full = next((row for row in rows if row["label"] == FULL), None)
    lines = [
        "| halo | accuracy, % | sent for halos, MB | of full communication, % | seeds |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        share = "" if full is None else f"{100 * row['halo_bytes'] / full['halo_bytes']:.1f}"
        lines.append(
            f"| {row['label']} | {_accuracy(row)} | {row['halo_bytes'] / 1e6:.1f} | {share} | {row['seeds']} |"
        )
    return lines


def _title(row: Row) -> str:
    return (
        f"`{row['graph']}`, {row['model'].upper()}, {row['workers']} workers, {row['partition']} partition "
        f"({100 * row['cut_edges']:.0f} % of the edges cut), {row['steps']} steps"
    )


def _curves(rows: list[Row]) -> list[str]:
    """Return the least bytes after which each method has come within a point of full communication's last accuracy."""
    full = next((row for row in rows if row["label"] == FULL), None)
    if full is None:
        return []
    goal = full["accuracy_mean"] - 0.01
    lines = [
        "",
        f"Bytes sent until the accuracy is {100 * goal:.1f} %, one point below the final accuracy of full communication:",
        "",
    ]
    told = []
    for row in rows:
        point = next((p for p in row["curve"] if p["accuracy_mean"] >= goal), None)
        if point is not None:
            told.append(f"{row['label']} {point['halo_bytes'] / 1e6:.1f} MB (step {point['step']})")
    never = [row["label"] for row in rows if all(p["accuracy_mean"] < goal for p in row["curve"])]
    lines.append("; ".join(told) + ".")
    if never:
        lines += ["", f"These do not reach it within {rows[0]['steps']} steps: {'; '.join(never)}."]
    return lines


def measured(found: dict[str, Any] | None = None) -> str:
    """Return the tables, or nothing where there is no result."""
    found = found or result("training/graph")
    if found is None:
        return ""
    lines = ["## Measured", *_section(found, "main", "graph")]
    for table, title in FURTHER.items():
        more = result(f"training/graph_{table}")
        if more is not None:
            lines += ["", f"## {title}", *_section(more, table, f"graph_{table}")]
    return "\n".join(lines)


def _section(found: dict[str, Any], table: str, name: str) -> list[str]:
    """Return what ran, and a table for each set-up."""
    groups: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for row in found["rows"]:
        groups.setdefault(_key(row), []).append(row)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    beside = ", ".join(
        f"`{name}` {100 * row['accuracy_mean']:.1f} %" for name, row in sorted(found["perceptron"].items())
    )
    ran = f"{found['cpu']}, {found['cores']} cores; {versions}; {found['date_utc'][:10]}"
    chosen = {
        "main": "--work runs/graph",
        "adaptive": "--table adaptive --work runs/graph-adaptive",
        "large": f"--table large --seeds {len(found['seeds'])} --work runs/graph-large",
    }[table]
    lines = [
        "",
        f"`python benchmarks/training/graph.py {chosen} --json benchmarks/results/training/{name}.json`",
        "",
        f"{ran}. Workers are simulated; networks have three layers "
        "of width 64 and train with Adam at 0.01. Accuracies are those after the last step, evaluated with all "
        "rows in float32, as mean ± standard deviation over seeds, which draw weights, partition and masks. Bytes are those of "
        f"all workers together. A perceptron that sees no edges reaches {beside}.",
    ]
    for rows in groups.values():
        lines += ["", f"### {_title(rows[0])}", "", *_table(rows), *_curves(rows)]
    return lines
