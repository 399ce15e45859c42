"""Cells of the rows of ``gradwire bench step``, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
Cell = dict[str, Row]
Key = tuple[str, int, float]

UNLIMITED = float("inf")
ORDER = ("mlp", "resnet", "transformer", "lenet")


def cells_of(rows: Sequence[Row]) -> dict[Key, Cell]:
    """Group rows by model, hosts and bandwidth, slowest link first."""
    found: dict[Key, Cell] = {}
    for row in rows:
        key = (row["model"], row["hosts"], row["bandwidth_bits_per_s"] or UNLIMITED)
        found.setdefault(key, {})[row["variant"]] = row
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0][0]), item[0][1], item[0][2])))


def relative(cell: dict[str, dict[str, Any]], one: str, other: str) -> tuple[float, float]:
    """Return the mean of one / other - 1 over turns taken side by side, and its standard error."""
    pairs = [a / b - 1 for a, b in zip(cell[one]["turn_medians_s"], cell[other]["turn_medians_s"])]
    return mean(pairs), stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0


def speed(rate: float) -> str:
    """Write a bandwidth."""
    if rate == UNLIMITED:
        return "unlimited"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def ms(seconds: float) -> str:
    """Write milliseconds with three figures."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def provenance(row: Row) -> str:
    """Describe on what, with what and when."""
    versions = ", ".join(f"{n} {row[f'{n}_version']}" for n in ("gradwire", "torch", "numba", "python"))
    return f"{row['processor']}, {row['cores']} cores; {versions}; {row['date_utc'][:10]}"


def where(found: dict[str, Any]) -> str:
    """Describe on what, with what and when."""
    versions = ", ".join(f"{k} {v}" for k, v in found.get("versions", {}).items())
    parts = [found.get("cpu", ""), f"{found['cores']} cores" if "cores" in found else "", versions, found["date_utc"]]
    return "; ".join(part for part in parts if part)


def load(found: dict[str, Any]) -> str:
    """Describe what else the machine computed, as :func:`benchmarks.lib.runs.cores_of_others` found it."""
    others = found.get("cores_of_others")
    if others is None:
        return "Others used the machine meanwhile." if found.get("shared_machine") else ""
    return "Nothing else ran." if others < 0.1 else f"Other work kept {others:.1f} cores busy when it began."
