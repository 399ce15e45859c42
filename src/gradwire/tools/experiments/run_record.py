"""The run record: settings, versions and hardware; also who is told about a run, and how many workers can start."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.folder import RECORD, make_new_folder
from gradwire.tools.experiments.train import Row

MEMBERSHIP = "membership"
"""Field of a run's record with the coordinator's address, if workers came and went."""

WORKER_BYTES = 300_000_000
"""Least memory of a worker: Python, torch and a small model."""

WORKERS_PER_CORE = 64
DESCRIPTORS_PER_WORKER = 16
"""Most sockets that a worker opens to each other worker, and some to spare."""

THREADS_PER_WORKER = 12


def _fields(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def available_bytes() -> int | None:
    """Return the memory that is free for new processes; None if unknown."""
    found = _fields("/proc/meminfo").get("MemAvailable", "").split()
    return int(found[0]) * 1024 if found else None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_threads() -> int | None:
    """Return how many threads the container may still start; None without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/pids.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/pids.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used


def check_workers(workers: int) -> None:
    """Refuse more workers than the machine can start; raises UsageError."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory, threads = available_bytes(), free_threads()
    limits = {
        f"{cores()} cores": cores() * WORKERS_PER_CORE,
        f"{(memory or 0) / 1e9:.1f} GB of free memory": memory // WORKER_BYTES if memory is not None else workers,
        f"{files} open files a process": files // DESCRIPTORS_PER_WORKER,
        f"{threads} free threads": threads // THREADS_PER_WORKER if threads is not None else workers,
    }
    reason, most = min(limits.items(), key=lambda item: item[1])
    if workers > most:
        raise UsageError(
            f"{workers} workers are more than this machine can start: {reason} allow {most}; "
            "use fewer, or --simulate, which plays any number in one process"
        )


def hardware() -> dict[str, Any]:
    """Describe the machine for the run record."""
    memory = _fields("/proc/meminfo").get("MemTotal", "").split()
    return {
        "processor": _fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": int(memory[0]) * 1024 if memory else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("gradwire", "torch", "numpy", "numba"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class Audience(Protocol):
    """Receiver of a run's progress; the command line draws it, tests collect it."""

    def say(self, sentence: str) -> None:
        """Receive a sentence."""

    def start(self, plan: RunConfig) -> None:
        """Receive the settings of a run that begins now."""

    def row(self, row: Row) -> None:
        """Receive a row of metrics."""

    def step(self, step: int, activity: str) -> None:
        """Receive the number of steps done and the current activity, at most twice a second."""

    def logs(self, logs: Mapping[int, str]) -> None:
        """Receive the output of a failed run's workers by rank."""


def default_folder(plan: RunConfig) -> Path:
    """Make a new folder that is named after task, method and time; runs that begin together get one each.

    Raises:
        RunError: it cannot be made.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return make_new_folder(Path("runs") / f"{plan.task.name}-{slug(plan.method)}-{stamp}")


def slug(spec: str) -> str:
    """Return a spec as a file name.

    Example:
        >>> slug("TernGrad(clip=2.5)")
        'terngrad-clip-2.5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", spec.lower()).strip("-")


def config_of(plan: RunConfig) -> dict[str, Any]:
    """Return the run record, as far as it is known before the link is built."""
    method = gw.method(plan.method)
    return {
        "gradwire_run": RECORD,
        "method": repr(method),
        "with_feedback": _with_feedback(method),
        "local_steps": method.traits.local_steps,
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
    """Return the spec of ``method`` with error feedback; None if it needs none or cannot have it."""
    if method.traits.unbiased or method.traits.remembers or method.traits.direction:
        return None
    try:
        return repr(gw.ErrorFeedback(compressor=method))
    except gw.HyperparameterError:
        return None


def report(runs: Sequence[Path], folder: Path) -> Path:
    """Write ``report.html`` into ``folder``."""
    from gradwire.tools.report import write_report

    return write_report(runs, folder / "report.html")
