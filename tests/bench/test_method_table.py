"""The table of all methods' accuracy: what is trained, how the best is chosen, and what is derived from rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from benchmarks.lib import method_entries as entries
from benchmarks.lib.results import RESULTS
from benchmarks.pages import accuracy_page
from benchmarks.training import method_table as table
from gradwire.tools.experiments.tasks import build

pytestmark = pytest.mark.repository


def test_every_method_is_in_the_table_once() -> None:
    found = [entry.spec for entry in entries.entries("digits")]
    assert len(set(found)) == len(found)
    classes = {type(gw.method(spec)).name for spec in found}
    own = {name for name in gw.methods() if not (gw.method(name).traits.local_steps or gw.method(name).traits.sharded)}
    assert own <= classes
    for form in entries.FORMS:
        assert any(entries.plain(spec) == entries.plain(form) for spec in found), form


def test_a_short_spec_is_the_same_method() -> None:
    for entry in entries.entries("digits"):
        method = gw.method(entry.spec)
        assert entries.short(method) == entry.spec
        assert len(entry.spec) <= len(repr(method))
    assert entries.short(gw.PowerSGD(matrix_rank=4)) == "PowerSGD(matrix_rank=4)"
    assert entries.short(gw.ErrorFeedback(compressor=gw.QSGDinf())) == "ErrorFeedback(compressor=QSGDinf())"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("ef_signsgd", "EFSignSGD"),
        ("errorfeedback", "ErrorFeedback(QSGDinf(block_size=256))"),
        ("Coded(compressor=ALQ())", "Coded(ALQ)"),
        ("TopK(values=BF16())", "TopK(values=BF16)"),
        ("ErrorFeedback(compressor=TopK(density=0.1), momentum=0.9)", "ErrorFeedback(TopK(density=0.1), momentum=0.9)"),
    ],
)
def test_labels_name_the_compressor_whatever_it_is(spec: str, told: str) -> None:
    assert entries.label(spec) == told


def test_labels_differ() -> None:
    found = entries.entries("digits")
    assert len({entries.label(entry.spec) for entry in found}) == len(found)


def test_operators_that_leave_something_out_are_trained_with_error_feedback_too() -> None:
    inner = {entries.family(entry.spec) for entry in entries.entries("digits")}
    assert {f"ErrorFeedback({name})" for name in ("TopK", "RandK", "Threshold", "ScaledSign")} <= inner
    assert not {f"ErrorFeedback({name})" for name in ("TernGrad", "FP16", "SignSGD", "PowerSGD", "EF21")} & inner


@pytest.mark.parametrize(
    ("spec", "momentum", "factor", "trained"),
    [
        ("fp32", 0.9, 1.0, "FP32()"),
        ("terngrad", 0.9, 1.0, "TernGrad()"),
        ("signum", 0.0, 0.006, "Signum()"),
        ("signsgd", 0.0, 0.006, "SignSGD()"),
        ("EFSignSGD(momentum=0.5)", 0.0, 1.0, "EFSignSGD(momentum=0.5)"),
        # It warns of the optimizer's momentum in whole tensors, and not in short blocks.
        ("ef_signsgd", 0.0, 1.0, "EFSignSGD(momentum=0.9)"),
        ("EFSignSGD(block_size=64)", 0.9, 1.0, "EFSignSGD(block_size=64)"),
    ],
)
def test_momentum_is_never_twice(spec: str, momentum: float, factor: float, trained: str) -> None:
    entry = entries.entry_of(spec, "digits")
    assert (entry.momentum, entry.factor, entry.spec) == (momentum, factor, trained)
    rates = entries.rates_of(entry, "digits")
    assert rates == pytest.approx([factor * rate for rate in entries.RATES["digits"]])


def test_tasks_whose_data_is_elsewhere_are_looked_at_without_it() -> None:
    for task in entries.RATES:
        assert entries.entry_of("terngrad", task).momentum == 0.9


def rows(*accuracy: float, every: int = 10, bytes_a_step: int = 100) -> list[dict[str, Any]]:
    """Make metrics: an evaluation every so many steps, after a row of the training loss."""
    found: list[dict[str, Any]] = []
    for i, value in enumerate(accuracy):
        sent = i * every * bytes_a_step
        common = {"step": i * every, "sent_bytes": sent, "received_bytes": 2 * sent, "bits_per_element": 4.0}
        found.append({**common, "event": "train", "loss": 1.0 - value, "accuracy": None})
        found.append({**common, "event": "eval", "loss": 2.0 - value, "accuracy": value})
    return found


def test_the_mark_is_the_first_evaluation_that_is_at_it() -> None:
    found = rows(0.1, 0.5, 0.9, 0.7, 0.95)
    assert table.first_at(found, 0.9)["step"] == 20
    assert table.first_at(found, 0.901)["step"] == 40
    assert table.first_at(found, 0.96) is None


def test_training_loss_is_that_of_the_last_tenth() -> None:
    steps = [{"event": "train", "step": step, "loss": float(step)} for step in range(10, 101, 5)]
    assert table.training_loss([*steps, {"event": "eval", "step": 100, "loss": 1e9}], 100) == 97.5


def test_seconds_are_bits_over_bandwidth_and_computing() -> None:
    assert table.seconds(1e6, 100e6, 50, 0.002) == pytest.approx(0.08 + 0.1)
    assert table.seconds(1e6, 1e9, 50, 0.0) == pytest.approx(0.008)


def write_run(run: Any, found: list[dict[str, Any]], failed: str | None = None) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    ended = {"failed": failed, "wall_s": 7200.0, "cpu_s": 3600.0, "compute_s": 0.01}
    (run.folder / "ended.json").write_text(json.dumps(ended))


def line(spec: str, work: Path) -> Any:
    return table.Line.of(entries.entry_of(spec, "digits"), "digits", 40, work)


def test_folders_differ_where_runs_do(tmp_path: Path) -> None:
    found = [line(entry.spec, tmp_path) for entry in entries.entries("digits")]
    made = [run for one in found if one.tuning[0].entry == one.entry for run in one.tuning]
    made += [replace(made[0], seed=1), replace(made[0], steps=41), replace(made[0], task="mnist")]
    assert len({run.folder for run in made}) == len(made)
    assert max(len(run.folder.name) for run in made) < 200


def test_the_rate_with_the_lowest_training_loss_is_chosen(tmp_path: Path) -> None:
    one = line("terngrad", tmp_path)
    low, middle, high = one.tuning
    write_run(low, rows(0.1, 0.4, 0.6, 0.8, 0.85))
    write_run(high, rows(0.1, 0.4), failed="the loss is nan")
    assert table.tuned([low, middle, high]) == (None, [])
    assert one.finals(3) == []
    assert table.row_of(one, 3, 0.9) is None
    write_run(middle, rows(0.1, 0.4, 0.6, 0.8, 0.90))
    chosen, tried = table.tuned([low, middle, high])
    assert chosen is middle
    assert [entry["failed"] for entry in tried] == [None, None, "the loss is nan"]
    assert [entry["training_loss"] for entry in tried] == [pytest.approx(0.15), pytest.approx(0.10), None]
    assert one.finals(3) == [middle, replace(middle, seed=1), replace(middle, seed=2)]


def test_codes_take_the_rate_of_what_they_code(tmp_path: Path) -> None:
    plain, coded = (line(spec, tmp_path) for spec in ("terngrad", "coded"))
    assert coded.tuning == plain.tuning
    for run, value in zip(plain.tuning, (0.8, 0.9, 0.7)):
        write_run(run, rows(0.1, 0.4, 0.6, 0.8, value))
    assert [run.rate for run in coded.finals(3)] == [plain.tuning[1].rate] * 3
    assert {run.entry.spec for run in coded.finals(3)} == {"Coded()"}
    assert table.row_of(coded, 3, 0.9) is None
    write_run(coded.finals(1)[0], rows(0.1, 0.4, 0.6, 0.8, 0.9))
    assert table.row_of(coded, 3, 0.9)["method"] == "Coded()"


@pytest.mark.parametrize("spec", ["ef_signsgd", "ErrorFeedback(compressor=TopK())", "gtopk", "powersgd", "ef21"])
def test_residuals_are_tried_with_momentum_in_every_place(spec: str, tmp_path: Path) -> None:
    one = line(spec, tmp_path)
    tried = {(run.entry.momentum, gw.method(run.entry.spec).momentum, run.entry.factor) for run in one.tuning}  # type: ignore[attr-defined]
    assert tried == {(0.9, 0.0, 1.0), (0.0, 0.9, 1.0), (0.0, 0.0, 10.0)}
    assert len(one.tuning) == 9
    for i, run in enumerate(one.tuning):
        write_run(run, rows(0.1, 0.4, 0.6, 0.8, 0.9 if i == 7 else 0.85))
    (chosen, *_) = one.finals(1)
    assert chosen is not one.tuning[7]
    assert chosen == one.tuning[7]
    found = table.row_of(one, 1, 0.9)
    assert (found["momentum"], found["method"], found["of"]) == ("none", chosen.entry.spec, one.entry.spec)
    assert found["at_the_grids_end"] is False
    assert [t["momentum"] for t in found["tried"]] == [
        c for c in ("optimizer's, 0.9", "own, 0.9", "none") for _ in "123"
    ]


def test_rows_of_an_earlier_table_stay_where_momentum_has_one_place(tmp_path: Path) -> None:
    kept = {"method": "FP32()", "momentum": "optimizer's, 0.9", "min_numel": None, "rate": 0.5}
    kept |= {"mark": {"accuracy": 0.93}, "accuracy": {"mean": 0.98}}
    other = {**kept, "method": "EFSignSGD(momentum=0.9)", "momentum": "own, 0.9"}
    (tmp_path / "table.json").write_text(json.dumps({"rows": [kept, other]}))
    arguments = argparse.Namespace(
        task="digits",
        steps=40,
        evaluations=None,
        methods=None,
        narrow=None,
        keep=tmp_path / "table.json",
        work=tmp_path,
        best_of=None,
    )
    wanted = table.lines(arguments)
    assert "FP32()" not in {line.entry.spec for line in wanted}
    assert "EFSignSGD(momentum=0.9)" in {line.entry.spec for line in wanted}
    rows = table.collect([], 3, table.kept_rows(arguments.keep))["rows"]
    assert [row["of"] for row in rows] == ["FP32()"]


def test_what_is_warned_of_at_attach_is_what_loses_in_the_committed_table() -> None:
    """Momentum 0.9 after the exchange, against the best elsewhere, on the perceptron for digits."""
    model = build("digits").build_model()
    parameters = {name: p for name, p in model.named_parameters() if p.numel() >= 1024}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = json.loads((RESULTS / "training/methods_digits.json").read_text())["rows"]
    compared = [row for row in rows if len({one.get("momentum") for one in row["tried"]}) > 1]
    assert len(compared) >= 28
    times, beyond = accuracy_page.LOST
    warned = {}
    for row in compared:
        after, *elsewhere = (accuracy_page._lowest(row, place) for place in accuracy_page.PLACES)
        assert after is not None
        lost = after > times * min(loss for loss in elsewhere if loss is not None) + beyond
        method = gw.method(entries.plain(row["method"]))
        warned[row["label"]] = (method.caution(optimizer, parameters) is not None, lost)
    assert {name: pair for name, pair in warned.items() if pair[0] != pair[1]} == {}
    assert {lost for _, lost in warned.values()} == {True, False}


@pytest.mark.parametrize("spec", ["terngrad", "dgc", "signum", "sketched_amsgrad", "diloco"])
def test_without_a_choice_momentum_has_one_place(spec: str) -> None:
    entry = entries.Entry(entries.short(gw.method(spec)), 0.9, 1.0, "optimizer's, 0.9")
    assert entries.places(entry) == [entry]


def test_codes_take_the_place_of_what_they_code(tmp_path: Path) -> None:
    coded = line("Coded(compressor=DIANA())", tmp_path)
    own = next(run for run in coded.tuning if run.entry.convention == "own, 0.9")
    for run in coded.tuning:
        write_run(run, rows(0.1, 0.4, 0.6, 0.8, 0.9 if run is own else 0.85))
    (run,) = coded.finals(1)
    assert run.entry.spec == "Coded(compressor=DIANA(momentum=0.9))"
    assert (run.rate, run.entry.momentum) == (own.rate, 0.0)


def test_lines_hold_what_the_runs_did(tmp_path: Path) -> None:
    whole, other = (line(spec, tmp_path) for spec in ("fp32", "terngrad"))
    for run in whole.tuning:
        write_run(run, rows(0.1, 0.6, 0.96, 0.97, 1.0))
    for run in other.tuning:
        write_run(run, rows(0.1, 0.3, 0.6, 0.96, 0.9))
    for run in other.finals(3)[1:]:
        write_run(run, rows(0.1, 0.3, 0.6, 0.8, 0.9 + 0.05 * run.seed))
    found = table.collect([other, line("qsgd", tmp_path), whole], seeds=3)
    assert found["missing"] == ["QSGD"]
    assert [row["method"] for row in found["rows"]] == ["FP32()", "TernGrad()"]
    assert found["mark"] == pytest.approx(0.95)
    assert (found["runs"], found["machine_hours"], found["processor_hours"]) == (8, 16.0, 8.0)
    first, second = found["rows"]
    # The busier direction is the one in which twice as much is received here.
    assert first["mark"]["steps"]["mean"] == 20
    assert first["mark"]["bytes"]["mean"] == 4000
    assert first["mark"]["seconds_100mbit"] == pytest.approx(8 * 4000 / 100e6 + 20 * 0.01)
    assert first["sent_bytes"]["mean"] == 4000
    assert (first["seeds"], second["seeds"]) == (1, 3)
    assert second["accuracy"]["values"] == pytest.approx([0.9, 0.95, 1.0])
    assert second["accuracy"]["std"] == pytest.approx(0.05)
    assert second["mark"]["seeds"] == 3
    assert second["mark"]["steps"]["mean"] == pytest.approx((30 + 40 + 40) / 3)


def test_a_method_that_fails_everywhere_has_a_line(tmp_path: Path) -> None:
    mine = line("signsgd", tmp_path)
    assert table.row_of(mine, 3, 0.9) is None
    for run in mine.tuning:
        write_run(run, rows(0.1), failed="the loss is nan")
    found = table.row_of(mine, 3, 0.9)
    assert found["rate"] is None
    assert [entry["failed"] for entry in found["tried"]] == ["the loss is nan"] * 3


def entry(spec: str, accuracy: float, sent: float | None, reached: int = 3) -> dict[str, Any]:
    mark = {"accuracy": 0.9, "seeds": reached, "bytes": {"mean": sent, "std": None}}
    row = {"method": spec, "rate": 0.1, "seeds": 3, "mark": mark, "accuracy": {"mean": accuracy, "std": None}}
    return {**row, "failed": 0}


def test_the_best_reach_the_mark_with_few_bytes_and_are_one_of_each_family() -> None:
    found = [
        entry("TernGrad()", 0.97, 50),
        entry("FP32()", 0.975, 1000),
        entry("TernGrad(clip=None)", 0.97, 40),
        entry("QSGD()", 0.97, 300),
        entry("SignSGD()", 0.94, 10),
        entry("TopK()", 0.97, 5, reached=2),
        {**entry("RandK()", 0.0, None), "rate": None},
        entry("BF16()", 0.98, 500),
    ]
    assert table.best(found, 3) == ["FP32()", "TernGrad(clip=None)", "QSGD()"]
    assert len(table.best(found, 12)) == 4
    ordered = [row["method"] for row in accuracy_page.in_order(found)]
    assert ordered[:2] == ["SignSGD()", "TernGrad(clip=None)"]
    assert ordered[-2:] == ["TopK()", "RandK()"]


def test_the_front_is_beaten_by_none() -> None:
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.4), (2.5, 0.9), (10.0, 0.95), (1.0, 0.6)]
    assert accuracy_page.front(points) == [5, 3, 4]


def test_runs_are_trained_once_and_failures_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = entries.Entry("TernGrad()", 0.9, 1.0, "optimizer's, 0.9")
    run = table.Run("digits", ours, 0.05, 0, 4, tmp_path)
    run.go(None)
    first = run.ended()
    assert first["failed"] is None
    assert first["compute_s"] > 0
    assert [row["step"] for row in run.rows() if row["event"] == "eval"] == [0, 1, 2, 3, 4]
    run.go(None)
    assert run.ended() == first
    wild = table.Run("digits", ours, 1e30, 0, 4, tmp_path)
    wild.go(None)
    assert "lower learning rate" in wild.ended()["failed"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_narrow_settings_alone_take_the_rates_of_a_table(tmp_path: Path) -> None:
    mine = [entries.entry_of("fp32", "cifar10"), *entries.narrow("cifar10")]
    rows: list[dict[str, Any]] = [
        {"method": e.spec, "of": e.spec, "momentum": e.convention, "min_numel": e.min_numel, "rate": 0.25 if i else 0.5}
        for i, e in enumerate(mine)
    ]
    # One was better with momentum in another place than the one that it is listed with.
    first = next(i for i, e in enumerate(mine) if len(entries.places(e)) > 1)
    moved = next(place for place in entries.places(mine[first]) if place.convention == "none")
    rows[first] |= {"method": moved.spec, "momentum": "none"}
    # One that failed at every rate is left out.
    rows[-1]["rate"] = None
    (tmp_path / "table.json").write_text(json.dumps({"rows": rows}))
    arguments = argparse.Namespace(
        task="cifar10", steps=7, evaluations=None, narrow=tmp_path / "table.json", keep=None, work=tmp_path
    )
    found = table.lines(arguments)
    assert [line.entry for line in found] == [*mine[:first], moved, *mine[first + 1 : -1]]
    assert [[run.rate for run in line.tuning] for line in found] == [[0.5], *[[0.25]] * (len(mine) - 2)]
    assert {run.steps for line in found for run in line.tuning} == {7}
