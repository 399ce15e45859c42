"""What a comparison says of a slow link, beside what it measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gradwire.exchange.planning import Options
from gradwire.model.forecast import forecast
from gradwire.model.machine import DEFAULT
from gradwire.model.profile import Profile
from gradwire.tools.bench.predict import default_path
from gradwire.tools.bench.profile import usual_options
from gradwire.tools.cli import commands as expected_module
from gradwire.tools.cli.commands import expected
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import RunError
from gradwire.tools.experiments.tasks import Task, build
from gradwire.tools.experiments.tasks.text import Text

PLAN = RunConfig(task=build("digits", steps=10), workers=4)


def test_a_step_at_100_mbit_is_predicted_for_each_method_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "calibration.json"
    monkeypatch.setattr(expected_module, "default_path", lambda: kept)
    first, far, second = expected(PLAN, ["fp32", "terngrad", "diloco"])
    assert first.startswith("Predicted, not measured: on 4 machines at 100 Mbit/s a step would take fp32 ")
    assert ", terngrad " in first
    assert "diloco" not in first, "its steps without an exchange are no measure of its time to an accuracy"
    assert "a reference machine's collectives" in first
    assert "one-way delays count. An exchange waits for 12 with fp32, 3 with terngrad." in far
    assert "gradwire plan --profile digits" in second
    DEFAULT.save(kept)
    assert "this machine's collectives" in expected(PLAN, ["fp32"])[0]


def test_nothing_is_predicted_of_what_no_network_carries_or_the_model_does_not_know() -> None:
    assert expected(replace(PLAN, simulate=True), ["fp32"]) == []
    assert expected(replace(PLAN, lab="hosts=2,bandwidth=100mbit"), ["fp32"]) == []
    assert expected(replace(PLAN, task=build("graph")), ["fp32"]) == []


def test_the_model_and_the_share_that_were_trained_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunConfig(task=build("text", model="transformer", batch=6), workers=2)
    profiles, samples = list[Profile](), list[int]()

    def noted(known: Profile, *others: Any) -> Any:
        profiles.append(known)
        return forecast(known, *others)

    def counted(task: Task, output: Tensor, target: Tensor) -> Tensor:
        samples.append(len(target))
        return Task.loss(task, output, target)

    monkeypatch.setattr(expected_module, "forecast", noted)
    monkeypatch.setattr(Text, "loss", counted)
    first, _ = expected(plan, ["fp32"])
    assert "on 2 machines" in first
    assert [profile.numel for profile in profiles] == [sum(p.numel() for p in plan.task.build_model().parameters())]
    assert set(samples) == {3}


def test_options_that_change_what_is_exchanged_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Options]()

    def noted(known: Profile, methods: Any, setting: Any, machine: Any, options: Options) -> Any:
        given.append(options)
        return forecast(known, methods, setting, machine, options)

    monkeypatch.setattr(expected_module, "forecast", noted)
    expected(replace(PLAN, exclude=("*.bias",), min_numel=7, warmup_steps=5, collective="all_gather"), ["terngrad"])
    assert given == [Options(exclude=("*.bias",), min_numel=7, collective="all_gather")]
    assert usual_options("logreg").min_numel == 0
    assert usual_options("digits").min_numel is usual_options("train.py").min_numel is None


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def not_allowed(path: Path, exists: Callable[..., bool] = Path.exists, **options: Any) -> bool:
    if path.name == "calibration.json":
        raise PermissionError(13, "Permission denied", str(path))
    return exists(path, **options)


@pytest.mark.parametrize(("called", "instead"), [("home", no_home), ("exists", not_allowed)])
def test_without_a_home_that_can_be_read_a_reference_machine_serves(
    monkeypatch: pytest.MonkeyPatch, called: str, instead: Callable[..., object]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, called, instead)
    with pytest.raises(RunError, match="set XDG_CACHE_HOME to a folder"):
        default_path()
    assert "a reference machine's collectives" in expected(PLAN, ["fp32"])[0]


@pytest.mark.parametrize(
    ("settings", "workers", "by_name"),
    [({}, 4, True), ({"lr": 0.1, "optimizer": "adam"}, 4, True), ({"batch": 32}, 4, False), ({}, 2, False)],
)
def test_a_profile_by_name_is_named_if_it_is_of_the_same_training(
    settings: dict[str, Any], workers: int, by_name: bool
) -> None:
    lines = expected(RunConfig(task=build("digits", **settings), workers=workers), ["fp32"])
    assert len(lines) == 2 + by_name
    assert any("gradwire plan --profile digits" in line for line in lines) == by_name
