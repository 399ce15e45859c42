"""What a comparison says of a slow link, beside what it measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.model.machine import DEFAULT
from gradwire.tools.cli import commands as expected_module
from gradwire.tools.cli.commands import expected
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.tasks import build

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
