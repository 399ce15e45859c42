"""This machine's calibration: short measured steps on loopback, and the costs that explain them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gradwire as gw
from gradwire.model.calibrate import calibrate
from gradwire.model.machine import DEFAULT, Machine
from gradwire.tools.bench.deadline import Deadline
from gradwire.tools.bench.predict import cases_of
from gradwire.tools.bench.step import StepGrid, measure_grid, read_rows
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.lab import Topology

__all__ = ["LIMIT_S", "default_path", "machine_of_rows", "measure_machine"]

MODELS = ("lenet", "mlp", "transformer")
HOSTS = (2, 4)
VARIANTS = ("compute", "ddp fp32", "gradwire bf16", "gradwire terngrad")
BUDGET_S = 0.8
LIMIT_S = 60.0
STEPS_SHARE, CODECS_SHARE = 0.7, 0.85
"""Of the time, until when steps are taken, and until when codecs are timed; the rest is for the fit."""


def default_path() -> Path:
    """Return where a machine's calibration is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gradwire" / "calibration.json"


def measure_machine(
    path: Path,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Machine:
    """Take steps with two and four local workers, fit the costs to them, and keep the costs, alone, in ``path``.

    Loopback has no slow link, so the efficiencies of links stay at their defaults' values where it cannot tell.

    What is not measured in the time that it may take is left out: with few steps, the costs are drawn towards the
    defaults; with none, they are the defaults, and ``path`` stays as it is. ``source`` of the result says so.

    Args:
        path: Where the costs are kept.
        say: Called with a line for each row, and where time ran out.
        limit_s: Seconds that all of it may take, but the compilation of kernels, which is needed once a machine.
        clock: Returns seconds.
    """
    grid = StepGrid(
        models=MODELS,
        topologies=[Topology(hosts=n) for n in HOSTS],
        variants=VARIANTS,
        budget_s=BUDGET_S,
        loopback=True,
    )
    compiled_s = gw.warm_up("terngrad")
    if compiled_s > 0.5:
        say(f"compiled kernels, once per machine: {compiled_s:.1f} s")
    steps, codecs, fit = (Deadline(share * limit_s, clock) for share in (STEPS_SHARE, CODECS_SHARE, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_grid(grid, Path(folder) / "rows.jsonl", say, steps)
    observations = [case.observation for case in cases_of(rows, deadline=codecs)]
    wanted = len(MODELS) * len(HOSTS) * (len(VARIANTS) - 1)
    count = f"{len(observations)} steps on loopback"
    if len(observations) < wanted:
        count = f"{len(observations)} of {wanted} steps on loopback, in the {limit_s:g} s allowed"
        say(f"{count}: give more with --calibration-limit, or calibrate anew on an idle machine with --calibrate")
    if not observations:
        return replace(DEFAULT, source=f"defaults: no step was measured in the {limit_s:g} s allowed")
    machine = calibrate(observations, count, fit_links=False, few=True, stop=lambda: fit.passed)
    machine.save(path)
    return machine


def machine_of_rows(path: Path) -> Machine:
    """Fit the costs to the rows of ``gradwire bench step``: all of them.

    Raises:
        UsageError: there is no such file.
        HyperparameterError: it holds too few steps.
    """
    if not path.is_file():
        raise UsageError(f"calibration {path} does not exist: measure rows with gradwire bench step --out {path}")
    observations = [case.observation for case in cases_of(read_rows(path))]
    return calibrate(observations, f"{len(observations)} steps of {path.name}")
