"""Which runs are measured by which: settings, ends, steps without an exchange, runs that have not begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run
from typer.testing import CliRunner

from gradwire.tools.cli.app import app
from gradwire.tools.report import ReportError, load_runs, summarize, write_report
from gradwire.tools.report.load import Run
from gradwire.tools.report.page import render
from gradwire.tools.report.verdict import verdicts

TERNGRAD = "TernGrad(clip=2.5)"
DILOCO = "DiLoCo(every=32)"
UNSAID = "so whether it paid is not said."


def plan(threads: int | None = 1, **settings: object) -> dict[str, Any]:
    """Return a plan of twenty steps; without ``threads`` it is of an earlier version."""
    own = {"steps": 20, "batch": 64, "model": "small", "lr": 0.1, "momentum": 0.9, **settings}
    return {"log_every": 10, "settings": own, **({} if threads is None else {"threads": threads})}


def judged(tmp_path: Path, base: dict[str, Any], other: dict[str, Any]) -> str:
    """Return what is said of a run that is twice as fast as fp32, unless told otherwise."""
    folders = [write_run(tmp_path / "fp32", **{"plan": plan(), **base})]
    told: dict[str, Any] = {"name": "other", "sent_bytes": 250, "step_time_s": 0.005, "plan": plan(), **other}
    folders.append(write_run(tmp_path / "other", told.pop("method", TERNGRAD), **told))
    ((_, text),) = verdicts(load_runs(folders))
    return text


def machine(**changes: object) -> dict[str, object]:
    return {"processor": "a fast one", "cores": 2, "system": "Linux", **changes}


@pytest.mark.parametrize(
    ("base", "other", "sentence"),
    [
        ({}, {"plan": plan(batch=128)}, "The fp32 run had batch 64, and this one batch 128, "),
        ({}, {"plan": plan(model="large", lr=0.2)}, "The fp32 run had model small, and this one model large, "),
        ({"plan": plan(halo="bf16")}, {"plan": plan(halo=None)}, "had halo bf16, and this one no halo, "),
        ({}, {"plan": plan(threads=2)}, "The fp32 run had threads 1, and this one threads 2, "),
        (
            {"hardware": machine()},
            {"hardware": machine(processor="a slow one", cores=64)},
            "The fp32 run had processor a fast one, cores 2, and this one processor a slow one, cores 64, ",
        ),
    ],
)
def test_a_run_with_other_settings_or_on_another_machine_is_not_judged(
    tmp_path: Path, base: dict[str, Any], other: dict[str, Any], sentence: str
) -> None:
    text = judged(tmp_path, base, other)
    assert text.endswith(sentence + UNSAID)
    assert "times less" in text
    assert "It paid" not in text


def test_methods_have_learning_rates_of_their_own_and_that_is_said(tmp_path: Path) -> None:
    text = judged(tmp_path, {}, {"plan": plan(lr=0.01, momentum=0.0)})
    assert "It paid: the same accuracy in 0.50 of the time." in text
    assert "It was trained with lr 0.01, momentum 0.0, and fp32 with lr 0.1, momentum 0.9." in text


def test_a_setting_that_an_earlier_version_did_not_record_is_no_difference(tmp_path: Path) -> None:
    old = {"plan": plan(threads=None), "hardware": {"processor": "a fast one"}}
    text = judged(tmp_path, old, {"plan": plan(threads=1, crop=24), "hardware": machine(), "local_steps": 0})
    assert text.endswith("It paid: the same accuracy in 0.50 of the time.")


def test_machines_do_not_matter_to_simulated_workers(tmp_path: Path) -> None:
    text = judged(tmp_path, {"simulated": True}, {"simulated": True, "hardware": machine(cores=64)})
    assert "It first reached fp32's final accuracy" in text


@pytest.mark.parametrize("fit_first", [True, False])
def test_of_several_fp32_runs_the_one_of_the_same_settings_is_the_measure(tmp_path: Path, fit_first: bool) -> None:
    fit = write_run(tmp_path / "fit", plan=plan())
    unfit = write_run(tmp_path / "unfit", plan=plan(model="large", batch=128), step_time_s=0.1)
    run = write_run(tmp_path / "run", TERNGRAD, name="terngrad", step_time_s=0.005, plan=plan())
    ((_, text),) = verdicts(load_runs([fit, unfit, run] if fit_first else [unfit, fit, run]))
    assert "It paid: the same accuracy in 0.50 of the time." in text


def test_labels_that_would_be_equal_name_the_settings_that_differ(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(i), name=name, plan={**plan(lr=lr, model=model), "exclude": exclude})
        for i, (name, lr, model, exclude) in enumerate(
            [
                ("fp32", 0.5, "other", []),
                ("terngrad", 0.1, "small", []),
                ("terngrad", 0.2, "small", ["fc.*", "embed"]),
                ("terngrad", 0.2, "small", ["fc.*", "embed"]),
            ]
        )
    ]
    assert [run.label for run in load_runs(folders)] == [
        "fp32",
        "terngrad, lr 0.1, no exclude",
        "terngrad, lr 0.2, exclude fc.* embed",
        "terngrad, lr 0.2, exclude fc.* embed #2",
    ]


def test_the_work_for_a_run_does_not_grow_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_run(tmp_path / str(i), plan=plan(lr=0.1 * i)) for i in range(8)]
    done: list[str] = []
    resolve, options = Path.resolve, Run.options.fget
    monkeypatch.setattr(Path, "resolve", lambda path: (done.append("path"), resolve(path))[1])
    monkeypatch.setattr(Run, "options", property(lambda run: (done.append("options"), options(run))[1]))
    assert len(load_runs([*folders, folders[0]])) == 8
    assert (done.count("path"), done.count("options")) == (9, 8)


@pytest.mark.parametrize(
    ("accuracies", "steps", "sentence"),
    [
        ((0.1,), 300, "The fp32 run ended after 0 of 300 steps"),
        ((0.1, 0.4), 300, "The fp32 run ended after 10 of 300 steps"),
        ((0.1, 0.4, 0.1), 20, "The fp32 run ended no more accurate than it began"),
        ((0.1,), None, "The fp32 run ended no more accurate than it began"),
        ((), 20, "The fp32 run ended after 0 of 20 steps"),
        ((), None, "The fp32 run has no evaluation to compare with"),
    ],
)
@pytest.mark.parametrize("simulated", [False, True])
def test_an_fp32_run_that_did_not_end_or_learn_is_no_measure(
    tmp_path: Path, accuracies: tuple[float, ...], steps: int | None, sentence: str, simulated: bool
) -> None:
    base = write_run(tmp_path / "fp32", accuracies=accuracies or (0.1,), plan=plan(steps=steps), simulated=simulated)
    if not accuracies:
        (row,) = (base / "metrics.jsonl").read_text().splitlines()
        timed = {**json.loads(row), "event": "train", "accuracy": None, "step_time_s": 0.01}
        (base / "metrics.jsonl").write_text(json.dumps(timed) + "\n")
    forgetful: dict[str, Any] = {"with_feedback": "ErrorFeedback()", "simulated": simulated, "plan": plan(steps=steps)}
    other = write_run(tmp_path / "b", TERNGRAD, name="terngrad", accuracies=(0.1, 0.05, 0.02), **forgetful)
    ((_, text),) = verdicts(load_runs([base, other]))
    assert text.endswith(f"{sentence}, {UNSAID}")
    assert "pay here" not in text
    assert "did not reach" not in text


def test_a_run_that_did_not_end_is_judged_only_if_it_has_reached_the_accuracy(tmp_path: Path) -> None:
    kept = {"with_feedback": "ErrorFeedback()"}
    behind = judged(tmp_path / "behind", {}, {"accuracies": (0.1, 0.5), **kept})
    assert behind.endswith(f"its best was 50.00 %, at step 10. The run ended after 10 of 20 steps, {UNSAID}")
    reached = judged(tmp_path / "reached", {}, {"accuracies": (0.1, 0.9), **kept})
    assert "It paid: the same accuracy in 0.25 of the time." in reached


def local_run(folder: Path, rows_s: float, elapsed_s: float) -> Path:
    """Write a run whose rows' times hold no exchange, while its training took ``elapsed_s`` a step."""
    run = write_run(folder, DILOCO, name="diloco", step_time_s=elapsed_s, plan=plan(), local_steps=32)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "step_time_s": rows_s if row["event"] == "train" else None} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_steps_of_local_steps_are_told_with_their_exchanges(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", step_time_s=0.05, plan=plan())
    other = local_run(tmp_path / "b", rows_s=0.001, elapsed_s=0.1)
    plain, local = load_runs([base, other])
    assert summarize(plain).step_time_s == pytest.approx(0.0575)
    numbers = summarize(local)
    assert numbers.step_time_s == pytest.approx(0.1)
    assert (numbers.step_time_p20_s, numbers.step_time_p80_s) == (None, None)
    ((_, text),) = verdicts([plain, local])
    told = "A step took 100 ms against fp32's 50 ms (means, since most steps exchange nothing): 2.00 times as long."
    assert told in text
    page = render([plain, local])
    assert '100 ms<span class="soft">mean</span>' in page
    assert "with local steps the mean of all steps" in page
    assert "with local steps the mean of all steps" not in render([plain])


def test_steps_of_local_steps_are_called_faster_only_with_their_exchanges(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", step_time_s=0.05, accuracies=(0.1, 0.8, 0.95), plan=plan())
    other = local_run(tmp_path / "b", rows_s=0.001, elapsed_s=0.1)
    ((_, text),) = verdicts(load_runs([base, other]))
    assert text.endswith("It did not pay here: neither the accuracy was reached nor were steps faster.")


def test_the_steps_of_a_worker_that_joined_late_are_its_own(tmp_path: Path) -> None:
    run = local_run(tmp_path / "a", rows_s=0.001, elapsed_s=0.1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    late = [{**row, "step": row["step"] + 500} for row in rows if row["step"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    assert summarize(load_runs([run])[0]).step_time_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("base", "other", "whose"),
    [({}, {"membership": "10.0.0.1:29400"}, "this"), ({"membership": "10.0.0.1:29400"}, {}, "the fp32")],
)
def test_a_run_whose_workers_could_come_and_go_is_no_measure_and_is_not_judged(
    tmp_path: Path, base: dict[str, Any], other: dict[str, Any], whose: str
) -> None:
    text = judged(tmp_path, base, other)
    assert text.endswith(f"bits per element. Workers of {whose} run could come and go, {UNSAID}")


def test_an_fp32_run_whose_workers_stayed_is_the_measure(tmp_path: Path) -> None:
    elastic = write_run(tmp_path / "elastic", plan=plan(), membership="10.0.0.1:29400")
    fixed = write_run(tmp_path / "fixed", plan=plan(lr=0.2))
    run = write_run(tmp_path / "run", TERNGRAD, name="terngrad", step_time_s=0.005, plan=plan())
    ((_, text),) = verdicts(load_runs([elastic, fixed, run]))
    assert "It paid: the same accuracy in 0.50 of the time." in text


@pytest.fixture(params=["no file", "an empty one", "half a row"])
def begun(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A comparison of which one run has rows, and the other none."""
    write_run(tmp_path / "c" / "fp32")
    metrics = write_run(tmp_path / "c" / "terngrad", TERNGRAD, name="terngrad") / "metrics.jsonl"
    first = metrics.read_bytes()[:20]
    metrics.unlink()
    if request.param != "no file":
        metrics.write_bytes(b"" if request.param == "an empty one" else first)
    (tmp_path / "c" / "compare.json").write_text('{"methods": []}')
    return tmp_path / "c"


def test_a_run_without_a_row_is_left_out_beside_others_and_that_is_said(begun: Path) -> None:
    sentence = f"{begun / 'terngrad'} is left out: it has no row of metrics yet"
    said: list[str] = []
    assert [run.label for run in load_runs([begun], said.append)] == ["fp32"]
    assert said == [sentence]
    assert f"{sentence}." in write_report([begun], begun / "page.html").read_text()
    for words in ([], ["--json"]):
        done = CliRunner().invoke(app, ["report", str(begun), "--out", str(begun / "page.html"), *words])
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines() == [f"gradwire: {sentence}"]


def test_a_comparison_in_which_no_run_has_begun_is_left_out_beside_others(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "compare.json").write_text("{}")
    said: list[str] = []
    (run,) = load_runs([tmp_path / "empty", write_run(tmp_path / "run")], said.append)
    assert run.path == tmp_path / "run"
    assert said == [f"{tmp_path / 'empty'} is left out: it has no row of metrics yet"]


def test_runs_of_which_none_has_a_row_are_an_error(begun: Path) -> None:
    (begun / "fp32" / "metrics.jsonl").unlink()
    with pytest.raises(ReportError, match=r"has the run begun|holds no whole row"):
        load_runs([begun])


def test_a_corrupt_run_is_not_left_out(begun: Path) -> None:
    (begun / "terngrad" / "metrics.jsonl").write_text("{step: 0}\n")
    with pytest.raises(ReportError, match="line 1 is corrupt"):
        load_runs([begun])
