"""What ``gradwire bench`` does once its options are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.models import MODELS
from gradwire.bench.step import BANDWIDTHS, BYTES_TOLERANCE, HOSTS, Grid, measure_grid
from gradwire.bench.variants import VARIANTS
from gradwire.cli.show import print_json, print_steps
from gradwire.experiments.errors import RunError, UsageError
from gradwire.lab import Topology, parse_rate

__all__ = ["step"]


def step(
    *,
    models: Sequence[str] | None,
    hosts: Sequence[int] | None,
    bandwidths: Sequence[str] | None,
    variants: Sequence[str] | None,
    lab: str | None,
    loopback: bool,
    budget_s: float,
    out: Path,
    as_json: bool,
) -> None:
    """Measure, print the table, and fail where bytes disagree.

    Raises:
        RunError: in some cell the interfaces counted other bytes than the library.
    """
    if lab is not None:
        if hosts or bandwidths or loopback:
            raise UsageError("--lab names the whole cluster: leave --hosts, --bandwidth and --loopback out")
        topologies = [Topology.parse(lab)]
    else:
        rates = [parse_rate(text) for text in bandwidths or (("unlimited",) if loopback else BANDWIDTHS)]
        topologies = [Topology(hosts=n, bandwidth=rate) for n in hosts or HOSTS for rate in rates]
    grid = Grid(
        models=models or list(MODELS),
        topologies=topologies,
        variants=variants or VARIANTS,
        budget_s=budget_s,
        loopback=loopback,
    )
    rows = measure_grid(grid, out, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print_json([flat(row) for row in rows])
    else:
        print_steps(rows)
        print(f"rows: {out}")
    wrong = [row for row in rows if row["bytes_agree"] is False]
    if wrong:
        first = wrong[0]
        raise RunError(
            f"{len(wrong)} of {len(rows)} rows: interfaces and library differ by more than {100 * BYTES_TOLERANCE:g} % in"
            f" bytes; first: {first['model']}, {first['lab']}, {first['variant']}"
            f" ({100 * first['interface_over_library']:+.1f} %)"
        )


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is not a plain value."""
    return {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
