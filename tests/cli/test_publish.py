"""``gradwire publish``, ``subscribe`` and ``patch show`` on safetensors files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from schema_help import fits, schema
from typer.testing import CliRunner, Result

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
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    published, followed = (json.loads(out) for out, _ in outputs)
    assert [row["step"] for row in published] == [1, 2, 3]
    assert followed[-1]["step"] == 3


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
