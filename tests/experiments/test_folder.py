"""Run folders: whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_help import Listener

from alone import group_of_one
from gradwire.tools.experiments import folder, launch, member, run_record, worker
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.experiments.folder import ROW_FIELDS, RunFolder, checkpoint_steps
from gradwire.tools.experiments.run_record import config_of, default_folder
from gradwire.tools.experiments.tasks import build

ROW = dict.fromkeys(ROW_FIELDS, 1)
PLAN = RunConfig(task=build("digits", steps=4), workers=2)


def change_parts(tmp_path: Path, change: Callable[[dict[str, Path]], None]) -> str:
    """Change the files of a checkpoint of two ranks; return what reading rank 1's part says."""
    run = RunFolder(tmp_path)
    run.begin_checkpoint(5)
    for name in ("rank-0", "rank-1"):
        run.save_part(5, name, {"link": torch.full((100,), float(name[-1]))})
    run.commit_checkpoint(5)
    assert float(run.load_part("rank-1")["link"][0]) == 1.0
    change({path.stem: path for path in (tmp_path / "checkpoint" / "step-5").iterdir()})
    with pytest.raises(RunError) as caught:
        run.load_part("rank-1")
    return str(caught.value)


def swap(files: dict[str, Path]) -> None:
    zero, one = (files[name].read_bytes() for name in ("rank-0", "rank-1"))
    files["rank-0"].write_bytes(one)
    files["rank-1"].write_bytes(zero)


def flip(files: dict[str, Path]) -> None:
    data = bytearray(files["rank-1"].read_bytes())
    data[len(data) // 2] ^= 1
    files["rank-1"].write_bytes(data)


def of_another_step(files: dict[str, Path]) -> None:
    folder = files["rank-1"].parent
    folder.rename(folder.with_name("step-6"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (swap, "is not the file that was saved here"),
        (of_another_step, "is not the file that was saved here"),
        (flip, "rank-1.pt "),
    ],
)
def test_a_part_that_changed_or_lies_in_anothers_place_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Path]], None], sentence: str
) -> None:
    found = change_parts(tmp_path, change)
    assert sentence in found
    assert "rank-1.pt" in found


def checkpoint(run: RunFolder, step: int) -> None:
    run.begin_checkpoint(step)
    run.save_part(step, "shared", {"step": step})
    run.commit_checkpoint(step)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        RunFolder.create(tmp_path)
    with pytest.raises(UsageError, match="does not look like a run"):
        RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    RunFolder(tmp_path).write_config(config_of(PLAN))
    RunFolder.create(tmp_path, overwrite=True)
    assert not (tmp_path / "mine.txt").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.create(tmp_path / "file")


def test_only_the_newest_checkpoint_stays_and_an_unfinished_one_is_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    checkpoint(run, 5)
    checkpoint(run, 10)
    run.begin_checkpoint(15)
    run.save_part(15, "shared", {"step": 15})
    assert checkpoint_steps(tmp_path) == [10]
    assert run.load_part("shared") == {"step": 10}
    with pytest.raises(RunError, match="another number of workers"):
        run.load_part("rank-7")


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    checkpoint(run, 5)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    run.begin_checkpoint(10)
    with pytest.raises(RunError, match="No space left on device"):
        run.save_part(10, "shared", {"step": 10})
    run.abandon_checkpoint(10)
    assert run.load_part("shared") == {"step": 5}
    assert not list(tmp_path.glob("**/*.tmp"))


def test_a_row_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    run.append_row(ROW)
    before = run.metrics.read_bytes()
    real = Path.open

    class Short:
        """A file on a disk with room for ten bytes."""

        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:10]))  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    monkeypatch.setattr(Path, "open", lambda path, *words, **options: Short(real(path, *words, **options)))
    with pytest.raises(RunError, match="No space left"):
        run.append_row(ROW)
    monkeypatch.undo()
    assert run.metrics.read_bytes() == before


def test_metrics_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(6):
        run.append_row({**ROW, "step": step})
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 2, "ev')
    run.cut_metrics(3)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_last_row_without_its_end_is_not_joined_with_the_next(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_row({**ROW, "step": 1})
    run.metrics.write_bytes(run.metrics.read_bytes().rstrip())
    run.cut_metrics(1)
    run.append_row({**ROW, "step": 2})
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no config\.json"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        RunFolder(tmp_path).read_config()
    with pytest.raises(RunError, match="holds no checkpoint"):
        RunFolder(tmp_path).load_part("shared")


@pytest.mark.parametrize("name", ["config.json", "compare.json"])
@pytest.mark.parametrize("record", ["{}", '{"model_type": "bert"}', "[]", "no JSON"])
def test_a_folder_with_a_file_of_the_same_name_is_not_overwritten(name: str, record: str, tmp_path: Path) -> None:
    """Every folder of a Hugging Face model has a config.json."""
    (tmp_path / name).write_text(record)
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(UsageError, match="does not look like a run folder"):
        RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_a_comparison_is_overwritten_and_a_link_to_a_run_is_not(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.json").write_text('{"methods": ["FP32()"]}')
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with pytest.raises(UsageError, match="is a symbolic link"):
        RunFolder.create(tmp_path / "link", overwrite=True)
    assert (tmp_path / "c" / "compare.json").exists()
    RunFolder.create(tmp_path / "c", overwrite=True)
    assert not any((tmp_path / "c").iterdir())


def test_a_folder_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    RunFolder(tmp_path).write_config(config_of(PLAN))
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(RunError, match=r"cannot write .*: Permission denied; choose another folder"):
        RunFolder.create(tmp_path, overwrite=True)


def test_runs_that_begin_in_the_same_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers do that join together, and ``gradwire train --seed $s &`` in a loop."""
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(run_record, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=lambda: now)))
    # All have their names before the first of them makes its run.
    folders = [default_folder(PLAN) for _ in range(3)]
    assert [RunFolder.create(folder).path.name for folder in folders] == [
        f"digits-fp32-20260102-030405{end}" for end in ("", "-2", "-3")
    ]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("runs").touch()
    with pytest.raises(RunError, match="choose another folder"):
        default_folder(PLAN)


# ---------------------------------------------------------------------- locks


def is_locked(folder: Path) -> bool:
    """Return whether another process would be refused: locks of one process are told apart as those of several."""
    try:
        with RunFolder(folder).locked():
            return False
    except RunError as error:
        return f"another process trains in {folder}" in str(error)


def test_a_run_in_which_another_process_trains_is_neither_continued_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (folder, launch):
        monkeypatch.setattr(module, "LOCK_PATIENCE_S", 0.0)
    run = RunFolder.create(tmp_path / "c" / "fp32")
    run.write_config(config_of(PLAN))
    (tmp_path / "c" / "compare.json").write_text('{"methods": ["FP32()"]}')
    run.begin_checkpoint(2)
    run.commit_checkpoint(2)
    with run.locked():
        assert is_locked(run.path)
        with pytest.raises(RunError, match="another process trains in"):
            launch.run_workers(PLAN, run.path, lambda row: None, resume=True)
        with pytest.raises(RunError, match="another process trains in"):
            member.resume_as_member(run.path, Listener(), "127.0.0.1:1", "secret")
        for path in (run.path, tmp_path / "c"):
            with pytest.raises(RunError, match="another process trains in"):
                RunFolder.create(path, overwrite=True)
    assert run.read_config() == config_of(PLAN) | {"started": run.read_config()["started"]}
    assert not is_locked(run.path)


def test_rank_0_of_torchruns_group_locks_the_folder_until_it_has_trained(tmp_path: Path) -> None:
    with group_of_one(), contextlib.ExitStack() as lock:
        path = worker._agree_on_folder(PLAN, tmp_path / "run", False, lock)
        assert is_locked(path)
    assert not is_locked(path)


def test_a_member_locks_the_folder_that_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def train(plan: RunConfig, *told: object) -> Path:
        run: RunFolder = told[3]()  # type: ignore[operator]
        found.append(is_locked(run.path))
        return run.path

    monkeypatch.setattr(member, "_train", train)
    path = member.train_as_member(PLAN, Listener(), "127.0.0.1:1", "secret", folder=tmp_path / "a")
    assert found == [True]
    assert not is_locked(path)


def test_where_nothing_can_be_locked_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "there is none")


def test_a_lock_ends_with_its_process_whatever_that_has_started(tmp_path: Path) -> None:
    """Forks have copies of all descriptors, and commands inherit what is not closed for them."""
    # A line in one write: with PYTHONUNBUFFERED, ``print`` writes the end of the line apart, and two lines mix.
    code = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "from gradwire.tools.experiments.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked():\n"
        "    if os.fork() == 0:\n"
        "        os.write(1, b'forked\\n')\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    subprocess.Popen(['cat'], stdout=subprocess.DEVNULL, close_fds=False)\n"
        "    os.write(1, b'locked\\n')\n"
        "    os.wait()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The fork closes its copy of the lock before it runs on.
        assert {process.stdout.readline() for _ in range(2)} == {"forked\n", "locked\n"}
        assert is_locked(tmp_path)
        process.kill()
        # As ``process.wait``, while both children still wait for the end of their input.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_locked(tmp_path)


def test_the_workers_of_a_killed_launcher_keep_the_folder_locked_while_they_live(tmp_path: Path) -> None:
    """They may be writing a checkpoint. Closing the launcher's own descriptor stands for its death."""
    run = RunFolder.create(tmp_path / "run")
    run.write_config(config_of(PLAN))
    with launch.Crew(PLAN, run.path, resume=False, stop_after=None) as crew:
        assert crew._lock is not None
        folder._unlock(crew._lock)
        assert is_locked(run.path)
        for held in crew.workers:
            held.process.kill()
        # Those who come after wait until the last of them has ended.
        with run.locked(patience_s=60.0):
            assert [held.process.wait() for held in crew.workers] == [-9, -9]
    assert not is_locked(run.path)
