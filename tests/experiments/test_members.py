"""Trainings whose workers come and go, replayed in this process: at which step each goes on, and the rows it keeps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.member import MemberEngine, MemberTrainer
from gradwire.tools.experiments.run_record import config_of
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.tasks.images import Images

STEPS = 24


def planned(method: str) -> RunConfig:
    task = build("digits", steps=STEPS, batch=8, eval_every=1000, schedule="cosine")
    return RunConfig(task=task, workers=2, method=method, log_every=1)


def train(
    membership: gw.Membership, plan: RunConfig, folder: Path, resumed: str, stop_after: int
) -> tuple[int, dict[int, list[float]]]:
    """Train as one worker; return its last step, and the learning rates of its local steps before each exchange."""
    run = RunFolder(folder / membership.name)
    if membership.name not in resumed:
        run = RunFolder.create(run.path)
        run.write_config(config_of(plan))
    past = run if membership.name in resumed else None
    engine = MemberEngine(plan, membership, past)
    rates: dict[int, list[float]] = defaultdict(list)
    engine.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates[engine.link.round].append(optimizer.param_groups[0]["lr"])
    )
    trainer = MemberTrainer(plan, engine, run, lambda row: None)
    if past is not None:
        trainer.follow(past)
    trainer.run(stop_after)
    return trainer.step, dict(rates)


def steps_of(folder: Path, event: str) -> list[int]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert [row["sent_bytes"] for row in rows] == sorted(row["sent_bytes"] for row in rows)
    return [row["step"] for row in rows if row["event"] == event]


@pytest.mark.parametrize("method", ["terngrad", "DiLoCo(every=4)"])
def test_newcomers_take_the_steps_of_the_others(method: str, tmp_path: Path) -> None:
    changes = [(2, "joins", "c"), (3, "is lost", "b"), (4, "joins", "b")]
    trace = gw.MembershipTrace.scripted("ab", *changes)
    found = gw.replay(trace, train, planned(method), tmp_path, "", STEPS)
    results = {name: result for name, result in found.items() if result is not None}
    assert {name: step for name, (step, _) in results.items()} == dict.fromkeys("abc", STEPS)
    rates, of_b, of_c = (results[name][1] for name in "abc")
    # What "b" computed while the others went on without it does not count.
    assert [*of_c] == [*rates][2:]
    assert {round: rates[round] for round in of_c} == of_c
    of_b.pop(3, None)
    assert {round: rates[round] for round in of_b} == of_b


def test_each_member_augments_by_draws_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[int, set[int]] = defaultdict(set)
    real = Images.batch

    def batch(self: Images, indices: Any, part: slice, *, seed: int, step: int) -> Any:
        seeds[step].add(seed)
        return real(self, indices, part, seed=seed, step=step)

    monkeypatch.setattr(Images, "batch", batch)
    gw.replay(gw.MembershipTrace.scripted("ab"), train, planned("fp32"), tmp_path, "", 3)
    assert {step: len(found) for step, found in seeds.items()} == dict.fromkeys(range(3), 2)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Folders of two workers: the checkpoint of "a" is at step 4, that of "b", which went on alone, at 6.

    The one of "a" has a row of step 5, as if it had been killed then.
    """
    trace = gw.MembershipTrace.scripted("ab", (4, "leaves", "a"))
    gw.replay(trace, train, planned("fp32"), tmp_path, "", 6)
    assert steps_of(tmp_path / "a", "train") == [1, 2, 3, 4]
    assert steps_of(tmp_path / "b", "train") == [1, 2, 3, 4, 5, 6]
    last = json.loads((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()[-1])
    RunFolder(tmp_path / "a").append_row({**last, "step": 5, "event": "train"})
    return tmp_path


@pytest.mark.parametrize(
    ("order", "trained", "evaluated"),
    [
        # Both go on from the checkpoint of the first worker, and each keeps the rows up to there.
        ("ab", {"a": [*range(1, 9)], "b": [*range(1, 9)]}, {"a": [0, 4, 8], "b": [0, 8]}),
        ("ba", {"a": [1, 2, 3, 4, 7, 8], "b": [*range(1, 9)]}, {"a": [0, 4, 8], "b": [0, 6, 8]}),
        # The first worker has no checkpoint: all begin anew.
        ("cab", {name: [*range(1, 9)] for name in "abc"}, {name: [0, 8] for name in "abc"}),
    ],
)
def test_workers_that_resume_write_no_step_twice(
    order: str, trained: dict[str, list[int]], evaluated: dict[str, list[int]], folders: Path
) -> None:
    trace = gw.MembershipTrace.scripted(order)
    found = gw.replay(trace, train, planned("fp32"), folders, "ab", 8)
    assert {name: result[0] for name, result in found.items() if result is not None} == dict.fromkeys(order, 8)
    assert {name: steps_of(folders / name, "train") for name in order} == trained
    assert {name: steps_of(folders / name, "eval") for name in order} == evaluated


def test_a_worker_that_ends_before_its_first_step_has_a_row_too(folders: Path) -> None:
    gw.replay(gw.MembershipTrace.scripted("ac"), train, planned("fp32"), folders, "a", 4)
    assert (steps_of(folders / "a", "train"), steps_of(folders / "a", "eval")) == ([1, 2, 3, 4], [0, 4])
    assert (steps_of(folders / "c", "train"), steps_of(folders / "c", "eval")) == ([], [4])
