"""Signs of life: how fast a run goes and when it will end, also where standard error is no terminal."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_help import Listener

from gradwire.tools.cli import commands as progress
from gradwire.tools.cli.commands import Progressing, Rate
from gradwire.tools.experiments import run, train
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.tasks import build


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(steps: int = 1000, **fields: Any) -> RunConfig:
    return RunConfig(task=build("digits", steps=steps), method="fp32", workers=2, simulate=True, **fields)


def row(step: int, event: str = "train", **fields: Any) -> dict[str, Any]:
    base = {"loss": 0.5, "accuracy": None, "step_time_s": 0.02, "bits_per_element": None}
    return {"step": step, "event": event, **base, **fields}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Progressing, Clock, list[str]]]:
    """Make a display without a thread, its clock, and the lines that it writes."""

    class Unstarted(threading.Thread):
        def start(self) -> None:
            return

    monkeypatch.setattr(progress.threading, "Thread", Unstarted)

    def make() -> tuple[Progressing, Clock, list[str]]:
        clock, lines = Clock(), list[str]()
        shown = Progressing(clock=clock, every_s=10.0)
        monkeypatch.setattr(shown, "say", lines.append)
        return shown, clock, lines

    return make


def test_a_line_comes_every_ten_seconds_before_anything_was_heard_of_the_workers(told: Any) -> None:
    shown, clock, lines = told()
    shown.start(plan())
    for _ in range(50):
        clock.now += 0.5
        shown.tick()
    assert lines == [
        "digits: fp32, 2 simulated workers, 1000 steps",
        "  step 0/1000  starting simulated workers, 10 s so far",
        "  step 0/1000  starting simulated workers, 20 s so far",
    ]


def test_the_first_evaluation_says_that_it_goes_on(told: Any) -> None:
    shown, clock, lines = told()
    shown.start(plan())
    shown.step(0, "evaluating")
    clock.now += 10
    shown.tick()
    assert lines[-1] == "  step 0/1000  evaluating, 10 s so far"


def test_a_line_tells_the_rate_and_the_time_left_before_the_first_row(told: Any) -> None:
    shown, clock, lines = told()
    shown.start(plan())
    for step in range(41):
        shown.step(step, "training")
        clock.now += 0.25
    shown.tick()
    # 40 steps in 10.25 seconds, of which the last quarter passed without a step.
    assert lines[-1] == "  step 40/1000  3.9 steps/s, 4.1 min left"
    shown.row(row(40))
    shown.step(44, "evaluating")
    clock.now += 10
    shown.tick()
    assert re.fullmatch(
        r"  step 44/1000  evaluating, [\d.]+ steps/s, [\d.]+ min left, loss 0.500, 20 ms/step", lines[-1]
    )


def test_lines_of_evaluations_count_as_signs_of_life_and_the_last_one_is_always_there(told: Any) -> None:
    shown, clock, lines = told()
    shown.start(plan())
    clock.now += 9
    shown.row(row(10, "eval", accuracy=0.5, step_time_s=None))
    shown.tick()
    assert len(lines) == 1
    clock.now += 1
    shown.row(row(20, "eval", accuracy=0.75, step_time_s=None))
    shown.tick()
    assert lines[1:] == ["  step 20/1000  starting simulated workers, 10 s so far, loss 0.500, acc. 75.00 %"]
    shown.row(row(1000, "eval", accuracy=0.9, step_time_s=None))
    for _ in range(2):
        clock.now += 10
        shown.tick()
    assert lines[2:] == ["  step 1000/1000  loss 0.500, acc. 90.00 %"]


def test_the_rate_is_that_of_the_latest_minute() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.steps_per_s() is None
    assert rate.left_s(10) is None
    rate.saw(5)  # A resumed run does not begin at 0.
    assert rate.steps_per_s() is None
    for step in range(6, 16):
        clock.now += 30
        rate.saw(step)
    assert rate.steps_per_s() == pytest.approx(1 / 30)
    assert rate.left_s(18) == pytest.approx(90)
    for step in range(16, 200):
        clock.now += 1
        rate.saw(step)
    assert rate.steps_per_s() == pytest.approx(1.0)
    # Where steps stop, the rate falls.
    clock.now += 60
    assert rate.steps_per_s() == pytest.approx(0.5)


def test_the_thread_of_plain_lines_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with Progressing(every_s=0.01) as shown:
        shown.start(plan())
        (thread,) = [t for t in threading.enumerate() if getattr(t, "_target", None) == shown._tick_on]
        while "starting simulated workers" not in capsys.readouterr().err.partition("so far")[0]:
            pass
    thread.join(10)
    assert not thread.is_alive()


def test_a_sentence_is_a_line_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = f"a checkpoint is kept: gradwire train --resume {'/folder' * 40} :fire: [/x]"
    Progressing().say(sentence)
    assert capsys.readouterr().err == f"{sentence}\n"


def test_a_simulated_run_tells_its_steps_before_any_row_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "TELL_EVERY_S", 0.0)
    listener = Listener()
    run.train(plan(5, log_every=5), listener, folder=tmp_path / "run")
    assert listener.steps[0] == (0, "evaluating")
    assert [step for step, activity in listener.steps if activity == "training"] == [0, 1, 2, 3, 4]


@pytest.mark.ranks
def test_real_workers_tell_their_steps_too(tmp_path: Path) -> None:
    listener = Listener()
    real = RunConfig(task=build("digits", steps=3), method="fp32", workers=2)
    run.train(real, listener, folder=tmp_path / "run")
    assert listener.steps[:2] == [(0, "evaluating"), (0, "training")]
    assert [r["step"] for r in listener.rows if r["event"] == "eval"] == [0, 3]
