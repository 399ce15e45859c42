"""A fork of the tests' server cannot be told from a new interpreter by what it is given and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import interpreters
from gradwire.tools.processes import die_with_parent

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not interpreters.can_fork(), reason="child subreapers are Linux's"),
]

SCRIPT = """
import atexit, os, signal, sys, threading, time

atexit.register(print, "at exit")
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("LEFT_OUT"), flush=True)
print(sys.stdin.read(), os.getppid() == int(sys.argv[1]), os.getsid(0) == os.getpid(), flush=True)
print(os.read(int(sys.argv[2]), 9), file=sys.stderr, flush=True)
how = sys.argv[3]
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
if how == "code":
    sys.exit(3)
if how == "words":
    sys.exit("why")
if how == "raise":
    raise ValueError("boom")
if how == "interrupt":
    raise KeyboardInterrupt
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["return", "code", "words", "raise", "interrupt", "kill"])
def test_a_fork_is_as_a_new_interpreter(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("LEFT_OUT", "x")
    environment = {key: value for key, value in os.environ.items() if key != "LEFT_OUT"}
    found = []
    for fresh in (False, True):
        reader, writer = os.pipe()
        os.write(writer, b"kept")
        os.close(writer)
        command = [sys.executable, str(script), str(os.getpid()), str(reader), how]
        with interpreters.forking(fresh):
            done = subprocess.run(
                command,
                input="asked",
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env={**environment, "GIVEN": "yes"},
                pass_fds=(reader,),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        os.close(reader)
        told = done.stderr.splitlines()
        # The quotes keep the digits of the process's number, which may hold the descriptor's, out of it.
        printed = done.stdout.replace(repr(str(reader)), "FD")
        # Lines of a traceback say which file of the interpreter ran the script.
        found.append((done.returncode, printed, told[0], told[-1]))
    assert found[0] == found[1]
    assert "asked True True" in found[0][1]
    assert found[0][0] == {"code": 3, "return": 0, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(how, 1)


def test_only_commands_that_are_known_are_forks() -> None:
    code = "import sys; print('gradwire.kernels' in sys.modules)"
    with interpreters.forking():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
