"""The calculator of the site against ``gradwire plan``, in a JavaScript engine and in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import quickjs
from plan_cells import DATA, ROOT, Cell, cells, seconds_as_committed

pytestmark = pytest.mark.repository

STEP, BYTES, CODED = 5e-3, 2e-3, 1e-2
"""Relative differences that are allowed: three digits of a time, bytes, and bytes of an entropy coder."""

PADDING = 64
"""Bytes by which the rows that a worker sends another of a bucket may end otherwise: groups of codes are whole."""


class Engine:
    """The page's own model, in an engine without a page."""

    def __init__(self) -> None:
        self._context = quickjs.Context()
        self._context.eval((ROOT / "docs" / "assets" / "model.js").read_text())
        self._context.eval(f"const data = {json.dumps(DATA)};")

    def call(self, expression: str) -> Any:
        """Return the value of an expression."""
        return json.loads(self._context.eval(f"JSON.stringify({expression})"))

    def profile(self, parameters: int, compute_s: float, micro_batches: int) -> Any:
        """Return the profile that the page makes."""
        question = {"parameters": parameters, "computeS": compute_s, "microBatches": micro_batches}
        return self.call(f"GradwireModel.profileOf({json.dumps(question)})")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def answers(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cell]]:
    with pytest.MonkeyPatch.context() as patch:
        seconds_as_committed(patch)
        yield cells(tmp_path_factory.mktemp("plan"), engine.profile)


def apart(sentence: str) -> tuple[str, list[float]]:
    """Return a sentence without its numbers outside of names, and these."""
    number = r"(?<![\w=])\d+(?:\.\d+)?(?:e[+-]\d+)?"
    return re.sub(number, "#", sentence), [float(found) for found in re.findall(number, sentence)]


def check(cell: Cell, rows: list[dict[str, Any]], reason: str) -> None:
    """Compare what the page says of a cell with what the command says."""
    assert [row["method"] for row in rows] == [row["method"] for row in cell.rows]
    for mine, its in zip(rows, cell.rows):
        where = f"{its['method']} of {dataclasses.replace(cell, rows=[])}"
        for name in ("step_s", "low_s", "high_s", "speedup", "worker_steps_per_s"):
            assert mine[name] == pytest.approx(its[name], rel=STEP), f"{name}: {where}"
        # What a coder makes of so many values is no straight line in their number.
        off = CODED if its["method"] == "coded" else BYTES
        slack = PADDING * (cell.workers - 1) * cell.buckets
        assert mine["sent_bytes"] == pytest.approx(its["sent_bytes"], rel=off, abs=slack), where
        slack_s = slack * cell.ranks_per_host / cell.bytes_per_s if cell.bytes_per_s else 0.0
        assert mine["floor_s"] == pytest.approx(its["floor_s"], rel=off, abs=slack_s), where
        # Bytes of both differ a little, which decides where the link and the codec take the same time.
        if mine["bottleneck"] != its["bottleneck"]:
            assert mine["busy_s"] == pytest.approx(mine["wire_s"], rel=2 * off), f"bottleneck: {where}"
            reason = reason.replace(f"bounded by {mine['bottleneck']}", f"bounded by {its['bottleneck']}")
        for name in ("extrapolated", "world_size", "exchange_every"):
            assert mine[name] == its[name], f"{name}: {where}"
    # Words alike; numbers of a sentence may differ by one in their last, third digit.
    (words, numbers), (its_words, its_numbers) = apart(reason), apart(cell.reason)
    assert words == its_words
    assert numbers == pytest.approx(its_numbers, rel=2 * STEP)


def asked(engine: Engine, cell: Cell) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and the advice of the page's model for a cell."""
    profile = json.dumps(engine.profile(cell.parameters, cell.compute_s, cell.micro_batches))
    setting = {
        "hosts": cell.hosts,
        "ranksPerHost": cell.ranks_per_host,
        "cores": cell.cores,
        "bytesPerS": cell.bytes_per_s,
        "latencyS": cell.latency_s,
        "loss": cell.loss,
    }
    rows = engine.call(f"GradwireModel.forecast(data, {profile}, {json.dumps(setting)})")
    return rows, engine.call(f"GradwireModel.recommend({json.dumps(rows)}, data.constants)")


def test_the_model_in_javascript_agrees_with_plan(engine: Engine, answers: list[Cell]) -> None:
    assert len(answers) >= 20
    for cell in answers:
        rows, advice = asked(engine, cell)
        assert [row["method"] for row in cell.rows if row["recommended"]] == [advice["method"]]
        check(cell, rows, advice["reason"])


SETTING = {"hosts": 8, "ranksPerHost": 2, "cores": None, "bytesPerS": 100e6, "latencyS": 1e-4}


def forecast_of(engine: Engine, parameters: float, compute_s: float) -> list[dict[str, Any]]:
    """Return the rows of a model of a given size, beyond what is played bucket by bucket as well."""
    question = {"parameters": parameters, "computeS": compute_s, "microBatches": 1}
    rows: list[dict[str, Any]] = engine.call(
        f"GradwireModel.forecastOf(data, {json.dumps(question)}, {json.dumps(SETTING)})"
    )
    return rows


def test_a_model_beyond_what_is_played_is_as_if_it_were(engine: Engine) -> None:
    """Three times the largest, bucket by bucket, beside the smaller model in its place."""
    largest = engine.call("GradwireModel.LARGEST")
    parameters, compute_s = int(3 * largest), 30.0
    profile = json.dumps(engine.profile(parameters, compute_s, 1))
    played = engine.call(f"GradwireModel.forecast(data, {profile}, {json.dumps(SETTING)})")
    for scaled, row in zip(forecast_of(engine, parameters, compute_s), played, strict=True):
        for name in ("step_s", "low_s", "high_s", "floor_s", "speedup", "sent_bytes", "worker_steps_per_s"):
            assert scaled[name] == pytest.approx(row[name], rel=0.01), f"{name}: {row['method']}"
        assert (scaled["method"], scaled["bottleneck"]) == (row["method"], row["bottleneck"])


def test_a_million_million_parameters_have_an_answer_that_is_marked(engine: Engine) -> None:
    rows = forecast_of(engine, 1e12, 600.0)
    bits = {row["method"]: 8 * row["sent_bytes"] / 1e12 for row in rows}
    # A ring all-reduce of 16 workers sends 2 * 15/16 of the elements.
    assert bits["ddp fp32"] == pytest.approx(32 * 2 * 15 / 16, rel=1e-3)
    assert bits["bf16"] == pytest.approx(bits["ddp fp32"] / 2, rel=1e-3)
    assert all("far larger than those measured (at most 10 million" in row["extrapolated"] for row in rows)
    assert all(row["floor_s"] <= row["step_s"] for row in rows)


def test_sizes_near_those_that_were_measured_are_not_marked(engine: Engine) -> None:
    measured = engine.call("GradwireModel.MEASURED")
    far = DATA["constants"]["far"]
    for share, marked in ((0.5, False), (1.0, False), (0.99 * far, False), (1.01 * far, True)):
        for row in forecast_of(engine, share * measured, 0.3):
            assert ("far larger" in (row["extrapolated"] or "")) == marked
    alone = engine.call(
        f"GradwireModel.forecast(data, {json.dumps(engine.profile(3000000, 0.1, 1))}, {json.dumps(SETTING)})"
    )
    assert forecast_of(engine, 3_000_000, 0.1) == alone


UNITS = {"ms": 1e-3, "s": 1.0, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def amount(text: str) -> float:
    """Return what a cell of the page's table says, in seconds or bytes."""
    number, unit = text.removesuffix(" (mean)").split("\u00a0")
    return float(number) * UNITS[unit]


def fields(cell: Cell) -> dict[str, str]:
    """Return the values of the page's fields."""
    return {
        "parameters": repr(cell.parameters / 1e6),
        "compute": repr(cell.compute_s * 1e3),
        "micro": str(cell.micro_batches),
        "hosts": str(cell.hosts),
        "ranks": str(cell.ranks_per_host),
        "cores": "" if cell.cores is None else str(cell.cores),
        "bandwidth": "" if cell.bytes_per_s is None else repr(cell.bytes_per_s * 8 / 1e6),
        "latency": repr(cell.latency_s * 1e3),
        "loss": repr(cell.loss * 100),
    }


@pytest.mark.skipif(browser.executable() is None, reason="no Chromium here: the page's model ran in QuickJS alone")
def test_the_page_shows_in_a_browser_what_plan_predicts(
    engine: Engine, answers: list[Cell], site: Path, tmp_path: Path
) -> None:
    wrong = {**fields(answers[0]), "hosts": "9"}, {**fields(answers[0]), "micro": "1.5"}
    large = {**fields(answers[0]), "parameters": "1e6", "compute": "6e5"}
    shown = browser.ask(site, tmp_path, [*map(fields, answers), *wrong, large])
    for cell, page in zip(answers, shown):
        (chosen,) = [row["method"] for row in cell.rows if row["recommended"]]
        assert page["chosen"] == [chosen]
        assert page["apart"] == [known["spec"] for known in DATA["methods"] if known["apart"]]
        assert page["profile"] == engine.profile(cell.parameters, cell.compute_s, cell.micro_batches)
        assert f"--hosts {cell.hosts} " in page["command"]
        assert any("Extrapolated" in note for note in page["notes"]) == (cell.rows[0]["extrapolated"] is not None)
        # The model's words, which differ from plan's where the link and the codec take the same time.
        rows, advice = asked(engine, cell)
        (words, numbers), (its_words, its_numbers) = (
            apart(page["advice"].lower()),
            apart(f"{advice['reason']}.".lower()),
        )
        assert words == its_words
        assert numbers == pytest.approx(its_numbers, rel=2 * STEP)
        assert [(row[0], row[5]) for row in page["rows"]] == [(row["method"], row["bottleneck"]) for row in rows]
        for (method, step, span, faster, sent, _, floor), its in zip(page["rows"], cell.rows, strict=True):
            off = 2 * CODED
            low, high = span.split(" to ")
            assert method == its["method"]
            assert amount(step) == pytest.approx(its["step_s"], rel=2 * STEP)
            assert [amount(low), amount(high)] == pytest.approx([its["low_s"], its["high_s"]], rel=2 * STEP)
            assert float(faster) == pytest.approx(its["speedup"], rel=2 * STEP, abs=0.01)
            assert amount(sent) == pytest.approx(its["sent_bytes"], rel=off)
            assert amount(floor) == pytest.approx(its["floor_s"], rel=off)
    many, halves, huge = shown[len(answers) :]
    assert len(huge["rows"]) == len(DATA["methods"])
    assert any("far larger than those measured" in note for note in huge["notes"])
    assert huge["profile"] is None
    assert many["advice"].startswith("9 workers: the page knows 2, 3, 4")
    assert halves["advice"].startswith("Micro-batches a step (gradient accumulation): a whole number")
    assert many["rows"] == halves["rows"] == []
