"""Programs that compute the figures of several claims, each by a function of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.runs import write

__all__ = ["Figures", "figures_of"]

Figures = Callable[[], Iterator[dict[str, Any]]]
"""Yields rows: the case, what was measured, and what the claim says, if it has a figure."""


def figures_of(claims: Mapping[str, Figures], description: str | None, **settings: Any) -> None:
    """Compute the figures of the claims that the command line names, or of all; print and write them.

    Args:
        claims: Functions by the name of their claim.
        description: Of the program, for its help.
        settings: Written beside the figures.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", action="append", choices=claims)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [{"claim": name, **row} for name in given.claim or claims for row in claims[name]()]
    for row in rows:
        print(row["claim"], row["case"], row["measured"], row["said"])
    write(given.json, **settings, rows=rows)
