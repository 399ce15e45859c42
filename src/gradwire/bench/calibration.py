"""This machine's calibration: short measured steps on loopback, and the costs that explain them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from gradwire.bench.predict import cases_of
from gradwire.bench.step import StepGrid, measure_grid, read_rows
from gradwire.experiments.errors import UsageError
from gradwire.lab import Topology
from gradwire.model.calibrate import calibrate
from gradwire.model.machine import Machine

__all__ = ["default_path", "machine_of_rows", "measure_machine"]

MODELS = ("lenet", "mlp", "transformer")
HOSTS = (2, 4)
VARIANTS = ("compute", "ddp fp32", "gradwire bf16", "gradwire terngrad")
BUDGET_S = 0.8


def default_path() -> Path:
    """Where a machine's calibration is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gradwire" / "calibration.json"


def measure_machine(path: Path, say: Callable[[str], None]) -> Machine:
    """Take steps with two and four local workers, fit the costs to them, and keep the costs, alone, in ``path``.

    Loopback has no slow link, so the efficiencies of links stay at their defaults' values where it cannot tell.
    """
    grid = StepGrid(
        models=MODELS,
        topologies=[Topology(hosts=n) for n in HOSTS],
        variants=VARIANTS,
        budget_s=BUDGET_S,
        loopback=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_grid(grid, Path(folder) / "rows.jsonl", say)
    observations = [case.observation for case in cases_of(rows)]
    machine = calibrate(observations, f"{len(observations)} steps on loopback", fit_links=False)
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
