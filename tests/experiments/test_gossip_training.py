"""Trainings whose workers stay different: rows of their mean, checkpoints of each, and scripts that know nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_help import Listener, gradwire

import gradwire as gw
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.tasks import build

pytestmark = pytest.mark.ranks
EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = RunConfig(
    task=build("digits", steps=10, eval_every=5, ema=0.5, batch=66),
    method="PowerGossip(iterations=2)",
    workers=3,
    checkpoint_every=5,
    log_every=5,
)


def rows_of(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "event", "loss", "accuracy", "sent_bytes")
    return [{key: row[key] for key in kept} for row in map(json.loads, lines)]


def test_a_training_is_resumed_exactly_with_each_ranks_own_parameters_and_average(tmp_path: Path) -> None:
    whole = run.train(PLAN, Listener(), folder=tmp_path / "whole")
    half = run.train(PLAN, Listener(), folder=tmp_path / "half", stop_after=5)
    run.resume(half, Listener())
    assert rows_of(half) == rows_of(whole)


def test_what_cannot_be_is_refused_before_workers_start(tmp_path: Path) -> None:
    with pytest.raises(gw.IncompatibleError, match="3 workers make no rectangle"):
        run.train(replace(PLAN, method="DPSGD(graph='torus')"), Listener(), folder=tmp_path / "a")


def test_an_unchanged_script_gossips() -> None:
    words = ["--nproc-per-node", 3, "--method", "ChocoSGD(gamma=0.8)", EXAMPLES / "digits.py", "--steps", 60]
    done = gradwire("run", *words)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("training accuracy ")[1].split()[0]) > 0.9
    sent, last = [line for line in done.stderr.splitlines() if line.startswith("gradwire:")]
    assert "ChocoSGD" in sent
    assert "each worker sent" in sent
    assert "each worker has parameters of its own" in last
