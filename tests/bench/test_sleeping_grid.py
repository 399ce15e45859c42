"""The grid with ranks that sleep: rows of their own kind, and one timeline for all cells of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradwire.tools.bench import step
from gradwire.tools.bench.predict import cases_of
from gradwire.tools.bench.step import StepGrid, compute_of, describe, measure_grid, read_rows
from gradwire.tools.bench.timing import percentiles_20_80
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology

TWO = Topology(hosts=2)
VARIANTS = ("compute", "ddp fp16", "ddp powersgd", "gradwire terngrad")


def row(variant: str, **fields: Any) -> dict[str, Any]:
    needed = {"hosts": 2, "bandwidth_bits_per_s": None, "step_time_s": 0.01, "cores": 2, "lab": TWO.spec()}
    return {"model": "lenet", "variant": variant, **needed, **fields}


def test_rows_of_ranks_that_computed_and_that_slept_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    # A row from before there was a choice lacks the field: its ranks computed.
    real, asleep = row("ddp fp32", n=1), row("ddp fp32", n=2, compute="sleep")
    path.write_text("".join(json.dumps(r) + "\n" for r in (asleep, real)))

    def forbid(*_: object, **__: object) -> None:
        raise AssertionError("nothing was to be measured")

    monkeypatch.setattr(step, "open_ranks", forbid)
    monkeypatch.setattr(step, "open_network", forbid)
    for kind, expected in (("real", real), ("sleep", asleep)):
        grid = StepGrid(models=["lenet"], topologies=[TWO], variants=["ddp fp32"], compute=kind)
        assert measure_grid(grid, path, lambda line: None) == [expected]
    assert [compute_of(r) for r in (real, asleep)] == ["real", "sleep"]


@pytest.mark.parametrize("times", [[0.3], [0.2, 0.3], [0.3, 0.1, 0.2], [0.1, 0.2, 0.2, 0.9]])
def test_percentiles_of_few_steps_lie_among_them(times: list[float]) -> None:
    low, high = percentiles_20_80(times)
    assert min(times) <= low <= high <= max(times)


def test_an_unknown_kind_of_computing_is_refused() -> None:
    with pytest.raises(UsageError, match="one of real, sleep, cuda"):
        StepGrid(models=["lenet"], topologies=[TWO], compute="asleep")


def test_the_performance_model_is_not_judged_by_ranks_that_slept() -> None:
    timeline = {"forward_s": 1.0, "buckets": [], "backward_s": 1.0, "after_s": 1.0}
    rows = [row("compute", compute="sleep", timeline=timeline), row("ddp fp32", compute="sleep")]
    assert cases_of(rows) == []
    with pytest.raises(RunError, match="no step without an exchange"):
        cases_of([*rows, row("ddp fp32", compute="real")])


@pytest.mark.ranks
def test_all_cells_of_a_model_sleep_through_one_timeline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def grid(**fields: Any) -> StepGrid:
        topologies = [Topology(hosts=n) for n in fields.pop("hosts")]
        given = {"budget_s": 0.1, "cell_budget_s": 1.0, "loopback": True, "compute": "sleep", "variants": VARIANTS}
        return StepGrid(models=["lenet"], topologies=topologies, **{**given, **fields})

    said: list[str] = []
    first = measure_grid(grid(hosts=[2], variants=VARIANTS[1:]), path, said.append)
    assert [r["variant"] for r in first] == list(VARIANTS[1:])
    # The timeline is kept in a row of "compute", though nobody had asked for one.
    kept = read_rows(path)
    assert [r["variant"] for r in kept] == list(VARIANTS)
    assert all("asleep" in line for line in said)
    assert all(r["compute"] == "sleep" and r["samples"] >= 2 for r in kept)
    both = measure_grid(grid(hosts=[2, 3], variants=["compute"]), path, said.append)
    assert [r["hosts"] for r in both] == [2, 3]
    assert both[0]["timeline"] == both[1]["timeline"] == kept[0]["timeline"]
    slept_s = sum(both[0]["timeline"][key] for key in ("forward_s", "backward_s", "after_s"))
    # A sleep never ends early, whatever else runs on this machine.
    assert all(r["percentile_20_s"] >= slept_s for r in both)
    assert "asleep" in describe(both[0])
