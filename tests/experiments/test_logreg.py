"""The ``logreg`` task: its objective, its shares, its proximal step, real workers and simulated ones."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_help import Listener, gradwire, model_of, same
from typer.testing import CliRunner

import gradwire as gw
from gradwire.tools.cli.app import app
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import DataError, UsageError
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.order import share
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build, logreg
from gradwire.tools.experiments.tasks.readers import read_libsvm


@pytest.fixture
def plan(small_libsvm: Path) -> RunConfig:
    task = build("logreg", data=str(small_libsvm), steps=20, eval_every=10, l2=0.01, lr=0.5)
    return RunConfig(task=task, method="fp32", workers=3, simulate=True, log_every=5)


def objective(path: Path, x: torch.Tensor, l2: float, l1: float = 0.0) -> torch.Tensor:
    """Write the task's formula down again, in float64."""
    rows = read_libsvm(path)
    losses = torch.log1p(torch.exp(-rows.labels * (rows.dense(torch.float64) @ x)))
    return losses.mean() + l2 / 2 * x.square().sum() + l1 * x.abs().sum()


def weights_of(folder: Path) -> torch.Tensor:
    return model_of(folder)["weight"].flatten().to(torch.float64)


@pytest.mark.parametrize("split", ["label", "random"])
def test_full_gradients_over_all_shares_are_gradient_descent_on_the_objective(
    plan: RunConfig, small_libsvm: Path, tmp_path: Path, split: str
) -> None:
    folder = run.train(replace(plan, task=replace(plan.task, split=split)), Listener(), folder=tmp_path / "a")  # type: ignore[call-arg]
    x = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    for _ in range(20):
        (gradient,) = torch.autograd.grad(objective(small_libsvm, x, 0.01), x)
        x = (x - 0.5 * gradient).detach().requires_grad_()
    # 20 steps, each adding a few float32 roundings of numbers below 4.
    torch.testing.assert_close(weights_of(folder), x.detach(), rtol=0, atol=20 * 4 * 2.0**-22)


def test_reported_losses_are_the_objective(plan: RunConfig, small_libsvm: Path, tmp_path: Path) -> None:
    listener = Listener()
    task = replace(plan.task, l1=0.02)  # type: ignore[call-arg]
    folder = run.train(replace(plan, task=task, log_every=1), listener, folder=tmp_path / "a")
    last = listener.rows[-1]
    assert last["event"] == "eval"
    expected = float(objective(small_libsvm, weights_of(folder), 0.01, 0.02))
    # A margin in float32 errs by 2^-20 at most (12 terms below 4), and the loss has slope 1.
    assert last["loss"] == pytest.approx(expected, abs=2.0**-20)
    trained = {row["step"]: row["loss"] for row in listener.rows if row["event"] == "train"}
    evaluated = {row["step"]: row["loss"] for row in listener.rows if row["event"] == "eval"}
    assert trained[1] == pytest.approx(math.log(2), abs=1e-6)
    assert trained[11] == pytest.approx(evaluated[10], abs=2.0**-20), "the loss at the weights before the step"
    right = sum(
        (margin >= 0) == (label > 0)
        for margin, label in zip(
            read_libsvm(small_libsvm).dense(torch.float64) @ weights_of(folder), read_libsvm(small_libsvm).labels
        )
    )
    assert last["accuracy"] == pytest.approx(int(right) / 90)


def test_sorted_by_label_the_workers_gradients_differ_and_their_mean_does_not(plan: RunConfig) -> None:
    rows = {}
    for split in ("label", "random"):
        engine = SimulatedEngine(replace(plan, task=replace(plan.task, split=split)))  # type: ignore[call-arg]
        gradients = []
        for rank in range(3):
            part = share(engine.order.batch, rank, 3)
            inputs, targets = engine.source.batch(engine.order.indices(0), part, seed=0, step=0)
            loss = plan.task.loss(engine.model(inputs), targets)
            gradients.append(torch.autograd.grad(loss, engine.parameters)[0].flatten())
        rows[split] = torch.stack(gradients).to(torch.float64)
    # Means over 90 rows of float32 sums of numbers of at most 1/2.
    torch.testing.assert_close(rows["label"].mean(0), rows["random"].mean(0), rtol=0, atol=1e-7)
    spread = {split: float(r.sub(r.mean(0)).square().sum(1).mean()) for split, r in rows.items()}
    assert spread["label"] > 4 * spread["random"]


def test_label_order_is_stable_and_random_order_is_a_fixed_draw() -> None:
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    assert logreg.split_order(labels, "label").tolist() == [1, 3, 4, 0, 2]
    drawn = logreg.split_order(torch.ones(50), "random")
    assert sorted(drawn.tolist()) == list(range(50))
    assert torch.equal(drawn, logreg.split_order(torch.ones(50), "random"))
    assert not torch.equal(drawn, torch.arange(50))


def test_l1_makes_weights_exactly_zero(plan: RunConfig, tmp_path: Path) -> None:
    task = replace(plan.task, l1=0.03, steps=60, eval_every=60)  # type: ignore[call-arg]
    sparse = run.train(replace(plan, task=task), Listener(), folder=tmp_path / "sparse")
    dense = run.train(replace(plan, task=replace(task, l1=0.0)), Listener(), folder=tmp_path / "dense")  # type: ignore[call-arg]
    assert 2 <= int((weights_of(sparse) == 0).sum()) < 12
    assert int((weights_of(dense) == 0).sum()) == 0
    assert isinstance(task.build_optimizer(task.build_model()), gw.ProximalSGD)


def test_a_proximal_run_resumes_in_the_same_bits(plan: RunConfig, tmp_path: Path) -> None:
    task = replace(plan.task, l1=0.01, momentum=0.5, batch=6, lr=0.2)  # type: ignore[call-arg]
    plan = replace(plan, task=task, method="terngrad")
    whole = run.train(plan, Listener(), folder=tmp_path / "whole")
    half = run.train(plan, Listener(), folder=tmp_path / "half", stop_after=7)
    assert not same(whole, half)
    run.resume(half, Listener())
    assert same(whole, half)


def test_the_small_vector_is_compressed(plan: RunConfig, tmp_path: Path) -> None:
    folder = run.train(replace(plan, method="terngrad"), Listener(), folder=tmp_path / "a")
    link = json.loads((folder / "config.json").read_text())["link"]
    assert link["dense_parameters"] == []
    assert replace(plan, min_numel=100).link_options()["min_numel"] == 100
    assert replace(plan, task=build("digits", batch=66)).link_options()["min_numel"] is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "labels"}, "did you mean 'label"),
        ({"l2": -1.0}, "l2 = -1.0"),
        ({"l1": math.inf}, "l1 = inf"),
        ({"batch": -1}, "batch = -1: must be at least 0"),
        ({"weight_decay": 0.1}, "set l2"),
        ({"l1": 0.1, "optimizer": "adam"}, "proximal step of sgd"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build("logreg", **settings)


def test_only_logreg_takes_whole_shares() -> None:
    with pytest.raises(UsageError, match="batch = 0: must be at least 1"):
        build("digits", batch=0)


def test_more_workers_than_rows_are_refused(plan: RunConfig) -> None:
    with pytest.raises(UsageError, match="90 samples cannot be shared by 91 workers"):
        SimulatedEngine(replace(plan, workers=91))


def test_rows_that_do_not_fit_dense_are_refused(small_libsvm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logreg, "DENSE_BYTES", 4 * 90 * 12 - 1)
    with pytest.raises(DataError, match="90 rows of 12 features"):
        build("logreg", data=str(small_libsvm)).load()


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_shares_are_disjoint_and_complete(
    plan: RunConfig, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logreg, "EVALUATION_ROWS", 7)
    source = plan.task.load()
    parts = [inputs for rank in range(world_size) for inputs, _ in source.evaluation(rank, world_size)]
    whole = torch.cat([inputs for inputs, _ in source.evaluation(0, 1)])
    assert whole.shape == (90, 12)
    assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())


@pytest.mark.ranks
def test_real_and_simulated_workers_end_in_the_same_bits(plan: RunConfig, tmp_path: Path) -> None:
    plan = replace(plan, task=replace(plan.task, l1=0.01), method="terngrad")  # type: ignore[call-arg]
    simulated = run.train(plan, Listener(), folder=tmp_path / "simulated")
    real = run.train(replace(plan, simulate=False), Listener(), folder=tmp_path / "real")
    assert same(simulated, real)


def weights_of_each(folder: Path, simulated: bool) -> list[torch.Tensor]:
    """Return each worker's own weights in a run's newest checkpoint, in float64."""
    parts = RunFolder(folder)
    if simulated:
        model = parts.load_part("rank-0")["model"]
        return [model[f"{worker}.weight"].flatten().to(torch.float64) for worker in range(3)]
    return [parts.load_part(f"rank-{rank}")["model"]["weight"].flatten().to(torch.float64) for rank in range(3)]


@pytest.mark.parametrize("simulated", [True, pytest.param(False, marks=pytest.mark.ranks)])
def test_with_local_steps_each_objective_is_that_of_the_weights_it_is_told_of(
    plan: RunConfig, small_libsvm: Path, tmp_path: Path, simulated: bool
) -> None:
    """All workers have the same weights after step 8, and step by themselves after it."""
    task = replace(plan.task, l2=0.1, steps=10, eval_every=2)  # type: ignore[call-arg]
    plan = replace(plan, task=task, method="LocalSGD(every=4)", simulate=simulated, log_every=1)
    listener = Listener()
    folder = run.train(plan, Listener(), folder=tmp_path / "a", stop_after=8)
    shared, *others = weights_of_each(folder, simulated)
    assert all(torch.equal(shared, other) for other in others)
    run.resume(folder, listener, stop_after=9)
    own = weights_of_each(folder, simulated)
    assert not any(torch.equal(shared, x) for x in own)
    run.resume(folder, listener)
    rows = {(row["event"], row["step"]): row["loss"] for row in listener.rows}
    # Margins in float32, as in the test of all losses; a penalty is of at least 1e-3.
    assert 0.1 / 2 * float(shared.square().sum()) > 1e-3
    whole = float(objective(small_libsvm, shared, 0.1))
    assert rows["eval", 10] == pytest.approx(whole, abs=2.0**-20), "the global parameters are those of step 8"
    assert rows["train", 9] == pytest.approx(whole, abs=2.0**-20), "before step 9 all have the same weights"
    source = task.load()
    losses = []
    for worker, x in enumerate(own):
        inputs, labels = source.batch(torch.arange(90), share(90, worker, 3), seed=0, step=0)
        margins = labels.to(torch.float64) * (inputs.to(torch.float64) @ x)
        losses.append(float(torch.log1p(torch.exp(-margins)).mean() + 0.1 / 2 * x.square().sum()))
    assert rows["train", 10] == pytest.approx(statistics.fmean(losses), abs=2.0**-20)


def test_the_command_line_compares_methods_on_it(small_libsvm: Path, tmp_path: Path) -> None:
    words = ["--data", small_libsvm, "--simulate", "--workers", 2, "--steps", 4, "--l1", 0.01, "--split", "random"]
    methods = ["--method", "fp32", "--method", "terngrad"]
    done = gradwire("compare", "logreg", *words, *methods, "--out", tmp_path / "a", "--json", fresh=True)
    assert done.returncode == 0, done.stderr
    assert [row["label"] for row in json.loads(done.stdout)] == ["fp32", "terngrad"]
    settings = json.loads((tmp_path / "a" / "terngrad" / "config.json").read_text())["plan"]["settings"]
    assert (settings["l1"], settings["split"], settings["batch"]) == (0.01, "random", 0)
    refused = CliRunner().invoke(app, ["train", "digits", "--l2", "0.1"])
    assert refused.exit_code == 2
    assert "unknown setting 'l2' of the task digits" in refused.stderr
