"""Training on an emulated cluster: the simulation's bits, interfaces in the record, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab_help import NEEDS_LAB, lab_of, spaces
from run_help import Listener, alive, children, gradwire, same, start_gradwire, wait_for
from typer.testing import CliRunner

from gradwire.errors import BackendError, HyperparameterError
from gradwire.tools.cli.app import app
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.folder import checkpoint_steps
from gradwire.tools.experiments.launch import Crew
from gradwire.tools.experiments.tasks import build

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS_ON_A_LAB = [*NEEDS_LAB, pytest.mark.ranks]
PLAN = RunConfig(
    task=build("digits", steps=8, eval_every=4), method="terngrad", workers=4, lab="bandwidth=100mbit,hosts=2"
)


def test_a_plan_keeps_the_lab_as_the_topology_writes_it() -> None:
    assert PLAN.lab == "hosts=2,bandwidth=100mbit"
    assert RunConfig.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    without = {key: value for key, value in PLAN.to_json().items() if key != "lab"}
    assert RunConfig.from_json(without).topology() is None


def test_workers_are_spread_in_blocks_of_ranks() -> None:
    crew = Crew(PLAN, Path(), resume=False, stop_after=None)
    assert [crew.host(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"lab": "hosts=3"}, UsageError, "4 workers cannot be spread evenly over 3 hosts: use --workers 6"),
        ({"lab": "hosts=8"}, UsageError, "use --workers 8"),
        ({"lab": "hosts=1"}, UsageError, "use at least hosts=2"),
        ({"simulate": True}, UsageError, "leave --simulate or --lab out"),
        ({"lab": "host=2"}, HyperparameterError, "KEY=VALUE is needed"),
    ],
)
def test_a_lab_that_does_not_fit_is_refused(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        replace(PLAN, **fields)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--lab", "hosts=3"], "use --workers 6"),
        (["train", "digits", "--simulate", "--lab", "hosts=2"], "leave --simulate or --lab out"),
        (["train", "--resume", "somewhere", "--lab", "hosts=2"], "leave --lab out"),
        (["compare", "digits", "--lab", "hosts=3"], "use --workers 6"),
        (["run", "--lab", "hosts=2", "--nnodes", "2", __file__], "leave --nnodes out"),
        (["run", "--lab", "hosts=2", "--standalone", __file__], "leave --standalone out"),
        (["run", "--lab", "hosts=1", __file__], "one process exchanges nothing"),
        (["run", "--lab", "hosts=2", "no_such_script.py"], "does not exist"),
        (["run", "--lab", "hosts=two", __file__], "a whole number is needed"),
        (["lab", "--hosts", "0", "--", "true"], "1 to 200 are possible"),
        (["lab", "--host", "9=1mbit", "--", "true"], "the hosts are 0 to 3"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gradwire:")]
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_without_root_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BackendError, match="with sudo"):
        run.train(PLAN, Listener(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = CliRunner().invoke(app, ["lab", "--", "true"])
    assert result.exit_code == 1
    assert "with sudo" in result.stderr


def test_under_torchrun_the_machines_are_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="without torchrun"):
        run.train(PLAN, Listener(), folder=tmp_path / "run")


class TestOnALab:
    pytestmark = RANKS_ON_A_LAB

    def test_a_run_ends_in_the_simulations_bits_also_when_it_was_resumed(self, tmp_path: Path) -> None:
        simulated = run.train(replace(PLAN, lab=None, simulate=True), Listener(), folder=tmp_path / "simulated")
        halves = run.train(PLAN, Listener(), folder=tmp_path / "halves", stop_after=4)
        config = json.loads((halves / "config.json").read_text())
        assert config["lab"] == config["plan"]["lab"] == "hosts=2,bandwidth=100mbit"
        assert [row["host"] for row in config["interfaces"]] == [0, 1]
        sent = json.loads((halves / "metrics.jsonl").read_text().splitlines()[-1])["sent_bytes"]
        for row in config["interfaces"]:
            # Of each worker's bytes two thirds leave its host; evaluation and start-up add to them.
            assert row["sent_payload_bytes"] > 2 * sent * 2 / 3
            assert 0 < row["received_payload_bytes"] < row["received_bytes"]
        run.resume(halves, Listener())
        assert same(simulated, halves)
        resumed = json.loads((halves / "config.json").read_text())
        for before, after in zip(config["interfaces"], resumed["interfaces"]):
            assert after["sent_bytes"] > before["sent_bytes"]
        page = (halves / "report.html").read_text()
        assert "hosts=2,bandwidth=100mbit" in page
        assert "sent by each host" in page

    def test_an_interrupted_run_leaves_neither_workers_nor_network(self, tmp_path: Path) -> None:
        words = ["--steps", 100_000, "--checkpoint-every", 5, "--eval-every", 100_000, "--workers", 2, "--batch", 8]
        process = start_gradwire("train", "digits", *words, "--lab", "hosts=2", "--out", tmp_path / "run")
        try:
            wait_for(lambda: process.poll() is not None or bool(checkpoint_steps(tmp_path / "run")), 60, "a checkpoint")
            workers = children(process.pid)
            name = lab_of(workers[0])
            assert len(spaces(name)) == 3
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 130
        assert "Traceback" not in told
        assert spaces(name) == []
        assert not any(map(alive, workers))

    def test_a_killed_worker_is_named(self, tmp_path: Path) -> None:
        words = ["--steps", 100_000, "--checkpoint-every", 5, "--eval-every", 100_000, "--workers", 2, "--batch", 8]
        process = start_gradwire("train", "digits", *words, "--lab", "hosts=2", "--out", tmp_path / "run")
        try:
            wait_for(lambda: process.poll() is not None or bool(checkpoint_steps(tmp_path / "run")), 60, "a checkpoint")
            # Worker 0 serves the store.
            os.kill(children(process.pid)[0], signal.SIGKILL)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 1
        assert "worker 0 was killed by SIGKILL" in told.splitlines()[-1]

    def test_compare_builds_a_lab_for_each_method(self, tmp_path: Path) -> None:
        words = ["--workers", 2, "--steps", 4, "--lab", "hosts=2,bandwidth=1gbit", "--out", tmp_path / "c", "--json"]
        done = gradwire("compare", "digits", *words)
        assert done.returncode == 0, done.stderr
        assert [row["workers"] for row in json.loads(done.stdout)] == [2, 2]
        configs = [json.loads(path.read_text()) for path in (tmp_path / "c").glob("*/config.json")]
        assert [config["lab"] for config in configs] == ["hosts=2,bandwidth=1gbit"] * 2

    def test_an_unchanged_script_runs_under_one_torchrun_a_host(self) -> None:
        words = ["--lab", "hosts=2,bandwidth=1gbit", "--nproc-per-node", 2]
        done = gradwire("run", *words, EXAMPLES / "digits.py", "--steps", 60)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split("training accuracy ")[1].split()[0]) > 0.9
        (line,) = [line for line in done.stderr.splitlines() if "times less" in line]
        assert line.startswith("h0: gradwire: TernGrad")

    def test_a_script_that_fails_is_one_line_behind_its_own(self) -> None:
        script = Path(__file__).parents[1] / "cli" / "failing_script.py"
        done = gradwire("run", "--lab", "hosts=2", script)
        assert done.returncode == 1
        assert "ValueError: my own mistake" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("gradwire: the command on host ")

    def test_a_lab_under_a_training_is_the_group_of_its_hosts(self, tmp_path: Path) -> None:
        """``gradwire lab -- gradwire train`` trains on the group that the lab's variables describe."""
        train = [sys.executable, "-m", "gradwire.tools.cli.main", "train", "digits", "--steps", "4"]
        command = [sys.executable, "-m", "gradwire.tools.cli.main", "lab", "--hosts", "2", "--", *train]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / "r")], capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "r" / "config.json").read_text())["world_size"] == 2
