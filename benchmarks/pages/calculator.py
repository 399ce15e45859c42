"""The performance model's numbers for the calculator of the site: bytes, messages and codec seconds of each method.

    python benchmarks/pages/calculator.py

A codec is timed on this machine at a few lengths for each number of workers, the fastest of some rounds, so that other
work on the machine counts little; bytes come from the methods' own code at the same lengths. Between them, and beyond
the last, both are taken to be straight lines. The costs of collectives are those that ``benchmarks/speed/predictions.py``
fitted to measured steps. Writes ``benchmarks/results/pages/calculator.json``, which ``docs/calculator.md`` holds when the
site is built.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import RESULTS
from gradwire.exchange.drivers import LocalProfiler, Stage
from gradwire.exchange.drivers.traffic import LARGE_BYTES
from gradwire.exchange.ops import Op
from gradwire.exchange.planning import CHUNK_NUMEL, Options, Planner, exchanged
from gradwire.exchange.planning.planner import JOINED_NUMEL
from gradwire.methods.spec import method as read_method
from gradwire.model.cycle import cycle_of
from gradwire.model.forecast import NOTHING, SIGMAS, WORTH, Loss, loss_of, why_apart
from gradwire.model.machine import FAR, Machine
from gradwire.tools.experiments.run_record import hardware, versions

OUT = RESULTS / "pages/calculator.json"

local_profiler = import_module("gradwire.exchange.drivers.dry_run")
"""The module: as an attribute of its package, the name is that of a function."""

METHODS = (
    "fp16",
    "bf16",
    "terngrad",
    "coded",
    "eden",
    "drive",
    "qsgd",
    "signsgd",
    "diloco",
    "DiLoCo(every=30, inner=EDEN(bits=4))",
)
"""Whose bytes do not depend on the shapes of the parameters."""

WORKERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
LENGTHS = (1 << 15, 1 << 18, 1 << 22)
"""Elements at which codecs are timed: a small model's, DDP's first bucket, and most of a later one."""


def planner_of(spec: str, numel: int, workers: int) -> Planner:
    """Return the planner of one vector."""
    chosen, options = read_method(spec), Options()
    parameters: Any = {"w": torch.empty(numel, device="meta")}
    if chosen.traits.local_steps:
        parameters, options = exchanged(chosen, parameters, options)
    return Planner(chosen, parameters, workers, options)


def coder_of(spec: str) -> str | None:
    """Return the coder that is chosen for an open one, or None if there is none to choose."""
    planner = planner_of(spec, LENGTHS[0], WORKERS[0])
    planner.plan(("w",), 0)
    return planner.coder if planner.open_coders else None


@contextmanager
def rows_seen(rows: list[int]) -> Iterator[None]:
    """Note the bytes of each operation's row, by which its kind is decided."""
    original = local_profiler.large

    def large(op: Op) -> bool:
        value = getattr(op, "value", None)
        row = value if value is not None else op.send[0] if type(op).__name__ == "AllToAll" else op.send  # type: ignore[union-attr]
        rows.append(row.numel() * row.element_size())
        return bool(original(op))

    local_profiler.large = large  # type: ignore[attr-defined]
    try:
        yield
    finally:
        local_profiler.large = original  # type: ignore[attr-defined]


def play(spec: str, numel: int, workers: int, rounds: int) -> tuple[bool, list[list[tuple[Stage, int]]]]:
    """Return whether no lane takes part, and the stages of preparation and chunk with the bytes of their rows."""
    planner = planner_of(spec, numel, workers)
    planner.compile()
    plan = planner.plan(("w",), 0)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    profiler = LocalProfiler(plan, flat, workers)
    rows: list[int] = []
    with rows_seen(rows):
        first = profiler.play()
    runs = [profiler.play() for _ in range(rounds)]
    seen = iter(rows)
    jobs = []
    for number, job in enumerate(first):
        stages = []
        for place, stage in enumerate(job):
            work_s = min(run[number][place].work_s for run in runs)
            row = next(seen) if stage.kind not in ("", "ring") else 0
            stages.append((replace(stage, work_s=work_s), row))
        jobs.append(stages)
    assert len(jobs) == 2, f"{spec}: {numel} elements are more than one chunk"
    return plan.asynchronous, jobs


def stage_of(found: Sequence[tuple[Stage, int]], workers: int) -> dict[str, Any]:
    """Return one stage's numbers at each of the lengths."""
    first, _ = found[0]
    assert all((stage.kind == "") == (first.kind == "") for stage, _ in found)
    work_s = [stage.work_s for stage, _ in found]
    if not first.kind:
        return {"work_s": work_s}
    # Of large rows it is not told which operation sends them; all that are small take as many messages.
    told = first.messages // (workers - 1) - 1 if first.kind != "ring" else 0
    # The page counts delays by the same rule, and those of a ring by its bytes.
    assert first.kind == "ring" or all(stage.delays == 1 for stage, _ in found)
    return {
        "work_s": work_s,
        "kind": "all_gather" if first.kind == "pairs" else first.kind,
        "lengths": told,
        "sent_bytes": [stage.sent_bytes for stage, _ in found],
        "row_bytes": [row for _, row in found],
    }


def coefficients(spec: str, workers: int, rounds: int) -> dict[str, Any]:
    """Return a method's stages for a number of workers."""
    played = [play(spec, numel, workers, rounds) for numel in LENGTHS]
    prepare, chunk = (
        [stage_of(found, workers) for found in zip(*(jobs[part] for _, jobs in played), strict=True)] for part in (0, 1)
    )
    # Encoded once for their owners and once for all, shares are of whole blocks.
    twice = sum(stage.get("kind", "ring") != "ring" for stage in chunk) > 1
    return {"asynchronous": played[0][0], "shares": workers if twice else 1, "prepare": prepare, "chunk": chunk}


def method_of(spec: str, rounds: int) -> dict[str, Any]:
    """Return all that is known of a method."""
    chosen = read_method(spec)
    sent = chosen.inner if chosen.traits.local_steps else chosen
    found: dict[str, Any] = {
        "spec": spec,
        # Whether a link exchanges the buckets of a model with few enough elements as one.
        "joins": planner_of(spec, LENGTHS[0], WORKERS[0]).joins_buckets,
        "apart": why_apart(spec) if spec != "fp32" else None,
        "block_size": getattr(sent, "block_size", 1),
        "local": None,
        # The fastest in this process, which decides how many bytes there are.
        "coder": coder_of(spec),
    }
    if chosen.traits.local_steps:
        cycle = cycle_of(spec, {"w": torch.empty(LENGTHS[-1], device="meta")}, 4, repeats=rounds)
        own = sum(f.own_s for f in cycle.fragments) / LENGTHS[-1]
        found["local"] = {"every": cycle.every, "delay": cycle.delay, "own_s_per_element": own}
        assert len(cycle.fragments) == 1, "one fragment at a time is what the page knows"
    found["workers"] = {}
    for workers in WORKERS:
        found["workers"][workers] = coefficients(spec, workers, rounds)
        print(f"{spec}, {workers} workers", file=sys.stderr, flush=True)
    return found


def rounded(value: Any) -> Any:
    """Return numbers of six significant digits: no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def main(words: Sequence[str] | None = None) -> None:
    """Time, count and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--rounds", type=int, default=7, help="of each codec; the fastest counts")
    arguments = parser.parse_args(words)
    predictions = json.loads((RESULTS / "speed/predictions.json").read_text())
    record = {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **hardware(),
        "versions": versions(),
        "machine": asdict(Machine(**predictions["machine"])),
        "constants": {
            "lengths": list(LENGTHS),
            "chunk_numel": CHUNK_NUMEL,
            "large_bytes": LARGE_BYTES,
            "joined_numel": JOINED_NUMEL,
            "far": FAR,
            "sigmas": SIGMAS,
            "worth": WORTH,
            "nothing": NOTHING,
            "lossless": [spec for spec in (NOTHING, "fp32", *METHODS) if loss_of(spec) is Loss.NONE],
            "casts": [spec for spec in METHODS if loss_of(spec) is Loss.CAST],
        },
        "methods": [method_of(spec, arguments.rounds) for spec in ("fp32", *METHODS)],
    }
    record["methods"] = rounded(record["methods"])
    arguments.json.write_text(json.dumps(record, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
