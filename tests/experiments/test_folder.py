"""Run folders: whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.experiments.folder import ROW_FIELDS, RunFolder, checkpoint_steps

ROW = dict.fromkeys(ROW_FIELDS, 1)


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
    (tmp_path / "config.json").write_text("{}")
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


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no config\.json"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        RunFolder(tmp_path).read_config()
    with pytest.raises(RunError, match="holds no checkpoint"):
        RunFolder(tmp_path).load_part("shared")
