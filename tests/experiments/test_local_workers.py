"""Runs whose workers step by themselves: real and simulated ones, resumed, and with an exchange in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import Listener

from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.tasks import build

STREAMING = "StreamingDiLoCo(every=6, fragments=2, delay=2, inner=QSGDinf())"
PLAN = RunConfig(
    task=build("digits", steps=14, eval_every=7, weight_decay=1e-3, optimizer="adam", lr=0.002),
    method=STREAMING,
    workers=2,
)


def parameters(folder: Path, workers: int) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of each worker at a run's end."""
    parts = RunFolder(folder)
    if RunConfig.from_json(parts.read_config()["plan"]).simulate:
        whole = parts.load_part("rank-0")["model"]
        return [
            {name[2:]: x for name, x in whole.items() if name.startswith(f"{worker}.")} for worker in range(workers)
        ]
    return [parts.load_part(f"rank-{worker}")["model"] for worker in range(workers)]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks
@pytest.mark.parametrize("method", [STREAMING, "LocalSGD(every=4, inner=ErrorFeedback())", "ChocoSGD(gamma=0.8)"])
def test_real_and_simulated_workers_end_in_the_same_bits(tmp_path: Path, method: str) -> None:
    plan = replace(PLAN, method=method)
    simulated = run.train(replace(plan, simulate=True), Listener(), folder=tmp_path / "simulated")
    real = run.train(plan, Listener(), folder=tmp_path / "real")
    found, expected = parameters(simulated, 2), parameters(real, 2)
    for ours, theirs in zip(found, expected):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())
    # At the end, after 14 steps, workers have gone on by themselves.
    assert not all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    # Real workers whose parameters stay different send their mean for each evaluation.
    if "Choco" not in method:
        # Not of the rows before: how much of an exchange in flight has been sent by then is a matter of time.
        assert rows(simulated)[-1]["sent_bytes"] == rows(real)[-1]["sent_bytes"]
    fields = ("step", "event", "accuracy", "dense_bytes")
    for one, other in zip(rows(simulated), rows(real)):
        assert {field: one[field] for field in fields} == {field: other[field] for field in fields}
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_a_simulation_is_resumed_with_an_exchange_in_flight(tmp_path: Path) -> None:
    """Fragments are exchanged after steps 3, 6, 9 and 12, and take effect two steps later."""
    plan = replace(PLAN, simulate=True)
    whole = run.train(plan, Listener(), folder=tmp_path / "whole")
    for stop in (4, 5, 6):
        half = run.train(plan, Listener(), folder=tmp_path / f"half {stop}", stop_after=stop)
        run.resume(half, Listener())
        for ours, theirs in zip(parameters(half, 2), parameters(whole, 2)):
            assert all(torch.equal(ours[name], x) for name, x in theirs.items())
        assert rows(half)[-1]["sent_bytes"] == rows(whole)[-1]["sent_bytes"]


@pytest.mark.parametrize("method", [STREAMING, "LocalSGD(every=4)", "DiLoCo()", "EASGD()"])
def test_an_average_that_no_evaluation_would_use_is_refused(tmp_path: Path, method: str) -> None:
    """Evaluations are of the global parameters, or under gossip of the mean of the workers' averages."""
    plan = replace(PLAN, task=build("digits", ema=0.9, momentum=0.0), method=method, simulate=True)
    with pytest.raises(UsageError, match="no average is kept: leave --ema out"):
        run.train(plan, Listener(), folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    run.check_link(replace(plan, task=build("digits", momentum=0.0)))
    run.check_link(replace(plan, method="ChocoSGD(gamma=0.8)"))
