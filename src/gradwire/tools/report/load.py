"""Read run folders, and check the form of their records and rows."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError


class ReportError(GradwireError):
    """A run folder is missing, incomplete or corrupt; the message names the file and the line."""


class NotBegunError(ReportError):
    """A run has no row of metrics yet, or a comparison no run."""


RECORD = 1
"""Version of ``config.json`` that this module reads, under "gradwire_run"."""

MOST_WHOLE, MOST_SEED = 1 << 63, 1 << 1024
"""Bounds of whole numbers, and of seeds, which have as many bits as a link takes."""

TUNED = frozenset({"lr", "momentum", "optimizer", "schedule"})
"""Settings of a task that may differ in a comparison, since each method needs its own."""

SHOWN_OTHERWISE = frozenset({"settings", "task", "method", "workers", "simulate", "seed", "lab"})
"""Fields of a plan that labels show in another way."""

Form = Callable[[Any], bool]


def read_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or holds strings that are not Unicode.
    """
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _below(most: int) -> Form:
    """Return a form that accepts whole numbers from 0 on, but no booleans."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most


_whole, _seed = _below(MOST_WHOLE), _below(MOST_SEED)


def _number(value: Any) -> bool:
    """Accept numbers, including the infinity and NaN of a diverging training, but no booleans and no huge numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not MOST_WHOLE < abs(value) < math.inf


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _anything(value: Any) -> bool:
    return True


def _or_none(form: Form) -> Form:
    return lambda value: value is None or form(value)


def _mapping(form: Form) -> Form:
    return lambda value: isinstance(value, dict) and all(map(form, value.values()))


def _listed(form: Form) -> Form:
    return lambda value: isinstance(value, list) and all(map(form, value))


def _record(needed: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    return lambda value: isinstance(value, dict) and not _wrong(value, needed, optional or {})


def _wrong(value: Mapping[str, Any], needed: Mapping[str, Form], optional: Mapping[str, Form]) -> list[str]:
    """Return the fields that are missing or have a wrong form."""
    wrong = [name for name, form in needed.items() if name not in value or not form(value[name])]
    return wrong + [name for name, form in optional.items() if name in value and not form(value[name])]


CHOICE = _record(
    {},
    {
        "chosen": _or_none(_text),
        "reason": _or_none(_text),
        "step_s": _or_none(_mapping(_finite)),
        "left_out": _or_none(_mapping(_text)),
        "note": _or_none(_text),
    },
)

CODER = _record({"chosen": _text, "reason": _text}, {"encode_decode_s": _or_none(_mapping(_finite))})

FALLBACK = _record({"method": _text, "since_round": _whole, "rank": _whole, "relative_error": _number})

LINK = _record({}, {"choice": _or_none(CHOICE), "coder": _or_none(CODER), "fallback": _or_none(FALLBACK)})

CONFIG: dict[str, Form] = {
    "method": _text,
    "task": _text,
    "seed": _seed,
    "world_size": _whole,
    "simulated": _flag,
    "versions": _mapping(_anything),
    "hardware": _mapping(_anything),
    "started": _text,
    "plan": _record({}, {"log_every": _whole, "settings": _record({}, {"steps": _or_none(_whole)})}),
}

OPTIONAL_CONFIG: dict[str, Form] = {
    "name": _or_none(_text),
    "with_feedback": _or_none(_text),
    "evaluated_on": _or_none(_text),
    "lab": _or_none(_text),
    "interfaces": _or_none(_listed(_record({"sent_payload_bytes": _whole}))),
    "link": _or_none(LINK),
    "local_steps": _or_none(_whole),
    "membership": _or_none(_text),
}

ROW: dict[str, Form] = {
    "step": _whole,
    "event": _text,
    "loss": _number,
    "accuracy": _or_none(_number),
    "step_time_s": _or_none(_finite),
    "elapsed_s": _finite,
    "sent_bytes": _whole,
    "received_bytes": _whole,
    "dense_bytes": _whole,
    "bits_per_element": _or_none(_number),
}

OF_EVENT: dict[str, dict[str, Form]] = {"eval": {"accuracy": _finite}, "train": {"step_time_s": _finite}}
"""Fields with a stricter form in rows of some events."""

GAUGES = _mapping(_record({"mean": _number, "deviation": _number}))


def checked_config(path: Path, config: Any) -> dict[str, Any]:
    """Return the record of a run, if it has the right form.

    Raises:
        ReportError: fields are missing or wrong; the message names the file and the fields.
    """
    missing = [name for name in CONFIG if not isinstance(config, dict) or name not in config]
    if missing:
        raise ReportError(f"{path} is not a run's record: it lacks {', '.join(missing)}")
    if config.get("gradwire_run", RECORD) != RECORD:
        raise ReportError(f"{path} is the record of another version of gradwire: report with the version that wrote it")
    wrong = _wrong(config, CONFIG, OPTIONAL_CONFIG)
    if wrong:
        raise ReportError(f"{path} is not a run's record: {', '.join(wrong)} is wrong; restore the file from a copy")
    return config  # type: ignore[no-any-return]


def checked_row(where: str, row: Any) -> dict[str, Any]:
    """Return a row of metrics, if it has the right form.

    Raises:
        ReportError: a field is missing or wrong; the message names the line and the field.
    """
    if not isinstance(row, dict) or not GAUGES(row.get("gauges", {})):
        raise ReportError(f"{where} is not a row of metrics: gauges are wrong")
    wrong = _wrong(row, ROW, {}) or _wrong(row, OF_EVENT.get(row["event"], {}), {})
    if wrong:
        raise ReportError(f"{where} is not a row of metrics: {wrong[0]} is missing or wrong")
    return row


@dataclass(frozen=True)
class Run:
    """The record and the rows of a run folder.

    ``label`` names the run in tables and plots: its method as the user gave it, and the settings that differ from those
    of the other runs shown. ``notes`` are remarks for the reader, such as a truncated last row.
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
        """Names of the gauges of the run's method, in the order of their first rows."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.get("gauges", {})))

    def gauge(self, name: str) -> list[tuple[int, float, float]]:
        """Return step, mean and deviation from each row that holds a gauge."""
        rows = [(row["step"], row["gauges"][name]) for row in self.rows if name in row.get("gauges", {})]
        return [(step, found["mean"], found["deviation"]) for step, found in rows]

    @property
    def setting(self) -> tuple[Any, ...]:
        """The task and the workers, which two runs must share to be compared; see also :meth:`differing`."""
        config = self.config
        return config["task"], config["seed"], config["world_size"], config["simulated"], config.get("lab")

    @property
    def conditions(self) -> dict[str, Any]:
        """The task's settings by name, and for real workers the threads and the machine, on which times depend."""
        plan = self.config["plan"]
        found = dict(plan.get("settings", {}))
        if not self.config["simulated"]:
            known = {**self.config["hardware"], **plan}
            found |= {name: known[name] for name in ("threads", "processor", "cores") if name in known}
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The task's settings and those of the run and its link, by name."""
        plan = self.config["plan"]
        return {**plan.get("settings", {}), **{name: plan[name] for name in plan if name not in SHOWN_OTHERWISE}}

    def differing(self, other: Run) -> list[str]:
        """Return the names of the conditions that differ between two runs.

        A condition that one record lacks does not differ: an earlier version wrote that record.
        """
        mine, theirs = self.conditions, other.conditions
        return [name for name in mine if name in theirs and mine[name] != theirs[name]]

    @property
    def exchanges_seldom(self) -> bool:
        """Whether most steps exchange nothing, so that the median of their times holds no exchange."""
        return (self.config.get("local_steps") or 0) > 1

    @property
    def elastic(self) -> bool:
        """Whether workers could come and go, so that rows may begin late and each be of another number of workers."""
        return self.config.get("membership") is not None

    @property
    def early_end(self) -> str | None:
        """Text such as "ended after 20 of 500 steps"; None if the run took all its steps."""
        asked, done = self.config["plan"].get("settings", {}).get("steps"), self.rows[-1]["step"]
        return f"ended after {done} of {asked} steps" if asked and done < asked else None


def setting_text(name: str, value: Any) -> str:
    """Return a setting as text.

    Example:
        >>> setting_text("batch", 128), setting_text("weight_decay", 0.1), setting_text("data", None)
        ('batch 128', 'weight decay 0.1', 'no data')
    """
    name = name.replace("_", " ")
    if value is None or value is False:
        return f"no {name}"
    if isinstance(value, list):
        return f"{name} {' '.join(map(str, value))}" if value else f"no {name}"
    return name if value is True else f"{name} {value}"


def load_runs(folders: Iterable[Path], say: Callable[[str], None] = lambda sentence: None) -> list[Run]:
    """Load run folders, or all runs in the folder of a comparison, and give them distinct labels.

    A run without a row of metrics is left out if another run has one.

    Args:
        folders: The folders.
        say: Called with a sentence, without a full stop, for each run that is left out.

    Raises:
        ReportError: a folder is not a run, a file in it is corrupt, or no run has a row of metrics.
    """
    runs: list[Run] = []
    seen: set[Path] = set()
    left_out: dict[Path, NotBegunError] = {}
    for folder in folders:
        try:
            members = _members(Path(folder))
        except NotBegunError as error:
            left_out[Path(folder)] = error
            continue
        for path in members:
            try:
                if (resolved := path.resolve()) not in seen:
                    runs.append(_load(path))
                    seen.add(resolved)
            except NotBegunError as error:
                left_out[path] = error
    if not runs:
        raise next(iter(left_out.values()), ReportError("no run folder was given"))
    for path in left_out:
        say(f"{path} is left out: it has no row of metrics yet")
    return _distinct(runs)


def _members(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; give run folders, such as runs/digits-terngrad-...")
    if (folder / "config.json").exists() or not (folder / "compare.json").exists():
        return [folder]
    members = [path.parent for path in folder.glob("*/config.json")]
    if not members:
        raise NotBegunError(f"{folder} is a comparison in which no run has begun")
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
    except FileNotFoundError:
        raise NotBegunError(f"{path} does not exist; has the run begun?") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    rows, notes = [], []
    *whole, rest = lines
    for number, line in enumerate(whole, 1):
        rows.append(_row(path, number, line))
    if rest:
        notes.append(f"the last row of {path.name} was cut off and is left out: the run was ended while writing")
    if not rows:
        raise NotBegunError(f"{path} holds no whole row")
    run = Run(folder, config, tuple(rows), str(config.get("name") or config["method"]))
    if run.early_end is not None:
        notes.append(f"the run {run.early_end}")
    return replace(run, notes=tuple(notes))


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        row = read_json(line)
    except ValueError as error:
        raise ReportError(f"{where} is corrupt: {error}") from error
    return checked_row(where, row)


def _distinct(runs: list[Run]) -> list[Run]:
    """Add what differs between runs to their labels, then to labels that are equal still: settings, then a number."""
    parts = []
    for name in ("task", "seed", "world_size", "simulated", "lab"):
        if len({run.config.get(name) for run in runs}) > 1:
            parts.append(name)
    labels = [", ".join([run.label, *(_extra(name, run.config.get(name)) for name in parts)]) for run in runs]
    options = [run.options for run in runs]
    # Under each label, the values of an option; a run without it does not differ in it.
    values: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for label, own in zip(labels, options):
        for name, value in own.items():
            values[label, name].add(str(value))
    labelled: list[Run] = []
    for run, label, own in zip(runs, labels, options):
        told = [name for name in own if len(values[label, name]) > 1]
        label = ", ".join([label, *(setting_text(name, own[name]) for name in told)])
        same = sum(other.label == label or other.label.startswith(f"{label} #") for other in labelled)
        labelled.append(replace(run, label=f"{label} #{same + 1}" if same else label))
    return labelled


def _extra(name: str, value: Any) -> str:
    if name == "simulated":
        return "simulated" if value else "real workers"
    if name == "lab":
        return str(value or "no lab")
    return str(value) if name == "task" else f"{value} workers" if name == "world_size" else f"{name} {value}"
