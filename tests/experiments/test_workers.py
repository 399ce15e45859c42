"""Real worker processes: the same bits as the simulation, and no process left behind, however a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import norm_worker
import pytest
import torch
from run_help import Listener, alive, children, model_of, same, start_gradwire, wait_for

from gradwire.tools.experiments import launch, run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import RunError, UsageError, WorkerError
from gradwire.tools.experiments.folder import RunFolder, checkpoint_steps
from gradwire.tools.experiments.run_record import WORKERS_PER_CORE, check_workers, cores
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build
from ranks import run_script

pytestmark = pytest.mark.ranks
PLAN = RunConfig(
    task=build("digits", steps=12, eval_every=6, weight_decay=1e-3), method="terngrad", workers=4, checkpoint_every=6
)


def test_real_and_simulated_workers_end_in_the_same_bits(tmp_path: Path) -> None:
    listener = Listener()
    simulated = run.train(replace(PLAN, simulate=True), listener, folder=tmp_path / "simulated")
    whole = run.train(PLAN, listener, folder=tmp_path / "whole")
    assert same(simulated, whole)
    check_ends(simulated, whole)


def test_a_resumed_run_ends_in_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    plan, listener = replace(PLAN, workers=2), Listener()
    simulated = run.train(replace(plan, simulate=True), listener, folder=tmp_path / "simulated")
    half = run.train(plan, listener, folder=tmp_path / "half", stop_after=6)
    assert not same(simulated, half)
    run.resume(half, listener)
    assert same(simulated, half)
    check_ends(simulated, half)


def test_real_workers_report_what_simulated_ones_do(tmp_path: Path) -> None:
    plan, rows = replace(PLAN, workers=2, method="Threshold(threshold=0.005)"), []
    for simulate in (True, False):
        folder = run.train(replace(plan, simulate=simulate), Listener(), folder=tmp_path / str(simulate))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows.append([row["gauges"]["density"] for row in lines if row["event"] == "train"])
    simulated, real = rows
    assert len(real) == len(simulated) == 2
    for one, other in zip(real, simulated):
        # Means over ranks are divided before and after they are added up.
        assert one == pytest.approx(other, rel=1e-9)


def check_ends(*folders: Path) -> None:
    """Check that runs end with the same numbers."""
    ends = [json.loads((f / "metrics.jsonl").read_text().splitlines()[-1]) for f in folders]
    for field in ("sent_bytes", "received_bytes", "dense_bytes", "accuracy"):
        assert len({end[field] for end in ends}) == 1


def test_batch_normalisation_follows_ddp(tmp_path: Path) -> None:
    run_script(Path(norm_worker.__file__), tmp_path / "real.pt")
    real = torch.load(tmp_path / "real.pt", weights_only=True)
    simulated = norm_worker.train(SimulatedEngine(norm_worker.plan(simulate=True)))
    for name, value in simulated["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(value, real["model"][name]), name
    assert simulated["accuracy"] == real["accuracy"]
    assert simulated["loss"] == pytest.approx(real["loss"])


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A run of two workers that would take long, past its first checkpoint; with its worker processes."""
    words = ["--steps", 100_000, "--checkpoint-every", 5, "--eval-every", 100_000, "--workers", 2, "--batch", 8]
    process = start_gradwire("train", "digits", *words, "--out", tmp_path / "run")
    try:
        wait_for(lambda: process.poll() is not None or bool(checkpoint_steps(tmp_path / "run")), 60, "a checkpoint")
        workers = children(process.pid)
        assert len(workers) == 2
        yield process, workers, tmp_path / "run"
    finally:
        process.kill()
        process.communicate()


def test_a_killed_worker_ends_the_run_with_one_line(
    endless: tuple[subprocess.Popen[str], list[int], Path],
) -> None:
    process, workers, folder = endless
    os.kill(workers[1], signal.SIGKILL)
    _, told = process.communicate(timeout=80)
    assert process.returncode == 1
    (line,) = [line for line in told.splitlines() if line.startswith("gradwire:")]
    assert "worker 1 was killed by SIGKILL" in line
    assert "Traceback" not in told
    assert not any(map(alive, workers))
    (step,) = checkpoint_steps(folder)
    assert RunFolder(folder).load_part("shared")["step"] == step
    assert not list(folder.glob("**/*.tmp"))
    assert model_of(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("simulate", [False, True])
def test_a_run_that_is_interrupted_leaves_a_checkpoint_and_goes_on_to_the_same_bits(
    tmp_path: Path, number: signal.Signals, simulate: bool
) -> None:
    words = ["--method", "errorfeedback", "--eval-every", 100_000, "--workers", 2, "--batch", 8, "--log-every", 3]
    words += ["--simulate"] if simulate else []
    process = start_gradwire("train", "digits", "--steps", 100_000, *words, "--out", tmp_path / "run")
    rows = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: process.poll() is not None or (rows.exists() and len(rows.read_text()) > 2000), 60, "rows")
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    (step,) = checkpoint_steps(tmp_path / "run")
    assert step % 3 == 0
    assert f"a checkpoint of step {step} is kept: gradwire train --resume {tmp_path / 'run'}" in " ".join(told.split())
    assert "Traceback" not in told
    run.resume(tmp_path / "run", Listener(), stop_after=step + 3)
    plan = RunConfig.from_json(RunFolder(tmp_path / "run").read_config()["plan"])
    run.train(plan, Listener(), folder=tmp_path / "whole", stop_after=step + 3)
    for name, value in model_of(tmp_path / "run").items():
        assert torch.equal(value, model_of(tmp_path / "whole")[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(
    endless: tuple[subprocess.Popen[str], list[int], Path], number: signal.Signals
) -> None:
    process, workers, folder = endless
    process.send_signal(number)
    _, told = process.communicate(timeout=80)
    wait_for(lambda: not any(map(alive, workers)), 60, "all workers to end")
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    assert "Traceback" not in told
    assert checkpoint_steps(folder)


def test_a_run_is_continued_by_one_process_and_at_once_after_a_kill(
    endless: tuple[subprocess.Popen[str], list[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _, folder = endless
    with pytest.raises(RunError, match=f"another process trains in {folder}"):
        run.resume(folder, Listener(), stop_after=1)
    process.kill()
    process.wait()
    # Its workers hold the lock until they have ended, which a slow disk that one of them writes to puts off.
    monkeypatch.setattr(launch, "LOCK_PATIENCE_S", 60.0)
    run.resume(folder, Listener(), stop_after=1)
    assert model_of(folder)


def test_the_worker_that_failed_by_itself_is_the_one_that_is_named(tmp_path: Path) -> None:
    plan = replace(PLAN, task=build("digits", steps=30, lr=1e30), method="fp32", workers=2)
    with pytest.raises(WorkerError, match=r"parameter \d\.(weight|bias) is not finite after step \d"):
        run.train(plan, Listener(), folder=tmp_path / "a")


def test_more_workers_than_the_machine_can_start_are_refused_before_any_starts(tmp_path: Path) -> None:
    # One too many for the processor; whatever else limits them allows no more.
    workers = WORKERS_PER_CORE * cores() + 1
    with pytest.raises(UsageError, match=r"more than this machine can start.*--simulate"):
        run.train(
            replace(PLAN, method="fp32", task=build("digits", batch=workers), workers=workers),
            Listener(),
            folder=tmp_path / "a",
        )
    assert not (tmp_path / "a").exists()
    check_workers(2)
