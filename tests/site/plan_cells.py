"""Cells that ``gradwire plan`` and the calculator of the site are both asked for.

Codecs take as long as the committed numbers say, since a measured codec takes another time in every run. All else is
the command's own: bytes, messages and rounds are those of real plans of the same buckets.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.exchange.drivers import Stage
from gradwire.exchange.planning import Planner
from gradwire.methods.spec import method as read_method
from gradwire.model import cycle
from gradwire.model import exchange_profile as exchange
from gradwire.model.machine import Machine
from gradwire.tools.cli import plan_command
from gradwire.tools.cli.app import app

ROOT = Path(__file__).parents[2]
DATA = json.loads((ROOT / "benchmarks" / "results" / "pages" / "calculator.json").read_text())

QUESTIONS = [
    # parameters, seconds, micro-batches, hosts, workers a host, cores of a host, delay in ms, loss in %, bandwidths
    # Two buckets that are exchanged as one. Both are of whole blocks: the page does not know how parameters end.
    (299_008, 0.012, 1, (2, 7), 1, None, 0.0, 0.0, ("1mbit", "50mbit", "100gbit")),
    (2_500_000, 0.08, 4, (2, 4), 1, 4, 2.0, 0.0, ("10mbit", "100mbit", "1gbit")),
    (9_000_000, 0.35, 1, (4,), 1, None, 0.3, 0.0, ("20mbit", "300mbit", "2gbit", "40gbit", "unlimited")),
    (2_500_000, 0.05, 2, (2, 8), 4, 2, 0.0, 0.0, ("100mbit", "5gbit")),
    (9_000_000, 0.1, 1, (2, 8), 1, None, 20.0, 0.1, ("100mbit", "unlimited")),
    (2_500_000, 0.05, 1, (1,), 4, None, 20.0, 0.1, ("1gbit",)),
]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place, as the page takes it and as the command answers."""

    parameters: int
    buckets: int
    compute_s: float
    micro_batches: int
    hosts: int
    ranks_per_host: int
    cores: int | None
    latency_s: float
    loss: float
    bytes_per_s: float | None
    rows: list[dict[str, Any]]
    reason: str

    @property
    def workers(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host


def between(values: list[float], numel: int) -> float:
    """Return what a stage takes, on straight lines through its committed seconds."""
    lengths = DATA["constants"]["lengths"]
    i = max(0, next((k for k, length in enumerate(lengths) if length >= numel), len(lengths) - 1) - 1)
    slope = (values[i + 1] - values[i]) / (lengths[i + 1] - lengths[i])
    return max(0.0, values[i] + slope * (numel - lengths[i]))


def seconds_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs take the committed seconds in this process's ``plan``, and open coders be those that were chosen."""
    methods = {repr(read_method(known["spec"])): known for known in DATA["methods"]}
    found: dict[tuple[str, int, int], tuple[list[Stage], list[list[Stage]]]] = {}
    jobs_of, profile_locally = exchange.jobs_of, exchange.profile_locally
    chunk_numel = DATA["constants"]["chunk_numel"]
    planned: list[str] = []

    def timed(stages: Sequence[Stage], lines: list[dict[str, Any]], numel: int) -> list[Stage]:
        return [
            dataclasses.replace(stage, work_s=between(line["work_s"], numel))
            for stage, line in zip(stages, lines, strict=True)
        ]

    def jobs_as_committed(planner: Any, buckets: Any, workers: int, repeats: int, _: Any = None) -> Any:
        planned[:] = [repr(planner.method)]
        return jobs_of(planner, buckets, workers, 1)

    def stages_as_committed(plan: Any, flat: Any, workers: int, repeats: int, **others: Any) -> Any:
        (spec,), numel = planned, flat.numel()
        known = methods[spec]["workers"][str(workers)]
        key = (spec, numel, workers)
        if key not in found:
            prepare, chunks = profile_locally(plan, flat, workers, 1, **others)
            lengths = [min(chunk_numel, numel - i * chunk_numel) for i in range(len(chunks))]
            found[key] = (
                timed(prepare, known["prepare"], numel),
                [timed(chunk, known["chunk"], length) for chunk, length in zip(chunks, lengths, strict=True)],
            )
        return found[key]

    def own_work(method: Any, numel: int, workers: int, repeats: int) -> float:
        return methods[repr(method)]["local"]["own_s_per_element"] * numel

    # Each question is asked for its rows and for its sentences.
    forecast, made = plan_command.forecast, dict[str, Any]()

    def forecast_once(*asked: Any, **others: Any) -> Any:
        key = repr(asked)
        if key not in made:
            made[key] = forecast(*asked, **others)
        return made[key]

    monkeypatch.setattr(plan_command, "forecast", forecast_once)
    # A plan takes the one that is faster on its machine.
    coders = {known["coder"]: 0.0 for known in DATA["methods"] if known["coder"]}
    monkeypatch.setattr(Planner, "measure_coders", lambda planner: coders)
    monkeypatch.setattr(exchange, "profile_locally", stages_as_committed)
    monkeypatch.setattr(exchange, "jobs_of", jobs_as_committed)
    monkeypatch.setattr(cycle, "jobs_of", jobs_as_committed)
    monkeypatch.setattr(cycle, "_own_work", own_work)


def cells(folder: Path, profile_of: Any) -> list[Cell]:
    """Ask ``gradwire plan`` for all cells.

    Args:
        profile_of: Gives a profile as the page makes it, from its parameters, seconds and micro-batches.
    """
    calibration = folder / "calibration.json"
    Machine(**DATA["machine"]).save(calibration)
    answers = []
    for number, question in enumerate(QUESTIONS):
        parameters, compute_s, micro_batches, hosts, ranks, cores, delay_ms, lost, bandwidths = question
        profile = folder / f"profile{number}.json"
        asked = profile_of(parameters, compute_s, micro_batches)
        profile.write_text(json.dumps(asked))
        words: list[Any] = ["plan", "--profile", profile, "--calibration", calibration, "--gpus-per-host", ranks]
        words += [] if cores is None else ["--cores", cores]
        words += ["--delay", f"{delay_ms}ms", "--loss", f"{lost}%", "--congestion", "cubic"]
        words += [w for count in hosts for w in ("--hosts", count)]
        words += [w for rate in bandwidths for w in ("--bandwidth", rate)]
        words += [w for known in DATA["methods"][1:] for w in ("--method", known["spec"])]
        told, shown = (CliRunner().invoke(app, [str(w) for w in words + more]) for more in (["--json"], []))
        assert told.exit_code == shown.exit_code == 0, told.output
        rows = json.loads(told.stdout)
        places = [(count, rate) for rate in bandwidths for count in hosts]
        reasons = [line.split(": ", 1)[1] for line in shown.stdout.splitlines() if " workers, " in line]
        count = len(DATA["methods"])
        assert len(rows) == count * len(places) == count * len(reasons)
        for place, ((host_count, _), reason) in enumerate(zip(places, reasons)):
            own = rows[place * count : (place + 1) * count]
            rate = own[0]["bandwidth_bits_per_s"]
            answers.append(
                Cell(
                    parameters=parameters,
                    buckets=len(asked["timeline"]["buckets"]),
                    compute_s=compute_s,
                    micro_batches=micro_batches,
                    hosts=host_count,
                    ranks_per_host=ranks,
                    cores=cores,
                    latency_s=delay_ms / 1e3,
                    loss=lost / 100,
                    bytes_per_s=None if rate is None else rate / 8,
                    rows=own,
                    reason=reason,
                )
            )
    return answers
