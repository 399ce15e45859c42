"""The form of what a run folder holds, checked as data from outside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradwire.tools.report.errors import ReportError

__all__ = ["checked_config", "checked_row", "read_json"]

RECORD = 1
"""Version of ``config.json`` that is understood, under "gradwire_run"."""

MOST_WHOLE = 1 << 63

Form = Callable[[Any], bool]


def read_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, is nested too deeply to be read, or holds text that is not Unicode.
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


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_WHOLE


def _number(value: Any) -> bool:
    """Accept infinity and NaN, which a training that diverges writes, but nothing that only looks like a number."""
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
    """Return the fields that are missing, or not of their form."""
    wrong = [name for name, form in needed.items() if name not in value or not form(value[name])]
    return wrong + [name for name, form in optional.items() if name in value and not form(value[name])]


CHOICE = _record(
    {},
    {
        "chosen": _or_none(_text),
        "reason": _or_none(_text),
        "step_s": _or_none(_mapping(_finite)),
        "left_out": _or_none(_mapping(_text)),
    },
)

CODER = _record({"chosen": _text, "reason": _text}, {"encode_decode_s": _or_none(_mapping(_finite))})

FALLBACK = _record({"method": _text, "since_round": _whole, "rank": _whole, "relative_error": _number})

LINK = _record({}, {"choice": _or_none(CHOICE), "coder": _or_none(CODER), "fallback": _or_none(FALLBACK)})

CONFIG: dict[str, Form] = {
    "method": _text,
    "task": _text,
    "seed": _whole,
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
"""What rows of some events hold beside."""

GAUGES = _mapping(_record({"mean": _number, "deviation": _number}))


def checked_config(path: Path, config: Any) -> dict[str, Any]:
    """Return a run's record that has the form of one.

    Raises:
        ReportError: it lacks fields, or some are not of their form; the message names the file and the fields.
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
    """Return a row of metrics that has the form of one.

    Raises:
        ReportError: a field is missing or not of its form; the message names the line and the field.
    """
    if not isinstance(row, dict) or not GAUGES(row.get("gauges", {})):
        raise ReportError(f"{where} is not a row of metrics: gauges are wrong")
    wrong = _wrong(row, ROW, {}) or _wrong(row, OF_EVENT.get(row["event"], {}), {})
    if wrong:
        raise ReportError(f"{where} is not a row of metrics: {wrong[0]} is missing or wrong")
    return row
