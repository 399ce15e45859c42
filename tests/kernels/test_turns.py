"""Processes that start together share the work of compiling; no lock outlives its process, and none is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.kernels import Kernels
from gradwire.kernels import compiling as turns
from gradwire.kernels.compiling import in_turn, machine_name, write_times
from gradwire.kernels.numba_core import storing

COMPILER = """
import os, signal, sys, time
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

def stopped(part):
    os.kill(os.getpid(), signal.SIGSTOP)

def forked(part):
    if os.fork() == 0:
        # Until the test ends, and closes the pipe.
        os.read(0, 1)
        os._exit(0)
    sys.exit()

does = {"compile": compile_part, "die": killed, "stop": stopped, "fork": forked}[sys.argv[2]]
in_turn(sys.argv[3].split(), does, folder)
"""


def compiler(folder: Path, does: str, parts: str) -> subprocess.Popen[bytes]:
    """Start a process that compiles parts under locks in a folder, and writes down when each begins and ends.

    The first part that it compiles ends only when another process compiles, too. It is a process of its own rather than
    a fork: pytest's has threads, whose locks a fork could inherit taken.
    """
    return subprocess.Popen([sys.executable, "-c", COMPILER, str(folder), does, parts], stdin=subprocess.PIPE)


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


def test_what_was_compiled_for_one_target_is_no_record_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else processes that start together later would all compile the other's, without a lock."""

    class Target:
        name, coders = "some", "auto"

        def __init__(self, compiles_for: str) -> None:
            self.compiles_for = compiles_for

        def warm_up(self, name: str) -> None:
            """Compile nothing."""

    monkeypatch.setattr("gradwire.kernels.api.cache_folder", lambda: tmp_path)
    for target in ("cpu", "triton GPU 3 (sm_90)", "triton GPU 5 (sm_90)"):
        Kernels(Target(target)).warm_up(["shifts"])  # type: ignore[arg-type]
    assert sorted(path.stem for path in tmp_path.glob("*.compiled")) == [
        "gradwire-cpu_shifts",
        "gradwire-triton_gpu_3__sm_90__shifts",
        "gradwire-triton_gpu_5__sm_90__shifts",
    ]


def test_other_sources_are_compiled_under_the_lock_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn(["a"], lambda part: None, tmp_path)
    taken: list[Any] = []
    real = turns.fcntl.flock
    monkeypatch.setattr(turns.fcntl, "flock", lambda *a: (taken.append(a), real(*a)))
    monkeypatch.setattr(turns, "source_digest", lambda: "others")
    in_turn(["a"], lambda part: None, tmp_path)
    assert len([how for _, how in taken if how & turns.fcntl.LOCK_EX]) == 1


def test_a_damaged_record_is_written_anew(tmp_path: Path) -> None:
    done: list[str] = []
    in_turn(["a"], done.append, tmp_path)
    record = tmp_path / "gradwire-a.compiled"
    right = record.read_bytes()
    record.write_bytes(b"\xff")
    in_turn(["a"], done.append, tmp_path)
    assert done == ["a", "a"]
    assert record.read_bytes() == right


def test_a_processor_whose_description_is_no_text_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object, **__: object) -> None:
        b"\xff".decode()

    monkeypatch.setattr(Path, "read_text", damaged)
    assert machine_name.__wrapped__()


def test_a_file_that_cannot_be_written_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(turns.os, "replace", refuse)
    write_times(tmp_path / "times", {"a": {"cpu": 1.0}})
    in_turn(["a"], lambda part: None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gradwire-a.lock"]


def test_a_part_that_could_not_be_stored_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_refusals", [])
    in_turn(["a"], lambda part: storing._refusals.append(OSError()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gradwire-a.lock"]


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


def test_a_child_of_a_compiler_does_not_keep_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(turns, "MAX_WAIT_S", 0.0)
    done: list[str] = []
    with compiler(tmp_path, "fork", "a") as process:
        assert process.wait() == 0
        in_turn(["a"], done.append, tmp_path)
    assert done == ["a"]
    assert not recwarn.list


def test_a_stopped_compiler_is_waited_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    with compiler(tmp_path, "stop", "a b") as process:
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            monkeypatch.setattr(turns, "POLL_S", 0.01)
            monkeypatch.setattr(turns, "MAX_WAIT_S", 0.1)
            # The parts that nobody compiles come first; the lock of the other one is waited for.
            with pytest.warns(UserWarning, match=r"held the locks of kernels \(a\) in .* compiling them") as told:
                in_turn(["a", "b", "c"], done.append, tmp_path)
            # The next process has nothing to wait for.
            in_turn(["a"], done.append, tmp_path)
        finally:
            process.kill()
    assert done == ["b", "c", "a", "a"]
    assert len(told) == 1
