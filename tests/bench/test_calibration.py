"""A calibration takes no longer than it may, and says what it had to leave out."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.drivers import Stage
from gradwire.model.calibrate import BOUNDS, Observation, calibrate, log_error
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load
from gradwire.tools.bench import predict as calibration
from gradwire.tools.bench.predict import cases_of, measure_machine
from gradwire.tools.bench.ranks import Deadline, OutOfTimeError, open_ranks
from gradwire.tools.bench.step import Cell, StepGrid, measure_grid
from gradwire.tools.lab import Topology

TRUTH = Machine(round_s=1e-3, call_s=2e-3, contention=2.5)
BUCKET = {"names": ["0.weight"], "numel": 500, "ready_s": 1e-3}
TIMELINE = {"forward_s": 1e-3, "buckets": [BUCKET], "backward_s": 2e-3, "after_s": 1e-3}


class Clock:
    """Moves on by a fixed time with each look at it."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def test_a_deadline_counts_down_to_nothing() -> None:
    clock = Clock()
    deadline = Deadline(5.0, clock)
    clock.now = 3.0
    assert (deadline.left_s, deadline.passed) == (2.0, False)
    clock.now = 9.0
    assert (deadline.left_s, deadline.passed) == (0.0, True)


@pytest.mark.ranks
def test_ranks_that_do_not_answer_in_time_are_ended() -> None:
    with open_ranks("lenet", 2, None, Deadline(0.0)) as ranks, pytest.raises(OutOfTimeError, match="did not answer"):
        ranks.ask("build", variant="ddp fp32")
    assert all(process.returncode is not None for process in ranks._processes)


class Answering:
    """Ranks that answer so many commands in time."""

    def __init__(self, commands: int) -> None:
        self.left = commands

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        self.left -= 1
        if self.left < 0:
            raise OutOfTimeError("late")
        if do == "timeline":
            return [{"timeline": TIMELINE}] * 2
        if do == "record":
            return [{"record": {}}] * 2
        return [{"times_s": [0.01] * arguments.get("count", 1), "cpu_s": 0.0, "counted": {}}] * 2


def cell(commands: int, variants: Sequence[str] = ("compute", "ddp fp32", "ddp fp16")) -> list[dict[str, Any]]:
    grid = StepGrid(models=["lenet"], topologies=[Topology(hosts=2)], variants=variants, budget_s=0.5, loopback=True)
    ranks: Any = Answering(commands)
    return Cell(grid, "lenet", Topology(hosts=2), ranks, None, 1000, clock=Clock()).measure(variants)


def test_a_cell_whose_time_runs_out_gives_rows_of_what_took_a_turn() -> None:
    # Three commands warm a variant up; one forgets the timeline; a turn is one a variant, and one for the timeline.
    whole = cell(1000)
    assert [r["variant"] for r in whole] == ["compute", "ddp fp32", "ddp fp16"]
    first_turn = cell(9 + 1 + 3 + 1)
    assert [r["variant"] for r in first_turn] == [r["variant"] for r in whole]
    assert first_turn[0]["timeline"] == TIMELINE
    assert first_turn[0]["samples"] < whole[0]["samples"]
    for commands in (0, 5, 10, 12, 13):
        with pytest.raises(OutOfTimeError):
            cell(commands)


def test_a_grid_ends_at_its_deadline_with_the_rows_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    base = {"model": "lenet", "hosts": 2, "bandwidth_bits_per_s": None, "step_time_s": 0.01, "cores": 2}
    there = {**base, "lab": "loopback,hosts=2", "variant": "compute"}
    path.write_text(json.dumps(there) + "\n")
    grid = StepGrid(models=["lenet"], topologies=[Topology(hosts=2)], variants=["compute", "ddp fp32"], loopback=True)
    assert measure_grid(grid, path, lambda line: None, Deadline(0.0)) == [there]


def rows_of(count: int) -> list[dict[str, Any]]:
    base = {"bandwidth_bits_per_s": None, "step_time_s": 0.01, "cores": 2, "model": "lenet"}
    rows = []
    for hosts in (2, 4):
        place = {**base, "hosts": hosts, "lab": f"loopback,hosts={hosts}"}
        rows += [{**place, "variant": "compute", "timeline": TIMELINE}]
        rows += [{**place, "variant": v} for v in ("ddp fp32", "gradwire fp32", "gradwire bf16")]
    return rows[:count]


def machine_from(count: int, path: Path, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> Any:
    def measured(grid: object, where: Path, say: object, deadline: Deadline) -> list[dict[str, Any]]:
        assert deadline.left_s <= 0.7 * 30
        return rows_of(count)

    monkeypatch.setattr(calibration, "measure_grid", measured)
    monkeypatch.setattr(gw, "warm_up", lambda method: 0.0)
    said: list[str] = []
    return measure_machine(path, said.append, limit_s=30, clock=clock), said


def test_few_steps_are_used_and_that_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    machine, said = machine_from(3, path, monkeypatch, Clock())
    assert machine.source == "2 of 18 steps on loopback, in the 30 s allowed"
    assert said == [
        f"{machine.source}: give more with --calibration-limit, or calibrate anew on an idle machine with --calibrate"
    ]
    assert Machine.read(path) == machine
    assert machine.most_workers == 2


def test_without_any_step_the_defaults_serve_and_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    # The last: steps were measured, but no codec was timed before its share of the time was over.
    for count, tick_s in ((0, 0.0), (1, 0.0), (8, 26.0)):
        machine, said = machine_from(count, path, monkeypatch, Clock(tick_s))
        assert machine.source == "defaults: no step was measured in the 30 s allowed"
        assert machine.round_s == DEFAULT.round_s
        assert len(said) == 1
        assert not path.exists()


def test_costs_that_cannot_be_kept_serve_once_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()
    path = tmp_path / "home" / "gradwire" / "calibration.json"
    machine, said = machine_from(8, path, monkeypatch, Clock())
    assert machine.source.startswith("6 of 18 steps on loopback")
    assert machine.most_workers == 4
    assert said[-1].startswith("not kept, so that the next plan measures again (")
    assert str(path.parent) in said[-1]


def test_cases_end_at_the_deadline() -> None:
    assert len(cases_of(rows_of(8))) == 6
    assert cases_of(rows_of(8), deadline=Deadline(0.0)) == []


def observations(machine: Machine) -> list[Observation]:
    """Steps of a machine whose costs are known, over links, sizes and ranks that tell them apart."""
    found = []
    bucket = ReadyBucket(names=("w",), numel=1000, ready_s=5e-3)
    timeline = Timeline(forward_s=5e-3, buckets=(bucket,), backward_s=1e-2, after_s=1e-3)
    for kind, sent in itertools.product(("ring", "all_to_all"), (1_000, 10_000_000)):
        for ranks, rate in itertools.product((2, 4), (None, 12.5e6)):
            rounds = 2 * (ranks - 1) if kind == "ring" else 1
            job = BucketJobs((), ((Stage(2e-3, kind, sent, rounds, 2 * (ranks - 1)), Stage(1e-3)),), False)
            link, load = LinkModel(bandwidth_bytes_per_s=rate), Load(ranks=ranks, cores=2)
            one = Observation(timeline, ExchangeProfile("x", ranks, (job,)), link, load, 1.0)
            found.append(replace(one, step_s=one.predict(machine)))
    return found


def test_few_steps_draw_costs_towards_the_defaults() -> None:
    measured = observations(TRUTH)
    with pytest.raises(HyperparameterError, match="measure more"):
        calibrate([], "none", few=True)
    for count in (1, 4):
        fitted = calibrate(measured[:count], "few", few=True)
        assert all(abs(log_error(o, fitted)) <= abs(log_error(o, DEFAULT)) for o in measured[:count])
    # Loopback tells nothing of links.
    fitted = calibrate(measured[:2], "few", few=True, fit_links=False)
    assert fitted.efficiency == DEFAULT.efficiency


def test_steps_that_are_all_fitted_promise_nothing_of_others() -> None:
    measured = observations(TRUTH)
    for count in (1, 4, len(BOUNDS)):
        assert calibrate(measured[:count], "few", few=True).residual == DEFAULT.residual
    # Eight numbers are fitted, or seven without that of links.
    sure = replace(DEFAULT, residual=0.0)
    for fit_links, count in ((True, len(BOUNDS)), (True, 12), (False, len(BOUNDS) - 1), (False, 12)):
        few = [replace(one, step_s=one.step_s * (3.0 if i % 2 else 1.0)) for i, one in enumerate(measured[:count])]
        fitted = calibrate(few, "few", sure, fit_links=fit_links, few=True)
        squares = sum(log_error(one, fitted) ** 2 for one in few)
        spare = count - len(BOUNDS) + (0 if fit_links else 1)
        assert fitted.residual == pytest.approx(math.sqrt(squares / (spare or count)))
        assert fitted.residual > 0.01


def test_a_fit_that_is_stopped_gives_the_best_costs_so_far() -> None:
    measured, looks = observations(TRUTH), [0]

    def cost(machine: Machine) -> float:
        return sum(abs(log_error(o, machine)) for o in measured)

    def after(count: int) -> Machine:
        looks[0] = 0

        def stop() -> bool:
            looks[0] += 1
            return looks[0] > count

        return calibrate(measured, "stopped", stop=stop)

    assert cost(after(0)) == pytest.approx(cost(DEFAULT), rel=1e-3)
    costs = [cost(after(count)) for count in (0, 15, 40, 10_000)]
    assert costs[3] < costs[1] < costs[0]
    assert costs[3] <= costs[2] < costs[0]
