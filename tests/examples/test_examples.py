"""The example runs and learns in each of its modes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interpreters import is_server
from ranks import run_script

pytestmark = pytest.mark.repository

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
ELASTIC = EXAMPLE.with_name("elastic_digits.py")
STEPS = ("--steps", "24", "--every", "8")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "method", "factor"),
    [("attach", "TernGrad(clip=2.5)", 10), ("loop", "qsgdinf", 3), ("amp", "ef_signsgd", 10), ("choose", "", 0.9)],
)
def test_the_example_learns_in_every_mode(mode: str, method: str, factor: float) -> None:
    told = run_script(EXAMPLE, "--mode", mode, *(["--method", method] if method else []))
    words = told.split()
    assert float(words[2].rstrip(",")) > 0.9
    assert float(words[3]) > factor
    assert ("chosen: " in told) == (mode == "choose")


def test_the_plain_mode_has_never_heard_of_gradwire() -> None:
    """``gradwire run`` attaches to a script that does not import it; it is run in tests/cli/test_run.py."""
    code = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); sys.exit('gradwire' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def elastic(folder: Path) -> str:
    """Train on two workers under torchrun, one of which is killed after the first checkpoint; return the log."""
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", str(ELASTIC), "--folder", str(folder)]
    # Else Gloo finds the addresses of workers that are gone.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    log, environment, killed = folder / "log", {**os.environ, **fresh}, False
    command = [sys.executable, "-m", "torch.distributed.run", *words, *STEPS, "--pause", "0.2"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as agent:
        deadline = time.monotonic() + 240
        while agent.poll() is None:
            if time.monotonic() > deadline:
                agent.terminate()
            if not killed and (folder / "latest").exists():
                children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                victim = [int(child) for child in children if not is_server(int(child))][-1]
                os.kill(victim, signal.SIGKILL)
                killed = True
            time.sleep(0.02)
    return log.read_text()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_training_whose_worker_is_killed_is_started_anew_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, torn = (tmp_path / name for name in ("whole", "torn"))
    whole.mkdir()
    torn.mkdir()
    expected, found = run_script(ELASTIC, "--folder", whole, *STEPS), elastic(torn)
    assert "from step 0 on 2 workers, attempt 0" in found
    assert re.search(r"from step (8|16) on 2 workers, attempt 1", found)
    losses = [re.findall(r"loss ([\d.]+) after 24 steps", log) for log in (expected, found)]
    assert losses[0] == losses[1] != []
