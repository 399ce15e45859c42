"""``gradwire publish``, ``subscribe`` and ``patch show`` on safetensors files."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from schema_help import fits, schema
from typer.testing import CliRunner, Result

import gradwire as gw
from gradwire.publish.stores import FolderPlace
from gradwire.tools.cli import publish_commands
from gradwire.tools.cli.app import app
from gradwire.tools.cli.publish_commands import FollowedFolder


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def save(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Save the checkpoint of a step."""
    weights = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16(), "b": torch.ones(7)}
    weights["w"].view(torch.int16)[::50] += step
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return weights


@pytest.mark.parametrize("command", [["publish"], ["subscribe"], ["patch", "show"]], ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: gradwire {' '.join(command)}" in " ".join(result.output.split())


def test_checkpoints_become_patches_and_patches_a_file(tmp_path: Path) -> None:
    """Each command ends: the run that is in the place goes on from the checkpoint of its latest step."""
    source, place, target = tmp_path / "run", tmp_path / "place", tmp_path / "weights"
    save(source / "checkpoint-10", 10)
    save(source / "checkpoint-9", 9)
    result = call("publish", "--from", source, "--to", place, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    fits(rows, schema("publish"))
    assert [(row["step"], row["patch_bytes"]) for row in rows] == [(10, 0)]
    result = call("subscribe", "--from", place, "--to", target, "--json")
    assert result.exit_code == 0, result.stderr
    fits(json.loads(result.stdout), schema("subscribe"))
    weights = {step: save(source / f"checkpoint-{step}", step) for step in (20, 100)}
    rows = json.loads(call("publish", "--from", source, "--to", place, "--json").stdout)
    assert [(row["step"], row["anchor_bytes"], row["changed"]) for row in rows] == [(20, 0, 60), (100, 0, 60)]
    result = call("subscribe", "--from", place, "--to", target, "--json")
    rows = json.loads(result.stdout)
    assert [row["step"] for row in rows] == [20, 100]
    assert "patch from step 10 to step 20" in result.stderr
    assert torch.equal(load_file(target / "model.safetensors")["w"], weights[100]["w"])
    assert "nothing new" in call("publish", "--from", source, "--to", place).stderr
    assert "has step 100, the latest" in call("subscribe", "--from", place, "--to", target).stderr
    shown = call("patch", "show", *sorted(place.glob("*.gww")), "--json")
    rows = json.loads(shown.stdout)
    fits(rows, schema("patch_show"))
    assert [(row["kind"], row["base_step"], row["step"]) for row in rows] == [
        ("anchor", None, 10), ("patch", 10, 20), ("patch", 20, 100)
    ]  # fmt: skip
    table = call("patch", "show", *sorted(place.glob("patch-*"))).stdout
    assert "patch-000000000020" in table


def test_rounded_patches_in_strips_are_relayed(tmp_path: Path) -> None:
    source, place, hop = tmp_path / "run", tmp_path / "place", tmp_path / "hop"
    words = ["publish", "--from", source, "--to", place, "--lossy", "EDEN(bits=4)", "--strips", "w=0/2", "--json"]
    first, target = tmp_path / "first", tmp_path / "target"
    for step in (1, 2):
        weights = save(source / f"step-{step}", step)
        result = call(*words)
        assert "differences are rounded by EDEN(bits=4" in " ".join(result.stderr.split())
        assert [row["step"] for row in json.loads(result.stdout)] == [step]
        assert call("subscribe", "--from", place, "--to", first, "--relay", hop, "--lossy").exit_code == 0
        assert call("subscribe", "--from", hop, "--to", target, "--lossy").exit_code == 0
        found = load_file(target / "model.safetensors")
        assert torch.equal(found["w"], load_file(first / "model.safetensors")["w"])
        assert torch.allclose(found["w"].float(), weights["w"].float(), atol=0.1)
    refused = call("subscribe", "--from", place, "--to", tmp_path / "other")
    assert refused.exit_code == 1
    assert "lossy=True" in refused.stderr.replace("\n", " ")
    rows = json.loads(call("patch", "show", *sorted(place.glob("*.gww")), "--json").stdout)
    fits(rows, schema("patch_show"))
    assert all(row["lossy"] is None for row in rows if row["kind"] == "anchor")
    assert call("publish", "--from", source, "--to", place, "--strips", "w=0").exit_code == 2


def test_a_file_that_is_written_over_counts_its_steps(tmp_path: Path) -> None:
    source, place = tmp_path / "model", tmp_path / "place"
    save(source, 0)
    assert json.loads(call("publish", "--from", source, "--to", place, "--json").stdout)[0]["step"] == 0
    assert json.loads(call("publish", "--from", source, "--to", place, "--json").stdout) == []


def test_a_file_that_is_being_written_over_is_not_published(tmp_path: Path) -> None:
    source, place = tmp_path / "model", tmp_path / "place"
    follower = FollowedFolder(source, str(place), looks_again=True)

    def steps() -> list[int]:
        return [publication.step for publication in follower.publish()]

    source.mkdir()
    assert steps() == []
    save(source, 0)
    assert (steps(), steps(), steps()) == ([], [0], [])
    for seed in (1, 2):
        # Between two looks it changes again.
        save(source, seed)
        os.utime(source / "model.safetensors", ns=(seed, seed))
        assert steps() == []
    assert (steps(), steps()) == ([1], [])


def test_failures_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gww").write_bytes(b"no patch")
    for words, message in (
        (["publish", "--from", tmp_path / "no", "--to", tmp_path / "p"], "does not exist"),
        (["subscribe", "--from", tmp_path / "p", "--to", tmp_path / "w"], "nothing has been published"),
        (["patch", "show", tmp_path / "x.gww"], "8 bytes are not a file of weights"),
        (["patch", "show", tmp_path / "y.gww"], "cannot be read"),
        (["patch", "show", tmp_path], "is a folder: name files in it"),
        (["publish", "--from", tmp_path, "--to", "nosuch://place"], "nothing new"),
    ):
        result = call(*words)
        line = result.stderr.splitlines()[-1]
        assert message in line.replace("\n", " "), line
        assert result.exit_code == (0 if message == "nothing new" else 1)
    assert call("publish", "--from", tmp_path).exit_code == 2


def test_watching_follows_checkpoints_until_it_is_interrupted(tmp_path: Path) -> None:
    source, place, target = tmp_path / "run", tmp_path / "place", tmp_path / "weights"
    source.mkdir()
    run = [sys.executable, "-m", "gradwire"]
    words = [
        [*run, "publish", "--from", str(source), "--to", str(place), "--watch", "--every", "0.05", "--json"],
        [*run, "subscribe", "--from", str(place), "--to", str(target), "--watch", "--every", "0.05", "--json"],
    ]
    processes = [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in words]
    try:
        file = target / "model.safetensors"
        for step in (1, 2, 3):
            weights = save(tmp_path / "written", step)
            os.replace(tmp_path / "written", source / f"step-{step}")
            deadline = time.monotonic() + 90
            while not file.exists() or not torch.equal(load_file(file)["w"], weights["w"]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        # An interruption before a process has said so may lose the row that it prints at its end.
        for process in processes:
            assert process.stderr is not None
            assert any(" 3: " in line for line in process.stderr)
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    published, followed = (json.loads(out) for out, _ in outputs)
    assert [row["step"] for row in published] == [1, 2, 3]
    assert followed[-1]["step"] == 3


@pytest.mark.parametrize(
    ("words", "message"), [(["--anchor-every", 0], "anchor_every=0"), (["--lossy", "terngrat"], "did you mean")]
)
def test_options_that_no_later_turn_would_accept_end_the_watching(
    words: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run" / "checkpoint-1", 1)
    monkeypatch.setattr(publish_commands, "time", SimpleNamespace(sleep=interrupt))
    result = call("publish", "--from", tmp_path / "run", "--to", tmp_path / "place", "--watch", *words)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("as_json", [False, True])
def test_rows_are_kept_for_json_alone(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run" / "checkpoint-1", 1)
    made = list[object]()
    for name in ("publication_row", "asdict"):
        real = getattr(publish_commands, name)
        monkeypatch.setattr(publish_commands, name, lambda one, real=real: made.append(one) or real(one))
    for words in (
        ["publish", "--from", tmp_path / "run", "--to", tmp_path / "place"],
        ["subscribe", "--from", tmp_path / "place", "--to", tmp_path / "weights"],
    ):
        before = len(made)
        result = call(*words, *(["--json"] if as_json else []))
        assert result.exit_code == 0
        assert "nothing new" not in result.stderr
        assert "the latest" not in result.stderr
        assert (len(made) > before) == as_json


@pytest.mark.parametrize("base", ["sums", "file"])
def test_the_base_may_be_a_file_or_sums(base: str, tmp_path: Path) -> None:
    source, place, file = tmp_path / "run", tmp_path / "place", tmp_path / "base.bin"
    save(source / "checkpoint-1", 1)
    words = ("publish", "--from", source, "--to", place, "--base", file if base == "file" else base, "--json")
    assert call(*words).exit_code == 0
    save(source / "checkpoint-2", 2)
    result = call(*words)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)
    # Sums know that a block changed, but not which elements of it.
    assert row["changed"] == (60 if base == "file" else 3000)
    assert file.exists() == (base == "file")


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kinds of files that cannot be written for the time being."""
    kinds, write = set[str](), FolderPlace.write

    def failing(place: FolderPlace, name: str, pieces: Any) -> None:
        if name.startswith(tuple(kinds)):
            raise OSError("no space left")
        write(place, name, pieces)

    monkeypatch.setattr(FolderPlace, "write", failing)
    return kinds


@pytest.mark.parametrize("kind", ["patch", "manifest"])
def test_a_checkpoint_that_could_not_be_written_is_written_in_a_later_turn(
    kind: str, tmp_path: Path, unwritable: set[str]
) -> None:
    """Without another checkpoint, and as the patch that it was."""
    source, place, target = tmp_path / "run", tmp_path / "place", tmp_path / "weights"
    follower = FollowedFolder(source, str(place))
    save(source / "checkpoint-10", 10)
    assert [publication.step for publication in follower.publish()] == [10]
    subscriber = gw.WeightSubscriber(target, place)
    subscriber.update()
    weights = save(source / "checkpoint-20", 20)
    unwritable.add(kind)
    for _ in range(3):
        with pytest.raises(OSError, match="no space left"):
            list(follower.publish())
    assert subscriber.update() == 10
    unwritable.clear()
    (publication,) = follower.publish()
    assert (publication.step, publication.anchor_bytes, publication.changed) == (20, 0, 60)
    assert publication.patch_bytes == next(place.glob("patch-*")).stat().st_size
    assert list(follower.publish()) == []
    assert subscriber.update() == 20
    assert [file.name for file in subscriber.applied] == ["patch from step 10 to step 20"]
    assert torch.equal(load_file(target / "model.safetensors")["w"], weights["w"])


def test_the_first_checkpoint_is_written_in_a_later_turn(tmp_path: Path, unwritable: set[str]) -> None:
    """And none before it."""
    source, place = tmp_path / "run", tmp_path / "place"
    follower = FollowedFolder(source, str(place))
    for step in (9, 10):
        save(source / f"checkpoint-{step}", step)
    unwritable.add("anchor")
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            list(follower.publish())
    unwritable.clear()
    assert [publication.step for publication in follower.publish()] == [10]
    assert gw.WeightSubscriber(tmp_path / "weights", place).update() == 10


def test_a_file_that_was_written_over_and_could_not_be_published_is_published_once(
    tmp_path: Path, unwritable: set[str]
) -> None:
    source, place = tmp_path / "model", tmp_path / "place"
    follower = FollowedFolder(source, str(place))
    save(source, 0)
    assert [publication.step for publication in follower.publish()] == [0]
    save(source, 1)
    os.utime(source / "model.safetensors", ns=(1, 1))
    unwritable.add("patch")
    with pytest.raises(OSError, match="no space left"):
        list(follower.publish())
    unwritable.clear()
    assert [(publication.step, publication.changed) for publication in follower.publish()] == [(1, 60)]
    assert list(follower.publish()) == []


def cut(folder: Path) -> None:
    """Cut a checkpoint short, as a trainer does that is killed while it writes."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_index(folder: Path) -> None:
    """Leave a checkpoint whose index is half written."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w":')


@pytest.mark.parametrize("damage", [cut, cut_index])
def test_a_broken_checkpoint_is_left_out_once_there_is_a_newer_one(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    source, lines = tmp_path / "run", list[str]()
    follower = FollowedFolder(source, str(tmp_path / "place"), say=lines.append)
    save(source / "checkpoint-10", 10)
    assert [publication.step for publication in follower.publish()] == [10]
    save(source / "checkpoint-20", 20)
    damage(source / "checkpoint-20")
    for _ in range(2):
        with pytest.raises(gw.IncompatibleError, match="checkpoint-20"):
            list(follower.publish())
    save(source / "checkpoint-30", 30)
    cut(source / "checkpoint-30")
    for _ in range(2):
        # The newest may still be in the making.
        with pytest.raises(gw.IncompatibleError, match="checkpoint-30"):
            list(follower.publish())
    save(source / "checkpoint-30", 30)
    assert [publication.step for publication in follower.publish()] == [30]
    assert list(follower.publish()) == []
    (line,) = lines
    assert "checkpoint-20" in line
    assert "left out" in line


def test_a_new_run_begins_where_the_latest_checkpoint_is_broken_by_now(tmp_path: Path) -> None:
    source, place = tmp_path / "run", tmp_path / "place"
    save(source / "checkpoint-10", 10)
    assert call("publish", "--from", source, "--to", place).exit_code == 0
    cut(source / "checkpoint-10")
    save(source / "checkpoint-20", 20)
    rows = json.loads(call("publish", "--from", source, "--to", place, "--json").stdout)
    assert [row["step"] for row in rows] == [20]


def test_half_a_checkpoint_is_not_the_model(tmp_path: Path) -> None:
    """A trainer writes shard after shard, and the index last."""
    folder, place = tmp_path / "run" / "checkpoint-500", tmp_path / "place"
    follower = FollowedFolder(folder.parent, str(place), looks_again=True)
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        save_file({f"w{number}": torch.ones(5)}, folder / f"model-{number:05d}-of-00003.safetensors")
        if number < 3:
            with pytest.raises(gw.IncompatibleError, match=rf"not complete: model-{number + 1:05d}-of-00003"):
                list(follower.publish())
    assert [(publication.step, publication.elements) for publication in follower.publish()] == [(500, 15)]


class EndpointConnectionError(Exception):
    """What botocore raises where there is no network: no OSError."""


class Network:
    """Cuts the network of ``memory://`` for the first turns of a command, and then interrupts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, turns: int, then: int) -> None:
        self.left, self.then = turns, then
        for name in ("open", "cat_file", "info", "makedirs", "rm_file", "exists", "ls"):
            monkeypatch.setattr(MemoryFileSystem, name, self._cut(getattr(MemoryFileSystem, name)))
        monkeypatch.setattr("gradwire.tools.cli.publish_commands.time", SimpleNamespace(sleep=self._sleep))

    def _cut(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*words: Any, **options: Any) -> Any:
            if self.left > 0:
                raise EndpointConnectionError('Could not connect to the endpoint URL: "https://bucket"')
            return call(*words, **options)

        return cut

    def _sleep(self, seconds: float) -> None:
        self.left -= 1
        if self.left <= -self.then:
            raise KeyboardInterrupt


def test_watching_goes_on_after_an_outage_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, url = tmp_path / "run", tmp_path / "weights", f"memory://{secrets.token_hex(8)}"
    save(source / "checkpoint-10", 10)
    for words in (["publish", "--from", source, "--to", url], ["subscribe", "--from", url, "--to", target]):
        with monkeypatch.context() as context:
            Network(context, turns=2, then=2)
            result = call(*words, "--watch", "--json")
        assert result.exit_code == 0, result.exception
        assert [row["step"] for row in json.loads(result.stdout)] == [10]
        assert result.stderr.count("Could not connect to the endpoint") == 1
        assert "trying again" in result.stderr


def test_an_outage_of_the_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{secrets.token_hex(8)}"
    save(tmp_path / "run", 10)
    Network(monkeypatch, turns=1, then=1)
    for words in (["publish", "--from", tmp_path / "run", "--to", url], ["subscribe", "--from", url, "--to", tmp_path]):
        result = call(*words)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert "Could not connect to the endpoint" in line
