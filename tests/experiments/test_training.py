"""The training loop with simulated workers: the right steps, resumed exactly, stopped when numbers leave."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import Listener, gradwire, model_of, same

from gradwire.tools.experiments import run
from gradwire.tools.experiments import train as train_module
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model
from gradwire.tools.experiments.errors import RunError, TrainingError, UsageError
from gradwire.tools.experiments.folder import ROW_FIELDS, RunFolder, checkpoint_steps
from gradwire.tools.experiments.member import resume_as_member
from gradwire.tools.experiments.order import DataOrder
from gradwire.tools.experiments.run_record import config_of
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.train import Average

PLAN = RunConfig(
    task=build("digits", steps=12, eval_every=5, weight_decay=1e-3),
    method="terngrad",
    workers=4,
    simulate=True,
    log_every=4,
    checkpoint_every=5,
)


def test_four_workers_at_fp32_follow_one_process(tmp_path: Path, listener: Listener) -> None:
    plan = replace(PLAN, method="fp32")
    folder = run.train(plan, listener, folder=tmp_path / "a")
    model, source, order = build_model(plan), plan.task.load(), DataOrder(0, 1437, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.task.lr, momentum=0.9)
    for step in range(12):
        inputs, targets = source.batch(order.indices(step), slice(0, 64), seed=0, step=step)
        decay = 0.5e-3 * sum(p.square().sum() for p in plan.task.decayed(model))
        optimizer.zero_grad()
        (plan.task.loss(model(inputs), targets) + decay).backward()
        optimizer.step()
    for name, value in model_of(folder).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_rows_have_all_fields_and_bytes_grow(tmp_path: Path, listener: Listener) -> None:
    folder = run.train(PLAN, listener, folder=tmp_path / "a")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(tuple(row) == ROW_FIELDS for row in rows)
    assert [(row["step"], row["event"]) for row in rows] == [
        (0, "eval"),
        (4, "train"),
        (5, "eval"),
        (8, "train"),
        (10, "eval"),
        (12, "train"),
        (12, "eval"),
    ]
    assert rows == [dict(row) for row in listener.rows]
    assert rows[-1]["sent_bytes"] == 2 * next(r for r in rows if r["step"] == 8)["sent_bytes"] * 12 // 16
    assert rows[-1]["dense_bytes"] == round(8 * 12 * 85_002 * 3 / 4)
    assert 2 < rows[-1]["bits_per_element"] < 4
    config = json.loads((folder / "config.json").read_text())
    assert config["method"].startswith("TernGrad(")
    assert config["link"]["backend"]
    assert config["world_size"] == 4
    assert (folder / "report.html").stat().st_size > 1000


def test_checkpoints_are_written_by_time_at_rows_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], list[int]()

    def ticking() -> float:
        now[0] += 60.0
        return now[0]

    committed = RunFolder.commit_checkpoint

    def noted(self: RunFolder, step: int) -> None:
        written.append(step)
        committed(self, step)

    monkeypatch.setattr(train_module, "now_s", ticking)
    monkeypatch.setattr(RunFolder, "commit_checkpoint", noted)
    plan = replace(PLAN, checkpoint_every=0, log_every=2, checkpoint_minutes=8.0)
    run.train(plan, Listener(), folder=tmp_path / "a")
    by_time, (last,) = written[:-1], written[-1:]
    assert last == 12
    assert len(by_time) >= 2
    assert all(step % 2 == 0 for step in by_time)
    written.clear()
    run.train(replace(plan, checkpoint_minutes=0.0), Listener(), folder=tmp_path / "b")
    assert written == [12]
    with pytest.raises(UsageError, match="checkpoint_minutes"):
        replace(plan, checkpoint_minutes=-1.0)


THRESHOLD = replace(PLAN, method="Threshold(threshold=0.005)")


def gauges_of(folder: Path) -> list[dict[str, dict[str, float]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("gauges" in row for row in rows if row["event"] == "train")
    assert all(tuple(row) == ROW_FIELDS for row in rows if row["event"] == "eval")
    return [row["gauges"] for row in rows if row["event"] == "train"]


def test_rows_tell_what_the_method_reports_of_their_steps(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    told = SimulatedEngine.gauges

    def noted(self: SimulatedEngine) -> list[dict[str, float]]:
        found = told(self)
        seen.extend(gauges["density"] for gauges in found)
        return found

    monkeypatch.setattr(SimulatedEngine, "gauges", noted)
    rows = gauges_of(run.train(THRESHOLD, listener, folder=tmp_path / "a"))
    assert len(seen) == 12 * THRESHOLD.workers
    assert len(rows) == 3
    for i, row in enumerate(rows):
        part = seen[16 * i : 16 * i + 16]
        assert row["density"]["mean"] == pytest.approx(statistics.fmean(part))
        # Sums of squares lose digits to the square of the mean.
        assert row["density"]["deviation"] == pytest.approx(statistics.pstdev(part), rel=1e-6)
        assert 0 < row["density"]["deviation"] < row["density"]["mean"] < 1


def test_reports_of_a_continued_run_are_those_of_the_whole(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 5 lies between the rows of steps 4 and 8."""
    whole = run.train(THRESHOLD, listener, folder=tmp_path / "whole")
    real = SimulatedEngine.backward

    def interrupted(self: SimulatedEngine, step: int) -> float:
        if step == 6:
            raise TrainingError("power went off")
        return real(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedEngine, "backward", interrupted)
        with pytest.raises(TrainingError, match="power"):
            run.train(THRESHOLD, listener, folder=tmp_path / "half")
    assert checkpoint_steps(tmp_path / "half") == [5]
    assert gauges_of(run.resume(tmp_path / "half", listener)) == gauges_of(whole)


def test_simulated_workers_have_no_link_to_measure(tmp_path: Path, listener: Listener) -> None:
    plan = replace(PLAN, method="CAT(fixed_bytes=None)")
    with pytest.raises(UsageError, match="simulated workers have none"):
        run.train(plan, listener, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_two_halves_make_the_whole(tmp_path: Path, listener: Listener) -> None:
    whole = run.train(PLAN, listener, folder=tmp_path / "whole")
    half = run.train(PLAN, listener, folder=tmp_path / "half", stop_after=7)
    assert checkpoint_steps(half) == [7]
    assert not same(whole, half)
    run.resume(half, listener)
    assert same(whole, half)
    last = [json.loads((f / "metrics.jsonl").read_text().splitlines()[-1]) for f in (whole, half)]
    for field in ("step", "loss", "accuracy", "sent_bytes", "dense_bytes"):
        assert last[0][field] == last[1][field]


def test_rows_after_the_checkpoint_are_written_once(tmp_path: Path, listener: Listener) -> None:
    folder = run.train(PLAN, listener, folder=tmp_path / "a", stop_after=5)
    metrics = folder / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps({**listener.rows[-1], "step": 11}) + '\n{"step": 1')
    run.resume(folder, listener)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps.count(12) == 2


def test_resuming_what_cannot_be_resumed(tmp_path: Path, listener: Listener) -> None:
    with pytest.raises(RunError, match=r"no config\.json"):
        run.resume(tmp_path, listener)
    folder = run.train(PLAN, listener, folder=tmp_path / "a")
    run.resume(folder, listener)
    assert "is finished: 12 of 12 steps" in listener.sentences[-1]
    (newest,) = (folder / "checkpoint").glob("step-*/shared.pt")
    newest.write_bytes(newest.read_bytes()[:100])
    config = json.loads((folder / "config.json").read_text())
    config["plan"]["settings"]["steps"] = 20
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"shared\.pt cannot be read"):
        run.resume(folder, listener)
    config["plan"]["colour"] = "blue"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="no plan of this version"):
        run.resume(folder, listener)


@pytest.mark.parametrize("resume", [run.resume, partial(resume_as_member, address="127.0.0.1:1", secret="secret")])
def test_a_run_that_was_interrupted_at_its_last_row_gets_its_report(
    tmp_path: Path, listener: Listener, resume: Callable[..., Path]
) -> None:
    folder = run.train(PLAN, listener, folder=tmp_path / "a")
    (folder / "report.html").unlink()
    assert resume(folder, listener) == folder
    assert (folder / "report.html").exists()


def test_numbers_that_leave_stop_the_run_and_name_the_parameter(tmp_path: Path, listener: Listener) -> None:
    plan = replace(PLAN, task=build("digits", steps=50, lr=1e30), method="fp32")
    with pytest.raises(TrainingError, match=r"parameter \d\.(weight|bias) is not finite after step \d"):
        run.train(plan, listener, folder=tmp_path / "a")


def test_a_parameter_that_turns_nan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.backward

    def broken(self: SimulatedEngine, step: int) -> float:
        loss = real(self, step)
        if step == 6:
            gradient = self.parameters[3].grad
            assert gradient is not None
            gradient[0] = float("nan")
        return loss

    monkeypatch.setattr(SimulatedEngine, "backward", broken)
    with pytest.raises(TrainingError, match=r"parameter 3\.bias is not finite after step 7"):
        run.train(PLAN, Listener(), folder=tmp_path / "a")
    assert checkpoint_steps(tmp_path / "a") == [5]


def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.score
    losses = iter([1.0, 1.0, float("nan")])
    monkeypatch.setattr(SimulatedEngine, "score", lambda engine: (next(losses), real(engine)[1]))
    with pytest.raises(TrainingError, match="the loss of the evaluation after step 10 is nan: use a lower learning"):
        run.train(PLAN, Listener(), folder=tmp_path / "a")
    assert checkpoint_steps(tmp_path / "a") == [5]
    assert "NaN" not in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_the_average_of_constant_weights_is_the_weights() -> None:
    weight = torch.ones(3)
    average = Average(0.9, [weight])
    for step in range(1, 5):
        average.update(step)
    assert torch.equal(average.shadow[0], torch.ones(3))
    weight += 1
    average.update(100)
    torch.testing.assert_close(average.shadow[0], torch.full((3,), 1.1))
    average.swap()
    torch.testing.assert_close(weight, torch.full((3,), 1.1))
    average.swap()
    assert torch.equal(weight, torch.full((3,), 2.0))


def test_lenet_trains_on_idx_files_with_an_average(small_mnist: Path, tmp_path: Path, listener: Listener) -> None:
    task = build("mnist", data=str(small_mnist), steps=4, batch=8, eval_every=2, ema=0.9999)
    plan = RunConfig(task=task, method="terngrad", workers=8, simulate=True, log_every=1)
    whole = run.train(plan, listener, folder=tmp_path / "whole")
    half = run.train(plan, listener, folder=tmp_path / "half", stop_after=2)
    run.resume(half, listener)
    assert same(whole, half)
    ends = [[r for r in map(json.loads, (f / "metrics.jsonl").open()) if r["event"] == "eval"] for f in (whole, half)]
    assert [r["loss"] for r in ends[0]] == [r["loss"] for r in ends[1]]


def test_a_disk_that_fills_up_leaves_rows_and_checkpoint(tmp_path: Path) -> None:
    run.train(
        replace(PLAN, task=build("digits", steps=400), log_every=1), Listener(), folder=tmp_path / "a", stop_after=10
    )
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (30_000, 30_000))
    failed = gradwire("train", "--resume", tmp_path / "a", preexec_fn=small)
    assert failed.returncode == 1
    assert "File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert len([line for line in failed.stderr.splitlines() if line.startswith("gradwire:")]) == 1
    assert checkpoint_steps(tmp_path / "a") == [10]
    assert not list((tmp_path / "a").glob("**/*.tmp"))
    assert all(json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())


def test_compare_refuses_the_same_method_twice(tmp_path: Path, listener: Listener) -> None:
    with pytest.raises(UsageError, match="named twice"):
        run.compare(PLAN, ["terngrad", "TernGrad()"], listener, folder=tmp_path / "a")
    assert not os.path.exists(tmp_path / "a")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_last_row_of_a_run_ends_the_comparison(tmp_path: Path, number: signal.Signals) -> None:
    class Interrupter(Listener):
        def row(self, row: Mapping[str, Any]) -> None:
            if (row["event"], row["step"]) == ("eval", PLAN.task.steps):
                signal.raise_signal(number)

    listener, top = Interrupter(), tmp_path / "a comparison"
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        run.compare(PLAN, ["fp32", "terngrad"], listener, folder=top)
    assert caught.value.args == ((143,) if number == signal.SIGTERM else ())
    command = f"gradwire train --resume '{top / 'fp32'}'"
    assert listener.sentences[-1] == f"stopped; a checkpoint of step 12 is kept: {command}"
    assert checkpoint_steps(top / "fp32") == [12]
    assert not (top / "terngrad").exists()


def test_a_comparison_that_has_begun_is_kept_and_told_how_to_continue(tmp_path: Path, listener: Listener) -> None:
    top = tmp_path / "c"
    run.compare(PLAN, ["fp32", "terngrad"], listener, folder=top)
    shutil.rmtree(top / "terngrad")
    run.train(PLAN, listener, folder=top / "terngrad", stop_after=7)
    with pytest.raises(UsageError) as caught:
        run.compare(PLAN, ["fp32", "terngrad", "bf16"], listener, folder=top)
    told = str(caught.value)
    assert f"{top} holds a comparison: fp32 is finished, terngrad has a checkpoint of step 7 of 12, bf16 has no" in told
    assert f"gradwire report {top} shows it" in told
    assert f"gradwire train --resume {top / 'terngrad'} continues terngrad" in told
    assert f"--out {top}/NAME --overwrite trains one of these" in told
    assert told.index("--resume") < told.index("add --overwrite, which deletes all runs in the folder")
    assert (checkpoint_steps(top / "fp32"), checkpoint_steps(top / "terngrad")) == ([12], [7])


@pytest.mark.parametrize(("method", "every"), [("fp32", 0), ("terngrad", 0), ("LocalSGD(every=8)", 8)])
def test_the_record_has_the_steps_from_exchange_to_exchange(method: str, every: int) -> None:
    assert config_of(replace(PLAN, method=method))["local_steps"] == every
