"""The script of TernGrad's CIFAR-10 table: what a run is told, and which runs a row compares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import terngrad_cifar10
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.tasks import build

pytestmark = pytest.mark.repository


def write_run(run: Any, accuracy: float, method: str) -> None:
    """Write what a whole run leaves."""
    (run.folder / "checkpoint").mkdir(parents=True)
    row = {"event": "eval", "step": run.steps, "accuracy": accuracy, "loss": 1.0, "bits_per_element": 2.0}
    (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run.folder / "config.json").write_text(json.dumps({"method": method}))


def test_a_row_compares_runs_of_the_same_seed(tmp_path: Path) -> None:
    """And leaves out a seed of which one run is missing."""
    arguments = argparse.Namespace(samples=4096, work=tmp_path, json=None)
    accuracy = {("fp32", 0): 0.5, ("fp32", 1): 0.6, ("fp32", 2): 0.9, ("terngrad", 0): 0.4, ("terngrad", 1): 0.48}
    for run in terngrad_cifar10.runs(arguments):
        if (run.workers, run.decay) == (2, 0.004) and (run.method, run.seed) in accuracy:
            assert run.steps == 32
            method = {"fp32": "FP32()", "terngrad": "TernGrad()"}[run.method]
            write_run(run, accuracy[run.method, run.seed], method)
    found = terngrad_cifar10.collect(arguments)
    assert len(found["runs"]) == 5
    (line,) = found["table"]
    assert (line["seeds"], line["workers"], line["paper_steps"]) == (2, 2, 300_000)
    assert line["fp32_accuracy_mean"] == pytest.approx(0.55)
    assert line["difference_points_mean"] == pytest.approx(-11.0)
    # Of -10 and -12.
    assert line["difference_points_std"] == pytest.approx(2**0.5)


def test_runs_have_the_papers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network, crops, optimizer and batches as published; and every option is one of the task's or the run's."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(terngrad_cifar10, "train", lambda task, folder, options: told.append(options))
    for run in terngrad_cifar10.runs(argparse.Namespace(samples=98_304, work=tmp_path)):
        run.go(tmp_path)
    assert {(o["workers"], o["batch"], o["steps"]) for o in told} == {(2, 128, 768), (16, 2048, 48)}
    settings = {"model", "crop", "optimizer", "lr", "schedule", "weight_decay", "ema", "batch", "steps", "eval_every"}
    for options in told:
        named = {name.replace("-", "_"): value for name, value in options.items()}
        task = build("cifar10", **{name: named.pop(name) for name in settings}, data=str(named.pop("data")))
        assert (task.crop, task.lr, task.optimizer, task.ema) == (24, 2e-4, "adam", 0.9999)
        assert task.learning_rate(0) == task.learning_rate(task.steps - 1)
        RunConfig(task=task, simulate=True, **named)
