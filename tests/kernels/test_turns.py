"""Processes that start together share the work of compiling; no lock outlives its process, and none is needed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.kernels import compiling as turns
from gradwire.kernels.compiling import in_turn

COMPILER = """
import os, sys, time
from pathlib import Path
from gradwire.kernels.compiling import in_turn

folder, first = Path(sys.argv[1]), [True]

def compile_part(part):
    with (folder / "log").open("a", buffering=1) as log:
        log.write(f"begin {part} {os.getpid()}\\n")
        until = time.monotonic() + 60
        while first and len(set((folder / "log").read_text().split()) - {"begin", "end", "a", "b"}) < 2:
            assert time.monotonic() < until, "no other process compiles"
            time.sleep(0.01)
        first.clear()
        log.write(f"end {part} {os.getpid()}\\n")

def killed(part):
    os.kill(os.getpid(), 9)

in_turn(sys.argv[3].split(), {"compile": compile_part, "die": killed}[sys.argv[2]], folder)
"""


def compiler(folder: Path, does: str, parts: str) -> subprocess.Popen[bytes]:
    """Start a process that compiles parts under locks in a folder, and writes down when each begins and ends.

    The first part that it compiles ends only when another process compiles, too. It is a process of its own rather than
    a fork: pytest's has threads, whose locks a fork could inherit taken.
    """
    return subprocess.Popen([sys.executable, "-c", COMPILER, str(folder), does, parts])


def test_a_part_is_in_the_hands_of_one_process_at_a_time_and_parts_are_shared(tmp_path: Path) -> None:
    processes = [compiler(tmp_path, "compile", "a b") for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    for part in "ab":
        own = [(what, by) for what, which, by in lines if which == part]
        assert [what for what, _ in own] == ["begin", "end"] * 2
        assert own[0][1] == own[1][1] != own[2][1] == own[3][1]


def test_a_part_that_was_compiled_is_loaded_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    in_turn(["a"], done.append, tmp_path)
    monkeypatch.setattr(turns.fcntl, "flock", lambda *_: pytest.fail("a lock was taken"))
    in_turn(["a"], done.append, tmp_path)
    assert done == ["a", "a"]


def test_other_sources_are_compiled_under_the_lock_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(["a"], lambda part: None, tmp_path)
    taken: list[Any] = []
    real = turns.fcntl.flock
    monkeypatch.setattr(turns.fcntl, "flock", lambda *a: (taken.append(a), real(*a)))
    monkeypatch.setattr(turns, "source_digest", lambda: "others")
    in_turn(["a"], lambda part: None, tmp_path)
    assert len(taken) == 1


def test_a_compiler_that_is_killed_or_fails_leaves_no_lock_and_no_note(tmp_path: Path) -> None:
    assert compiler(tmp_path, "die", "a").wait() == -signal.SIGKILL
    with pytest.raises(OSError, match="no such instruction"):
        in_turn(["a"], lambda part: (_ for _ in ()).throw(OSError("no such instruction")), tmp_path)
    done: list[str] = []
    in_turn(["a"], done.append, tmp_path)
    assert done == ["a"]


@pytest.mark.parametrize("folder", ["nowhere", "read-only", "without locks"])
def test_where_no_lock_can_be_made_every_process_compiles(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    places = {"nowhere": None, "read-only": tmp_path / "file" / "cache", "without locks": tmp_path}

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    if folder == "without locks":
        monkeypatch.setattr(turns.fcntl, "flock", refuse)
    done: list[str] = []
    in_turn(["a", "b"], done.append, places[folder])
    assert done == ["a", "b"]
