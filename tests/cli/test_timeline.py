"""Timelines of a step: what lanes did and when, and where the link was idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from schema_help import fits, schema
from typer.testing import CliRunner, Result

from gradwire.exchange.drivers import Span, Trace
from gradwire.tools.bench.timeline import RankTrace, chrome_trace, earliest, summarise, union
from gradwire.tools.cli import bench_commands
from gradwire.tools.cli.app import app


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def step(begin: float, number: int = 0) -> list[Span]:
    """A step of 100 ms from ``begin``: rows from 20 to 50 and from 60 to 80, on two lanes that overlap."""

    def at(track: str, name: str, begin_ms: float, end_ms: float, detail: str = "") -> Span:
        return Span(track, name, begin + begin_ms / 1e3, begin + end_ms / 1e3, detail)

    return [
        at("compute", "forward", 0, 10, f"step {number}"),
        at("compute", "backward", 10, 90, f"step {number}"),
        at("compute", "update", 90, 100, f"step {number}"),
        at("lane 0", "encode", 12, 20),
        at("lane 0", "send rows", 20, 40),
        at("lane 0", "decode", 40, 45),
        at("lane 1", "encode", 15, 22),
        at("lane 1", "small message", 22, 25),
        at("lane 1", "wait for turn", 25, 35),
        at("lane 1", "send rows", 35, 50),
        at("lane 0", "send rows", 60, 80),
        at("lane 0", "decode", 80, 89),
    ]


def test_the_links_idle_times_are_those_between_rows() -> None:
    trace = RankTrace(3, [*step(5.0), *step(7.0, 1)], sent_bytes=1e6)
    rows = summarise([trace], 1e8)
    assert [(row["rank"], row["step"]) for row in rows] == [(3, 0), (3, 1)]
    expected = {
        "step_time_s": 0.1,
        "forward_s": 0.01,
        "before_rows_s": 0.01,
        "rows_s": 0.05,
        "between_rows_s": 0.01,
        "after_rows_s": 0.01,
        "update_s": 0.01,
        "encode_s": 0.015,
        "decode_s": 0.014,
        "wait_for_turn_s": 0.01,
        "small_messages_s": 0.003,
        "sent_bytes_per_step": 5e5,
        # 500 kB are 4 Mbit: 40 ms at 100 Mbit/s.
        "wire_floor_s": 0.04,
    }
    for row in rows:
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        parts = ("forward_s", "before_rows_s", "rows_s", "between_rows_s", "after_rows_s", "update_s")
        assert sum(row[part] for part in parts) == pytest.approx(row["step_time_s"])
        fits([row], schema("bench_timeline"))
        # All becomes ready before the end: without bytes in the spans, the step is what was computed.
        assert row["earliest_s"] == pytest.approx(0.012 + 0.01)
    assert summarise([trace], None)[0]["wire_floor_s"] is None
    assert summarise([trace], None)[0]["earliest_s"] is None


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [
        # 500 kB from 20 ms on take 80 ms at 50 Mbit/s, 300 kB of them from 80 ms on 48.
        (5e7, 128 + 10),
        (1e7, 20 + 400 + 10),
        (1e12, 80 + 10),
    ],
)
def test_a_step_ends_no_earlier_than_the_bytes_of_what_is_ready_last(bandwidth: float, expected: float) -> None:
    parts = {"forward": (5.0, 5.01), "backward": (5.01, 5.09), "update": (5.09, 5.1)}
    lanes = [
        Span("lane 1", "send rows", 5.09, 5.1, "bucket 1, chunk 0, AllToAll", 300_000),
        Span("lane 1", "encode", 5.08, 5.09, "bucket 1, chunk 0"),
        Span("lane 0", "encode", 5.02, 5.03, "bucket 0"),
        Span("lane 0", "small message", 5.03, 5.04, "bucket 0, AllGather", 20_000),
        Span("lane 0", "send rows", 5.04, 5.05, "bucket 0, chunk 0, AllToAll", 180_000),
    ]
    assert earliest(parts, lanes, bandwidth) == pytest.approx(expected / 1e3, rel=1e-4)


def test_a_step_without_large_rows_is_idle_from_forward_to_the_end_of_backward() -> None:
    spans = [s for s in step(0.0) if s.name != "send rows"]
    (row,) = summarise([RankTrace(0, spans, 0)], None)
    assert (row["before_rows_s"], row["rows_s"], row["between_rows_s"]) == (0, 0, 0)
    assert row["after_rows_s"] == pytest.approx(0.08)


def test_intervals_that_touch_or_overlap_are_joined() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([(0, 9), (1, 2)]) == [(0, 9)]
    assert union([]) == []


def test_the_trace_has_a_process_a_rank_and_a_thread_a_track() -> None:
    found = json.loads(chrome_trace([RankTrace(0, step(5.0), 0), RankTrace(1, step(5.001), 0)]))["traceEvents"]
    spans = [e for e in found if e["ph"] == "X"]
    assert len(spans) == 2 * len(step(0))
    assert min(e["ts"] for e in spans) == 0
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["ph"] == "M"}
    assert names[0, None] == "rank 0"
    assert [names[1, i] for i in range(3)] == ["compute", "lane 0", "lane 1"]
    (first,) = [e for e in spans if e["pid"] == 1 and e["name"] == "encode" and e["tid"] == 1]
    assert (first["ts"], first["dur"]) == pytest.approx((13_000, 8_000))


def test_spans_come_back_in_the_order_of_time() -> None:
    trace = Trace()
    trace.add("b", "decode", 2.0, 3.0)
    trace.add("a", "encode", 1.0, 4.0, "bucket 0")
    assert trace.spans() == [Span("a", "encode", 1.0, 4.0, "bucket 0"), Span("b", "decode", 2.0, 3.0)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", 2], "there are ranks 0 to 1"),
        (["--steps", 0], "at least 1 is needed"),
        (["--method", "terngrd"], "did you mean 'terngrad'"),
        (["--compute", "nap"], "one of real, sleep"),
    ],
)
def test_wrong_questions_are_one_line_and_exit_code_2(words: list[Any], message: str, tmp_path: Path) -> None:
    given = ["--lab", "hosts=2", "--loopback", "--out", tmp_path / "t.json"]
    result = call("bench", "timeline", *given, *words)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gradwire:")]
    assert message in line


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Have two ranks traced without starting them; return what was asked for."""
    asked: list[object] = []

    def trace(grid: object, steps: int) -> list[RankTrace]:
        asked.append(grid)
        return [RankTrace(rank, step(5.0), sent_bytes=1_000_000) for rank in range(2)]

    monkeypatch.setattr(bench_commands, "trace_steps", trace)
    return asked


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(
    traced: list[object], tmp_path: Path
) -> None:
    result = call("bench", "timeline", "--lab", "hosts=2", "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"gradwire: cannot write {tmp_path}: Is a directory")
    assert not traced


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_was_measured_is_told_although_the_trace_cannot_be_written(traced: list[object]) -> None:
    result = call("bench", "timeline", "--lab", "hosts=2", "--out", "/dev/full", "--json")
    assert result.exit_code == 1
    assert result.stderr.startswith("gradwire: cannot write /dev/full: No space left on device")
    assert [row["rank"] for row in json.loads(result.stdout)] == [0, 1]


@pytest.mark.parametrize(
    ("limits", "floor_s"),
    [("bandwidth=100mbit,asymmetric=10mbit", 0.8), ("bandwidth=100mbit,host1=5mbit", 1.6), ("host1=5mbit", 1.6)],
)
def test_the_floor_of_a_timeline_is_that_of_the_slowest_link(
    traced: list[object], limits: str, floor_s: float, tmp_path: Path
) -> None:
    result = call("bench", "timeline", "--lab", f"hosts=2,{limits}", "--out", tmp_path / "t.json", "--json")
    assert result.exit_code == 0, result.output
    assert [row["wire_floor_s"] for row in json.loads(result.stdout)] == pytest.approx([floor_s] * 2)


@pytest.mark.ranks
def test_a_real_step_is_recorded_drawn_and_told(tmp_path: Path) -> None:
    trace, figure = tmp_path / "t.json", tmp_path / "t.png"
    words = ["--model", "lenet", "--lab", "hosts=2", "--loopback", "--steps", 2, "--out", trace, "--figure", figure]
    result = call("bench", "timeline", *words, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    fits(rows, schema("bench_timeline"))
    assert [(row["rank"], row["step"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        assert row["encode_s"] > 0
        assert row["decode_s"] > 0
        assert 0 < row["rows_s"] <= row["step_time_s"]
        assert row["sent_bytes_per_step"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"forward", "backward", "encode", "send rows", "decode"}
    assert figure.stat().st_size > 1000
