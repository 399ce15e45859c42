"""Processes that one process forks for another: children of the one that asked, with an environment of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gradwire.errors import GradwireError
from gradwire.tools.processes import Child, can_fork, fork_all, module_command

pytestmark = pytest.mark.skipif(not can_fork(), reason="child subreapers are Linux's")

MODULE = """
import os, signal, sys, time
from gradwire.tools.processes import wait_for_parent

IMPORTED = os.getpid()
PREPARED = []

def prepare(variables):
    PREPARED.append(variables["WHO"])

def main():
    wait_for_parent(int(os.environ["PARENT"]))
    print(os.environ["WHO"], PREPARED, os.getppid(), IMPORTED != os.getpid(), os.getsid(0) == os.getpid(), flush=True)
    how = os.environ["HOW"]
    if how == "code":
        sys.exit(3)
    if how == "raise":
        raise ValueError("boom")
    if how == "hang":
        time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that the forking process finds."""
    (tmp_path / "forked_for_a_test.py").write_text(MODULE)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), before])))
    return "forked_for_a_test"


def test_children_are_this_process_s_and_end_as_they_will(module: str) -> None:
    ways = ["return", "code", "raise", "hang"]
    logs = [tempfile.TemporaryFile() for _ in ways]  # noqa: SIM115
    children = [
        Child(variables={"WHO": f"child {i}", "HOW": how, "PARENT": str(os.getpid())}, output=log.fileno())
        for i, (how, log) in enumerate(zip(ways, logs))
    ]
    processes = fork_all(module, children)
    assert len({process.pid for process in processes}) == 4
    assert [process.wait() for process in processes[:3]] == [0, 3, 1]
    assert processes[3].poll() is None
    processes[3].kill()
    assert processes[3].wait() == -signal.SIGKILL
    processes[3].kill()  # once more does nothing
    for i, log in enumerate(logs[:3]):
        log.seek(0)
        first, *others = log.read().decode().splitlines()
        assert first == f"child {i} ['child 0'] {os.getpid()} True True", "imported and prepared once, a session each"
        assert ("ValueError: boom" in others) == (ways[i] == "raise")
        assert "WHO" not in os.environ


def test_what_cannot_be_started_is_said(module: str) -> None:
    with tempfile.TemporaryFile() as log:
        child = Child(variables={"WHO": "x", "HOW": "return", "PARENT": str(os.getpid())}, output=log.fileno())
        with pytest.raises(GradwireError, match="No module named 'no_such_module'"):
            fork_all("no_such_module", [child])


def test_descriptors_are_the_child_s_alone(module: str) -> None:
    """A pipe whose writer one child keeps ends when that child does, whatever the others hold."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as log:
        both = [
            Child(
                variables={"WHO": "a", "HOW": "return", "PARENT": str(os.getpid())},
                output=log.fileno(),
                keeps=(writer,),
            ),
            Child(variables={"WHO": "b", "HOW": "hang", "PARENT": str(os.getpid())}, output=log.fileno()),
        ]
        first, second = fork_all(module, both)
        os.close(writer)
        try:
            assert first.wait() == 0
            assert os.read(reader, 1) == b"", "the pipe is at its end"
            assert second.poll() is None
        finally:
            second.kill()
            second.wait()
            os.close(reader)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no -P")
def test_modules_are_not_looked_for_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    done = subprocess.run([*module_command("json.tool"), "--help"], capture_output=True, check=False)
    assert done.returncode == 0
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "-P" not in module_command("json.tool"), "this process finds modules there"
