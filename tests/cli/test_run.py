"""``gradwire run`` and torchrun: unchanged scripts get a link, and failures keep their traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_help import gradwire

from gradwire.cli.torchrun import command
from gradwire.experiments.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.repository
def test_flags_reach_torchrun_and_words_reach_the_script() -> None:
    script = EXAMPLES / "plain_ddp.py"
    words = command({"nproc-per-node": "4", "nnodes": None}, False, script, ["--steps", "3"])
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert words[3:] == [
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "gradwire.cli.bootstrap",
        str(script),
        "--steps",
        "3",
    ]
    many = command({"nnodes": "2", "master-addr": "host"}, False, script, [])
    assert "--standalone" not in many
    with pytest.raises(UsageError, match="one process"):
        command({"nproc-per-node": "1"}, False, script, [])


@pytest.mark.ranks
def test_an_unchanged_script_is_compressed_and_the_saving_is_said_once() -> None:
    done = gradwire("run", "--nproc-per-node", 2, "--method", "terngrad", EXAMPLES / "plain_ddp.py", "--steps", 60)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("training accuracy ")[1].split()[0])
    assert accuracy > 0.9
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("gradwire:")]
    assert "TernGrad" in line
    assert "times less" in line
    assert float(line.split(" MB, ")[1].split()[0]) > 10


@pytest.mark.ranks
def test_the_scripts_own_error_keeps_its_traceback() -> None:
    done = gradwire("run", "--nproc-per-node", 2, Path(__file__).parent / "failing_script.py", "a", "--b")
    assert done.returncode == 1
    assert "ValueError: my own mistake, called with ['a', '--b'] from __main__" in done.stderr
    assert "failing_script.py" in done.stderr


@pytest.mark.ranks
def test_train_takes_the_group_that_torchrun_gives(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", "gradwire.cli.main", "train", "digits"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--steps", "6", "--json", "--out", str(tmp_path / "r")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["workers"], row["steps"]) == (2, 6)
    assert (tmp_path / "r" / "report.html").exists()
