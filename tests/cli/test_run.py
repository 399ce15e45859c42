"""``gradwire run`` and torchrun: unchanged scripts get a link, and failures keep their traceback."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.multiprocessing.api
from run_help import gradwire, start_gradwire

import gradwire as gw
from gradwire.link.local_steps_user import LocalStepsUser
from gradwire.tools.cli.bootstrap import left_apart, summary
from gradwire.tools.cli.commands import metrics
from gradwire.tools.cli.launcher import Report, Torchrun, account
from gradwire.tools.cli.torchrun import command
from gradwire.tools.experiments.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.repository
def test_flags_reach_torchrun_and_words_reach_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES / "digits.py"
    # As in a command that no folder of packages was given to: modules in the current folder are not found.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    apart = ["-P"] if sys.version_info >= (3, 11) else []
    words = command({"nproc-per-node": "4", "nnodes": None}, False, script, ["--steps", "3"])
    assert words == [
        *(sys.executable, *apart, "-m", "gradwire.tools.cli.launcher"),
        "--standalone",
        "--nproc-per-node=4",
        *("--no-python", sys.executable, "-u", *apart, "-m", "gradwire.tools.cli.bootstrap"),
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
    words = ["--nproc-per-node", 2, "--method", "terngrad", EXAMPLES / "digits.py", "--steps", 60]
    # As new interpreters they are started from the wheel, see tests/test_wheel.py.
    done = gradwire("run", *words)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("training accuracy ")[1].split()[0])
    assert accuracy > 0.9
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("gradwire:")]
    assert "TernGrad" in line
    assert "times less" in line
    assert float(line.split(" MB, ")[1].split()[0]) > 10


@pytest.mark.ranks
def test_a_return_to_the_fallback_is_said_beside_the_saving() -> None:
    words = ["--nproc-per-node", 2, "--fallback", "bf16", "--fallback-limit", "0.1"]
    done = gradwire("run", *words, EXAMPLES / "digits.py", "--steps", 10)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "times less" in line]
    assert "), returned to BF16() (from round 2 on: what rank" in line


def test_each_modules_link_is_said_where_they_came_to_differ() -> None:
    class Stub:
        method = gw.TernGrad()

        def __init__(self, fallback: dict[str, object] | None) -> None:
            self.fallback = fallback

        def record(self) -> dict[str, object]:
            return {"choice": None, "fallback": self.fallback}

        def traffic(self) -> gw.Traffic:
            return gw.Traffic(sent_bytes=10, received_bytes=10, dense_bytes=100, rounds=1)

    returned = {"method": "BF16()", "since_round": 2, "relative_error": 0.9, "rank": 1}
    line = summary([Stub(None), Stub(returned)])
    assert f"module 0: {gw.TernGrad()!r}; module 1: {gw.TernGrad()!r}, returned to BF16() (from round 2 on" in line
    assert "module" not in summary([Stub(returned), Stub(returned)])
    assert "returned to BF16()" in summary([Stub(returned)])


@pytest.mark.ranks
def test_the_scripts_own_error_keeps_its_traceback() -> None:
    done = gradwire("run", "--nproc-per-node", 2, Path(__file__).parent / "failing_script.py", "a", "--b")
    assert done.returncode == 1
    assert "ValueError: my own mistake, called with ['a', '--b'] from __main__" in done.stderr
    assert "failing_script.py" in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("gradwire: rank")]
    assert len(told) == 1
    assert "failed in round 3: ValueError: my own mistake" in told[0]
    assert "torch/distributed/elastic" not in done.stderr


@pytest.mark.ranks
def test_a_scripts_momentum_beside_the_methods_own_ends_the_run_before_the_first_step() -> None:
    """``gradwire run`` cannot hand over an optimizer: the link finds it."""
    words = ["--nproc-per-node", 2, "--method", "DGC(density=0.1)", EXAMPLES / "digits.py", "--steps", 3]
    done = gradwire("run", *words)
    assert done.returncode == 1
    assert "training accuracy" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("gradwire: rank")]
    assert "DGC(" in line
    assert "brings its own momentum, and SGD has momentum=0.9 beside it: use torch.optim.SGD with momentum=0" in line


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_named_with_what_the_others_saw() -> None:
    done = gradwire("run", "--nproc-per-node", 2, Path(__file__).parent / "ending_script.py", "kill")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("gradwire: rank 1 was killed by SIGKILL")]
    assert len(told) == 1
    # Rank 0 has ended its third step, and has begun the exchange of the fourth or not.
    assert "round 3" in told[0] or "rank 0 could not go on at its next exchange" in told[0]
    assert "torch/distributed/elastic" not in done.stderr


@pytest.mark.ranks
def test_an_interrupted_run_ends_with_one_line_and_130() -> None:
    running = start_gradwire("run", "--nproc-per-node", 2, Path(__file__).parent / "ending_script.py", "go on")
    if running.stdout is None:
        raise AssertionError("no pipe")
    assert running.stdout.readline().strip() == "training"
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=80)
    assert running.returncode == 130, told
    assert [line for line in told.splitlines() if line.startswith("gradwire:")] == [
        "gradwire: interrupted; all workers are ended"
    ]
    assert "Traceback" not in told


LOST = "rank 0 could not go on at bucket 1, round 7: rank 1 ended without a word (killed, or out of memory?)"


@pytest.mark.parametrize(
    ("codes", "reports", "sentence"),
    [
        ({1: -9}, [], "rank 1 was killed by SIGKILL (out of memory?)"),
        ({1: -9}, [Report(rank=0, link=LOST, remote=True)], f"rank 1 was killed by SIGKILL (out of memory?); {LOST}"),
        ({1: -11}, [Report(rank=0, round=4)], "rank 1 was killed by SIGSEGV; the others were in round 4"),
        ({0: 1}, [Report(rank=0, kind="ValueError", message="no")], "rank 0 failed: ValueError: no"),
        # A kill explains more than what it caused.
        (
            {0: 1, 1: -9},
            [Report(rank=0, kind="RuntimeError", message="closed")],
            "rank 1 was killed by SIGKILL (out of memory?)",
        ),
        # The rank whose exchange broke was found first, but another says why.
        (
            {0: 1},
            [
                Report(rank=0, kind="RuntimeError", message="mangled", link=LOST, remote=True),
                Report(rank=1, round=7, kind="KeyError", message="'x'"),
            ],
            "rank 1 failed in round 7: KeyError: 'x'",
        ),
        ({2: 3}, [], "rank 2 ended with code 3"),
        ({}, [], "a worker failed without a word"),
    ],
)
def test_the_account_that_tells_most_is_given(codes: dict[int, int], reports: list[Report], sentence: str) -> None:
    assert account(codes, {r.rank: r for r in reports}) == sentence


def test_what_torchrun_kills_itself_is_known_from_what_it_logs() -> None:
    text = "Unable to shutdown process %s via %s, forcefully exiting via %s"
    assert text in inspect.getsource(torch.distributed.elastic.multiprocessing.api)
    heard = Torchrun()
    record = logging.LogRecord("api", logging.WARNING, "", 0, text, (4711, signal.SIGTERM, signal.SIGKILL), None)
    assert heard.filter(record)
    assert heard.killed == {4711}
    closing = logging.LogRecord("api", logging.WARNING, "", 0, "Sending process %s closing signal %s", (1, "a"), None)
    assert not heard.filter(closing)
    assert heard.killed == {4711}


def test_a_rank_leaves_with_its_code_though_a_stream_is_in_use() -> None:
    code = (
        "import sys; from gradwire.tools.cli import bootstrap\n"
        "class InUse:\n    def flush(self): raise RuntimeError('reentrant call')\n"
        "sys.stdout = InUse(); bootstrap._leave(143)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 143


@pytest.mark.ranks
def test_train_takes_the_group_that_torchrun_gives(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", "gradwire.tools.cli.main", "train", "digits"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--steps", "6", "--json", "--out", str(tmp_path / "r")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["workers"], row["steps"]) == (2, 6)
    assert (tmp_path / "r" / "report.html").exists()


def test_the_saving_is_told_as_times_less_and_bits_per_element() -> None:
    class Stub:
        method, dense_bytes = gw.TernGrad(), 80_000_000

        def record(self) -> dict[str, object]:
            return {"choice": None, "fallback": None}

        def traffic(self) -> gw.Traffic:
            return gw.Traffic(sent_bytes=10_000_000, received_bytes=1, dense_bytes=self.dense_bytes, rounds=1)

    expected = "each worker sent 20.00 MB instead of 160.00 MB, 8.0 times less (4.00 bits per element)"
    assert summary([Stub(), Stub()]).endswith(expected)
    Stub.dense_bytes = 5_000_000
    assert summary([Stub()]).endswith("sent 10.00 MB instead of 5.00 MB, 2.0 times more (64.00 bits per element)")
    Stub.dense_bytes = 9_900_000
    assert summary([Stub()]).endswith("sent 10.00 MB instead of 9.90 MB, about as much (32.32 bits per element)")
    row = {"loss": 1.0, "step_time_s": None, "bits_per_element": 64.0}
    assert metrics(row, None) == ["loss 1.000", "64.00 bits (x2.0 more)"]
    # What is about as much is neither less nor more.
    assert [metrics({**row, "bits_per_element": bits}, None)[-1] for bits in (31.999, 32.001, 16.0)] == [
        "32.00 bits",
        "32.00 bits",
        "16.00 bits (x2.0 less)",
    ]
    assert "built no DistributedDataParallel module" in summary([])


@pytest.mark.ranks
def test_steps_after_the_last_exchange_are_told_with_what_to_do() -> None:
    """DiLoCo exchanges after steps 8 and 16: a model that the script saves after step 20 is one worker's own."""
    words = ["--nproc-per-node", 2, "--method", "DiLoCo(every=8)", EXAMPLES / "digits.py", "--steps", 20]
    done = gradwire("run", *words)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "after the last exchange" in line]
    assert "DiLoCo(" in line
    assert "4 optimizer steps lie after the last exchange, and each worker has parameters of its own" in line
    assert "train 4 steps more or 4 fewer, or call gw.attach in the script, and link.synchronise() before" in line


@pytest.mark.parametrize(
    ("steps", "count", "spec", "apart", "told"),
    [
        (0, 1, "DiLoCo(every=8)", False, None),
        (3, 1, "DiLoCo(every=8)", True, "train 5 steps more or 3 fewer, or call gw.attach"),
        (3, 4, "StreamingDiLoCo(every=8, fragments=4, delay=0)", True, ": call gw.attach in the script"),
        (0, 1, "EASGD(every=8)", True, "after the last exchange each worker has parameters of its own"),
        (0, 1, "terngrad", True, None),
    ],
)
def test_workers_that_end_with_parameters_of_their_own_are_told(
    steps: int, count: int, spec: str, apart: bool, told: str | None
) -> None:
    clock = SimpleNamespace(steps=steps, every=8, count=count, delay=0)
    parameters = SimpleNamespace(clock=clock, is_apart=lambda: apart)
    link: Any = LocalStepsUser()
    link.method, link._local = gw.method(spec), SimpleNamespace(parameters=parameters)
    lines = left_apart([link])
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]
