"""Measured steps beside predicted ones: calibrate on a third of the cells, judge on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.model.calibrate import Observation, calibrate
from gradwire.model.exchange import ExchangeProfile, exchange_of, nothing_but_the_sum
from gradwire.model.machine import LinkModel, Machine
from gradwire.model.schedule import Load
from gradwire.model.timeline import Timeline
from gradwire.tools.bench.deadline import Deadline
from gradwire.tools.bench.models import bench_model
from gradwire.tools.bench.step import compute_of
from gradwire.tools.bench.variants import COMPUTE
from gradwire.tools.experiments.errors import RunError
from gradwire.tools.lab import Topology

__all__ = ["Case", "cases_of", "judge", "split"]

Row = dict[str, Any]

OWN = {"ddp fp32": "fp32", "ddp fp16": "fp16"}
"""DDP's exchanges that a method of ours equals, bit for bit."""


@dataclass(frozen=True)
class Case:
    """A measured row and its prediction's inputs."""

    row: Row
    observation: Observation

    @property
    def cell(self) -> tuple[str, str]:
        """Return model and cluster."""
        return self.row["model"], self.row["lab"]


def cases_of(
    rows: Sequence[Row], say: Callable[[str], None] = lambda text: None, deadline: Deadline | None = None
) -> list[Case]:
    """Return every row that the model predicts: all but computing alone, PyTorch's PowerSGD hook and sleeping ranks.

    Ranks that sleep do not share cores while they compute, and the model has one rule for both.

    Codecs are timed here, one exchange after the other; at the deadline the cases so far are returned.

    The timeline is that of the unlimited (or fastest) cell of the same model and hosts: a user profiles once, not once
    a bandwidth.

    Raises:
        RunError: no timeline was measured for some model and number of hosts, or one is damaged.
    """
    rows = [row for row in rows if compute_of(row) == "real"]
    timelines: dict[tuple[str, int], Timeline] = {}
    for row in sorted(rows, key=lambda r: r["bandwidth_bits_per_s"] or float("inf")):
        if row["variant"] == COMPUTE and row.get("timeline"):
            timelines[row["model"], row["hosts"]] = _timeline(row)
    exchanges: dict[tuple[str, int, str], ExchangeProfile] = {}
    cases = []
    for row in rows:
        variant = row["variant"]
        spec = OWN.get(variant) or variant.partition(" ")[2]
        if variant in (COMPUTE, "ddp powersgd") or spec == "auto":
            continue
        key = row["model"], row["hosts"], variant
        timeline = timelines.get(key[:2])
        if timeline is None:
            raise RunError(f"no step without an exchange was measured for {row['model']} on {row['hosts']} hosts")
        if key not in exchanges:
            if deadline is not None and deadline.passed:
                break
            say(f"rehearsing {row['model']}, {row['hosts']} hosts, {variant}")
            exchanges[key] = _exchange(row["model"], row["hosts"], spec, variant, timeline)
        topology = Topology.parse(row["lab"]) if "bandwidth" in row["lab"] else Topology(hosts=row["hosts"])
        rate = topology.bandwidth
        cases.append(
            Case(
                row,
                Observation(
                    timeline,
                    exchanges[key],
                    LinkModel(bandwidth_bytes_per_s=rate / 8 if rate else None, latency_s=topology.delay_s),
                    Load(ranks=row["hosts"], cores=row["cores"]),
                    row["step_time_s"],
                ),
            )
        )
    return cases


def _timeline(row: Row) -> Timeline:
    try:
        return Timeline.from_json(row["timeline"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"the timeline of {row['model']} on {row['hosts']} hosts cannot be read ({type(error).__name__}: {error}):"
            " measure that cell again"
        ) from None


def _exchange(model: str, hosts: int, spec: str, variant: str, timeline: Timeline) -> ExchangeProfile:
    with torch.device("meta"):
        module = bench_model(model).make()
    found = exchange_of(spec, dict(module.named_parameters()), timeline.buckets, hosts)
    return nothing_but_the_sum(found) if variant == "ddp fp32" else found


def split(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases of every third cell (model, hosts, bandwidth, in that order), and all others."""
    listed = list(cases)
    cells = sorted({c.cell for c in listed}, key=lambda cell: _order(cell, listed))
    chosen = set(cells[::3])
    return [c for c in listed if c.cell in chosen], [c for c in listed if c.cell not in chosen]


def _order(cell: tuple[str, str], cases: Sequence[Case]) -> tuple[str, int, float]:
    row = next(c.row for c in cases if c.cell == cell)
    return row["model"], row["hosts"], row["bandwidth_bits_per_s"] or float("inf")


def judge(rows: Sequence[Row], say: Callable[[str], None] = lambda text: None) -> tuple[Machine, list[Row]]:
    """Calibrate on a third of the cells; give the machine, and a row of measured and predicted for each case."""
    cases = cases_of(rows, say)
    chosen, _ = split(cases)
    cells = {c.cell for c in chosen}
    machine = calibrate([c.observation for c in chosen], f"{len(chosen)} measured steps of {len(cells)} cells")
    found = []
    for case in cases:
        predicted = case.observation.predict(machine)
        row = case.row
        found.append(
            {
                "model": row["model"],
                "hosts": row["hosts"],
                "bandwidth_bits_per_s": row["bandwidth_bits_per_s"],
                "variant": row["variant"],
                "measured_s": row["step_time_s"],
                "predicted_s": predicted,
                "relative_error": predicted / row["step_time_s"] - 1,
                "role": "calibration" if case.cell in cells else "judged",
            }
        )
    return machine, found
