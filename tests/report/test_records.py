"""Run folders that somebody else wrote, or a disk has damaged: a report, or one line that names the file."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradwire.tools.cli.app import app
from gradwire.tools.report import ReportError, load_runs, panels
from gradwire.tools.report.load import read_json
from gradwire.tools.report.page import render

LINK = {
    "backend": "cpu",
    "choice": {"chosen": "bf16", "reason": "r", "step_s": {"bf16": 0.1}, "left_out": {"fp32": "slow"}},
    "coder": {"chosen": "rans", "reason": "r", "encode_decode_s": {"rans": 0.1}},
    "fallback": {"method": "BF16()", "since_round": 3, "rank": 1, "relative_error": 2.5},
}
EXTRA: dict[str, Any] = {"link": LINK, "lab": "hosts=2", "interfaces": [{"sent_payload_bytes": 5}], "gradwire_run": 1}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.sampled_from([10**30, -(10**400), 1e308, "\ud800", "\x00", "<b>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values within one."""
    found = [path] if path else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += places(inner, (*path, key))
    return found


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """Return a value with another one at a place, or without it where that is an ellipsis."""
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", gauges=("elements",), **EXTRA)


def read(folder: Path) -> tuple[Any, list[Any]]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "config.json").read_text()), [json.loads(row) for row in rows]


def told(folder: Path) -> str:
    """Return what is wrong with a folder; nothing where a page can be made of it."""
    try:
        page = render(load_runs([folder]))
    except ReportError as error:
        return str(error)
    return "" if page.encode() else "nothing was shown"


@given(data=st.data())
@settings(max_examples=300)
def test_any_record_of_a_run_is_shown_or_refused_with_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(panels, "progress_panels", lambda runs: [])
    monkeypatch.setattr(panels, "gauge_panels", lambda runs: [])
    config, _ = read(folder)
    path = data.draw(st.sampled_from(places(config)))
    try:
        (folder / "config.json").write_text(json.dumps(changed(config, path, data.draw(VALUES | st.just(...)))))
        problem = told(folder)
        assert not problem or str(folder / "config.json") in problem
    finally:
        (folder / "config.json").write_text(json.dumps(config))


@given(data=st.data())
@settings(max_examples=40)
def test_any_row_is_drawn_or_refused_with_its_line(folder: Path, data: st.DataObject) -> None:
    _, rows = read(folder)
    number = data.draw(st.integers(0, len(rows) - 1))
    path = data.draw(st.sampled_from(places(rows[number])))
    numbers = st.sampled_from([math.nan, math.inf, -math.inf, 0, -1, 1e300, 1e-300, 2**63, 2**63 - 1, 10**400])
    rows[number] = changed(rows[number], path, data.draw(numbers | VALUES | st.just(...)))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    before = (folder / "metrics.jsonl").read_text()
    try:
        (folder / "metrics.jsonl").write_text(text)
        problem = told(folder)
        assert not problem or f"line {number + 1} " in problem
    finally:
        (folder / "metrics.jsonl").write_text(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("method", 5), ("plan", []), ("plan", {"settings": 3}), ("task", None), ("world_size", "4"), ("link", 1)],
)
def test_the_command_tells_a_wrong_record_in_one_line(folder: Path, field: str, value: object) -> None:
    config, _ = read(folder)
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(folder / "page.html")])
    assert done.exit_code == 1, done.exception
    assert done.output.splitlines() == [
        f"gradwire: {folder / 'config.json'} is not a run's record: {field} is wrong; restore the file from a copy"
    ]


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 100_000, '"\\ud800"', b"\xff", "{", ""])
def test_a_text_that_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)


@pytest.mark.parametrize(("event", "field"), [("eval", "accuracy"), ("train", "step_time_s")])
def test_rows_hold_what_their_event_needs(folder: Path, event: str, field: str) -> None:
    _, rows = read(folder)
    number = next(i for i, row in enumerate(rows) if row["event"] == event)
    rows[number][field] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ReportError, match=f"line {number + 1} is not a row of metrics: {field} is missing or wrong"):
        load_runs([folder])
