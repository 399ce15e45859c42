"""What the pages share: reading committed results, and writing numbers as people read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
Cell = dict[str, Row]
Key = tuple[str, int, float]

UNLIMITED = float("inf")
ORDER = ("mlp", "resnet", "transformer", "lenet")


def rows_of(name: str) -> list[Row]:
    """Read a file of JSON lines, if it is there."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(name: str) -> dict[str, Any] | None:
    """Read a result, if it is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def cells_of(rows: Sequence[Row]) -> dict[Key, Cell]:
    """Group rows by model, hosts and bandwidth, slowest link first."""
    found: dict[Key, Cell] = {}
    for row in rows:
        key = (row["model"], row["hosts"], row["bandwidth_bits_per_s"] or UNLIMITED)
        found.setdefault(key, {})[row["variant"]] = row
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0][0]), item[0][1], item[0][2])))


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
