"""Reading run folders: strict about what is there, tolerant only of a last row that was cut off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.tools.report.errors import ReportError
from gradwire.tools.report.records import checked_config, checked_row, read_json

__all__ = ["ReportError", "Run", "load_runs"]


@dataclass(frozen=True)
class Run:
    """One run folder's record.

    ``label`` names the run in tables and plots: its method as it was asked for, and what else tells it from
    the other runs shown. ``notes`` holds what a reader should know, such as a last row that was cut off.
    """

    path: Path
    config: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    label: str
    notes: tuple[str, ...] = ()

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the rows of one event, "train" or "eval"."""
        return [row for row in self.rows if row["event"] == event]

    @property
    def gauges(self) -> tuple[str, ...]:
        """Names of the numbers that the run's method reported of its steps, in the order of their first rows."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.get("gauges", {})))

    def gauge(self, name: str) -> list[tuple[int, float, float]]:
        """Return the step, the mean and the deviation in each row that holds a gauge."""
        rows = [(row["step"], row["gauges"][name]) for row in self.rows if name in row.get("gauges", {})]
        return [(step, found["mean"], found["deviation"]) for step, found in rows]

    @property
    def setting(self) -> tuple[Any, ...]:
        """What two runs must share to be compared."""
        config = self.config
        return config["task"], config["seed"], config["world_size"], config["simulated"], config.get("lab")


def load_runs(folders: Iterable[Path]) -> list[Run]:
    """Load run folders; a comparison's folder stands for the runs in it. Labels are made distinct.

    Raises:
        ReportError: a folder is not a run, or a file in it is corrupt.
    """
    runs: list[Run] = []
    for folder in folders:
        for path in _members(Path(folder)):
            if path.resolve() not in [run.path.resolve() for run in runs]:
                runs.append(_load(path))
    if not runs:
        raise ReportError("no run folder was given")
    return _distinct(runs)


def _members(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; give run folders, such as runs/digits-terngrad-...")
    if (folder / "config.json").exists() or not (folder / "compare.json").exists():
        return [folder]
    members = [path.parent for path in folder.glob("*/config.json")]
    if not members:
        raise ReportError(f"{folder} is a comparison in which no run has begun")
    return sorted(members, key=lambda path: str(_read_config(path)["started"]))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = read_json(path.read_text())
    except FileNotFoundError:
        raise ReportError(f"{folder} is not a run folder: it holds no config.json") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} is corrupt: {error}") from error
    return checked_config(path, config)


def _load(folder: Path) -> Run:
    config = _read_config(folder)
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}; has the run begun?") from error
    rows, notes = [], []
    *whole, rest = lines
    for number, line in enumerate(whole, 1):
        rows.append(_row(path, number, line))
    if rest:
        notes.append(f"the last row of {path.name} was cut off and is left out: the run was ended while writing")
    if not rows:
        raise ReportError(f"{path} holds no whole row")
    asked = config["plan"].get("settings", {}).get("steps")
    if asked and rows[-1]["step"] < asked:
        notes.append(f"the run ended after {rows[-1]['step']} of {asked} steps")
    return Run(folder, config, tuple(rows), str(config.get("name") or config["method"]), tuple(notes))


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        row = read_json(line)
    except ValueError as error:
        raise ReportError(f"{where} is corrupt: {error}") from error
    return checked_row(where, row)


def _distinct(runs: list[Run]) -> list[Run]:
    """Add to labels what differs between the runs, then a number where nothing does."""
    parts = []
    for name in ("task", "seed", "world_size", "simulated", "lab"):
        if len({run.config.get(name) for run in runs}) > 1:
            parts.append(name)
    labelled: list[Run] = []
    for run in runs:
        extra = [_extra(name, run.config.get(name)) for name in parts]
        label = ", ".join([run.label, *extra])
        same = sum(other.label == label or other.label.startswith(f"{label} #") for other in labelled)
        label = f"{label} #{same + 1}" if same else label
        labelled.append(Run(run.path, run.config, run.rows, label, run.notes))
    return labelled


def _extra(name: str, value: Any) -> str:
    if name == "simulated":
        return "simulated" if value else "real workers"
    if name == "lab":
        return str(value or "no lab")
    return str(value) if name == "task" else f"{value} workers" if name == "world_size" else f"{name} {value}"
