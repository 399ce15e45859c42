"""What a run leaves behind, whoever starts its workers: its folder's name, its record and its report."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.folder import RECORD
from gradwire.tools.experiments.machine import hardware, versions
from gradwire.tools.experiments.train import Row

__all__ = ["Audience", "config_of", "default_folder", "report", "slug"]


class Audience(Protocol):
    """Who is told about progress; the command line draws it, tests collect it."""

    def say(self, sentence: str) -> None:
        """Take a sentence."""

    def start(self, plan: RunConfig) -> None:
        """Take the plan of a run that begins now."""

    def row(self, row: Row) -> None:
        """Take a row of metrics."""

    def step(self, step: int, activity: str) -> None:
        """Take the number of steps that are done, and what goes on now; twice a second at most."""

    def logs(self, logs: Mapping[int, str]) -> None:
        """Take what the workers of a failed run wrote, by rank."""


def default_folder(plan: RunConfig) -> Path:
    """Name a new run folder after task, method and time."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{plan.task.name}-{slug(plan.method)}-{stamp}"


def slug(spec: str) -> str:
    """Return a spec as a file name.

    Example:
        >>> slug("TernGrad(clip=2.5)")
        'terngrad-clip-2.5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", spec.lower()).strip("-")


def config_of(plan: RunConfig) -> dict[str, Any]:
    """Return the run record as far as it is known before the link is built."""
    method = gw.method(plan.method)
    return {
        "gradwire_run": RECORD,
        "method": repr(method),
        "with_feedback": _with_feedback(method),
        "name": plan.method,
        "task": plan.task.name,
        "seed": plan.seed,
        "world_size": plan.workers,
        "simulated": plan.simulate,
        "evaluated_on": plan.task.evaluated_on,
        "versions": versions(),
        "hardware": hardware(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "plan": plan.to_json(),
        "lab": plan.lab,
        "interfaces": None,
        "link": None,
    }


def _with_feedback(method: gw.Method) -> str | None:
    """Return the spec that keeps what ``method`` forgets, or None where it forgets nothing or cannot keep it."""
    if method.unbiased or method.remembers or method.direction:
        return None
    try:
        return repr(gw.ErrorFeedback(compressor=method))
    except gw.HyperparameterError:
        return None


def report(runs: Sequence[Path], folder: Path) -> Path:
    """Write ``report.html`` into ``folder``."""
    from gradwire.tools.report import write_report

    return write_report(runs, folder / "report.html")
