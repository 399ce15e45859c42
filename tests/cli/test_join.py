"""``gradwire train --join`` and ``gradwire run --join``, with real processes that come and go."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from schema_help import fits, schema
from typer.testing import CliRunner, Result

from crew import wait_for
from gradwire.errors import GradwireError
from gradwire.tools.cli.app import app
from gradwire.tools.cli.coordinate_command import reached_at
from gradwire.tools.cli.join_commands import keep_running, run
from gradwire.tools.cli.secret_file import secret_of

WAIT_S = 240.0

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import gradwire as gw

told, rounds, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with told.open("a") as file:
    file.write("began\\n")
with gw.join(least=1) as membership:
    parameter = torch.nn.Parameter(torch.zeros(100))
    link = gw.Link([parameter], "fp32", group=membership)
    print("joined", flush=True)
    end = link.round + rounds
    while link.round < end and not membership.left:
        parameter.grad = torch.ones(100)
        try:
            link.reduce_()
        except gw.LeftOutError:
            continue
        if told.read_text().count("began") <= kills:
            os.kill(os.getpid(), signal.SIGKILL)
    with told.open("a") as file:
        file.write(f"{membership.left}\\n")
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


class Running:
    """A command, and what it has printed so far."""

    def __init__(self, folder: Path, name: str, *words: object, secret: str | None = None) -> None:
        self.out = folder / f"{name}.txt"
        environment = {**os.environ, **({} if secret is None else {"GRADWIRE_SECRET": secret})}
        command = [sys.executable, "-m", "gradwire", *map(str, words)]
        with self.out.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=environment)

    def wait_for(self, pattern: str) -> re.Match[str]:
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.out.read_text())
            if found:
                return found
            assert not ended, self.out.read_text()
            time.sleep(0.05)
        raise AssertionError(self.out.read_text())

    def end(self) -> int:
        return self.process.wait(WAIT_S)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path, "coordinator", "coordinate", "--listen", "127.0.0.1:0", "--secret-file", "secret.txt")
    yield made
    made.process.terminate()
    assert made.end() == 0


def test_a_task_is_trained_by_workers_that_come_and_go(tmp_path: Path, coordinator: Running) -> None:
    address = coordinator.wait_for(r"train digits --join (\S+) --secret-file secret.txt")[1]
    words = ("train", "digits", "--join", address, "--secret-file", "secret.txt", "--steps", 4000, "--eval-every", 4000)
    with_it = ("--log-every", 5, "--workers", 2, "--batch", 64)
    workers = [Running(tmp_path, name, *words, *with_it, "--out", name) for name in "abc"]
    try:
        a, b, c = workers
        # Two begin together, and the third is taken in, whichever it is.
        c.wait_for(r"epoch \d+ from round \d+ with 3 members")
        wait_for((tmp_path / "b" / "config.json").exists)
        b.process.kill()
        # Until then its folder may be locked.
        assert b.end() == -signal.SIGKILL
        a.wait_for(r"with 2 members; lost \S+")
        # It had no time to write a checkpoint.
        again = Running(tmp_path, "b again", "train", "--resume", "b", "--join", address, "--secret-file", "secret.txt")
        workers.append(again)
        again.wait_for(r"b holds no checkpoint: this worker begins with what the others have")
        again.wait_for(r"epoch \d+ from round \d+ with 3 members")
        for worker in (a, c, again):
            worker.process.send_signal(signal.SIGTERM)
            assert worker.end() == 0
            worker.wait_for(r"left after step \d+; the others go on") if worker is a else None
        for name in "ab":
            rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["event"] == "eval"
            assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
            assert (tmp_path / name / "report.html").exists()
        assert rows[0]["step"] > 0
        resumed = call("train", "--resume", tmp_path / "a")
        assert resumed.exit_code == 2
        assert "join again" in resumed.output
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def test_a_training_whose_members_are_all_gone_begins_again_with_a_checkpoint(
    tmp_path: Path, coordinator: Running
) -> None:
    line = r"train digits --join (\S+) --secret-file secret.txt"
    words = ("train", "digits", "--secret-file", "secret.txt", "--method", "DiLoCo(every=4)", "--workers", 2)
    steps = ("--steps", 40, "--eval-every", 10, "--log-every", 5, "--stop-after", 21)
    joined = (*words, *steps, "--join", coordinator.wait_for(line)[1])
    first = [Running(tmp_path, f"first {name}", *joined, "--out", name) for name in ("run", "other")]
    assert [worker.end() for worker in first] == [0, 0]
    again = Running(tmp_path, "again", "coordinate", "--listen", "127.0.0.1:0", "--secret-file", "secret.txt")
    try:
        address = again.wait_for(line)[1]
        resumed = ("--join", address, "--secret-file", "secret.txt")
        second = [Running(tmp_path, f"second {n}", "train", "--resume", n, *resumed) for n in ("run", "other")]
        for worker in second:
            worker.wait_for("goes on after step 21 of 40")
        assert [worker.end() for worker in second] == [0, 0]
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["event"] == "eval"] == [0, 10, 20, 21, 30, 40]
        sent = [row["dense_bytes"] for row in rows]
        assert sent == sorted(sent)
        assert rows[-1]["loss"] < rows[0]["loss"]
        finished = Running(tmp_path, "third", "train", "--resume", "run", *resumed)
        finished.wait_for("is finished: 40 of 40 steps")
        assert finished.end() == 0
        refused = call("train", "--resume", tmp_path / "run", "--join", address, "--steps", 50)
        assert refused.exit_code == 2
        assert "--steps" in refused.output
    finally:
        again.process.terminate()
        assert again.end() == 0


def test_a_script_that_is_killed_is_started_again_and_comes_in(tmp_path: Path, coordinator: Running) -> None:
    address = coordinator.wait_for(r"run --join (\S+)")[1]
    secret = (tmp_path / "secret.txt").read_text().strip()
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("run", "--join", address, "--max-restarts", 1)
    other = Running(tmp_path, "other", *words, "script.py", "other.log", 1 << 30, 0, secret=secret)
    try:
        # Before it has joined, the other one may begin alone, and a signal would end it as any script.
        other.wait_for("joined")
        once = Running(tmp_path, "once", *words, "script.py", "once.log", 10, 1, secret=secret)
        assert once.end() == 0
        assert "was killed by SIGKILL (out of memory?): starting it again" in once.out.read_text()
        assert (tmp_path / "once.log").read_text().split() == ["began", "began", "False"]
        # Told to end, it passes that on, and does not start the script again.
        other.process.send_signal(signal.SIGTERM)
        assert other.end() == 0
        assert (tmp_path / "other.log").read_text().split() == ["began", "True"]
    finally:
        other.process.kill()
        other.process.wait()


@pytest.mark.parametrize("own", [None, "INFO"])
def test_a_script_is_not_warned_of_each_connection_that_ends(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, script = tmp_path / "told.txt", tmp_path / "script.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(os.environ['TORCH_CPP_LOG_LEVEL'])")
    monkeypatch.setenv("GRADWIRE_SECRET", "s" * 20)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if own is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", own)
    assert run("127.0.0.1:1", None, script, [str(told)], "0") == 0
    assert told.read_text() == (own or "ERROR")


@pytest.mark.parametrize("own", [None, "INFO"])
def test_a_worker_is_not_warned_of_each_connection_that_ends(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the variable when it is imported; here it is a module that shows the variable."""
    (tmp_path / "torch.py").write_text("import os, sys; sys.exit(os.environ['TORCH_CPP_LOG_LEVEL'])")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if own is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", own)
    started = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradwire.tools.cli.main import main; main()"
    command = [sys.executable, "-c", started, "train", "digits", "--join", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == (own or "ERROR")


@pytest.mark.parametrize(("script", "code"), [("import os; os.kill(os.getpid(), 9)", 128 + 9), ("exit(7)", 7)])
def test_a_script_that_fails_again_and_again_ends_with_its_code(
    script: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert keep_running([sys.executable, "-c", script], dict(os.environ), 2) == code
    told = capfd.readouterr().err
    assert told.count("starting it again") == 2
    assert told.strip().endswith("after 2 restarts")


class Script:
    """Stands for a process that fails, unless it is sent a signal: then it ends by that."""

    def __init__(self, while_it_runs: Callable[[], None]) -> None:
        self.signals: list[int] = []
        self._code: int | None = None
        self._while_it_runs = while_it_runs

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self) -> int:
        self._while_it_runs()
        self._code = -self.signals[0] if self.signals else 7
        return self._code


@pytest.mark.parametrize("when", ["starts", "runs"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_reaches_the_script_once_also_while_it_is_started(
    number: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Script] = []

    def come(moment: str) -> None:
        if (len(made), moment) == (number, when):
            signal.raise_signal(signal.SIGTERM)

    def start(*words: object, **more: object) -> Script:
        made.append(Script(lambda: come("runs")))
        come("starts")
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert keep_running(["script"], {}, 3) == 128 + signal.SIGTERM
    assert [script.signals for script in made] == [[]] * (number - 1) + [[signal.SIGTERM]]


def test_a_script_has_none_but_the_signals_that_are_passed_on() -> None:
    """A terminal sends Ctrl-C to all processes of the group in its foreground."""
    alone = "import os, sys; sys.exit(os.getpgid(0) != os.getpid())"
    assert keep_running([sys.executable, "-c", alone], os.environ, 0) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_a_terminal_sends_are_passed_on(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(lambda: signal.raise_signal(number))
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: script)
    assert keep_running(["script"], {}, 3) == 128 + number
    assert script.signals == [number]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--join", "h:1"], "give --secret-file, or set GRADWIRE_SECRET"),
        (["train", "digits", "--join", "h:1", "--simulate"], "makes this process one worker: leave --simulate out"),
        (["train", "graph", "--join", "h:1", "--secret-file", "s"], "each worker owns a part of the graph"),
        (["run", "--join", "h:1", "--nproc-per-node", "2", "x.py"], "makes its own link: leave --nproc-per-node out"),
        (["run", "--join", "h:1", "--method", "fp32", "x.py"], "makes its own link: leave --method out"),
        (["run", "--join", "h:1", "x.py"], "script x.py does not exist"),
    ],
)
def test_what_has_no_place_beside_join_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("s").write_text("0123456789abcdef\n")
    result = call(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_secret_that_a_full_disk_does_not_take_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", lambda descriptor, mode: os.close(descriptor) or Full())
        with pytest.raises(GradwireError, match=r"the secret in .*No space left on device"):
            secret_of(tmp_path / "secret.txt")
    assert len(secret_of(tmp_path / "secret.txt")) == 32


@pytest.mark.parametrize("kept", [True, False])
def test_json_names_the_file_of_the_secret_or_tells_the_secret(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Programs read it from a pipe or file, into which Python writes nothing before a buffer is full or flushed.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    words = ("--listen", "127.0.0.1:0", "--json", *(("--secret-file", "secret.txt") if kept else ()))
    made = Running(tmp_path, "json", "coordinate", *words)
    try:
        told = json.loads(made.wait_for(r"(?s)\[.*\]\n")[0])
    finally:
        made.process.terminate()
        assert made.end() == 0
    fits(told, schema("coordinate"))
    assert told[0]["secret_file"] == ("secret.txt" if kept else None)
    if kept:
        assert told[0]["secret"] is None
        assert (tmp_path / "secret.txt").read_text().strip() not in made.out.read_text()
    else:
        assert 16 <= len(told[0]["secret"]) <= 64


def test_the_address_told_is_the_one_that_was_given() -> None:
    assert reached_at("10.0.0.1:29400", 29400) == "10.0.0.1:29400"
    assert reached_at("10.0.0.1:0", 7) == "10.0.0.1:7"
    assert reached_at("[fd00::1]:29400", 29400) == "[fd00::1]:29400"
    assert reached_at(":29400", 29400).endswith(":29400")
    assert not reached_at(":29400", 29400).startswith(":")
