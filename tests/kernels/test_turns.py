"""Processes that start together share the work of compiling; no lock outlives its process, and none is needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gradwire.kernels import compiling as turns
from gradwire.kernels.compiling import in_turn

FORK = multiprocessing.get_context("fork")


def compile_beside_another(folder: Path, both_compile: Any) -> None:
    """Be one of two processes that start together; write down when each part begins and ends.

    The first part that a process compiles ends only when the other process is compiling, too.
    """
    first = [True]

    def compile_part(part: str) -> None:
        with (folder / "log").open("a", buffering=1) as log:
            log.write(f"begin {part} {os.getpid()}\n")
            if first.pop() if first else False:
                both_compile.wait(30)
            log.write(f"end {part} {os.getpid()}\n")

    in_turn(["a", "b"], compile_part, folder)


def test_a_part_is_in_the_hands_of_one_process_at_a_time_and_parts_are_shared(tmp_path: Path) -> None:
    both_compile = FORK.Barrier(2)
    processes = [FORK.Process(target=compile_beside_another, args=(tmp_path, both_compile)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
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
    process = FORK.Process(target=in_turn, args=(["a"], lambda part: os.kill(os.getpid(), signal.SIGKILL), tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
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
