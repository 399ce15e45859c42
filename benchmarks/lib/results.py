"""Where the repository keeps results, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "result", "rows_of"]

ROOT = Path(__file__).resolve().parents[2]
"""The repository's folder."""

RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any] | None:
    """Read a result by its shelf and name without the suffix, if it is there.

    Example:
        >>> result("claims/variance")["cores"]
        2
    """
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows_of(name: str) -> list[dict[str, Any]]:
    """Read a file of JSON lines by its shelf and name without the suffix, if it is there."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
