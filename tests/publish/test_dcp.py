"""Folders of torch.distributed.checkpoint, to publish."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_shards import sharded, step_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from typer.testing import CliRunner
from weight_cases import copies, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.dcp_files import DistributedCheckpoint
from gradwire.tools.cli.app import app
from ranks import Ranks


def save(tensors: dict[str, torch.Tensor], folder: Path, **more: Any) -> None:
    """Save a checkpoint of one process."""
    dcp.save({"model": tensors, **more}, checkpoint_id=str(folder), no_dist=True)


def test_checkpoints_are_published_without_what_is_beside_the_model(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    save(trained, tmp_path / "1", optimizer={"step": torch.tensor(3.0), "lr": 0.1}, epoch=4)
    publisher = gw.WeightPublisher(tmp_path / "1", tmp_path / "place")
    subscriber = gw.WeightSubscriber(served, tmp_path / "place")
    for step in (1, 2):
        publication = publisher.publish(step, tmp_path / str(step))
        assert (publication.patch_bytes > 0) == (step == 2)
        assert subscriber.update() == step
        assert same(trained, served)
        nudge(trained, step)
        save(trained, tmp_path / str(step + 1))


def save_sharded(folder: str) -> None:
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases: list[tuple[Any, list[Any]]] = [
        (flat, [Shard(0)]), (flat, [Shard(1)]), (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)])
    ]  # fmt: skip
    for step, (mesh, placements) in enumerate(cases):
        dcp.save({"model": sharded(step_of(step), mesh, *placements)}, checkpoint_id=f"{folder}/step-{step}")
        dist.barrier()


@pytest.mark.ranks
def test_checkpoints_of_any_sharding_are_patches_of_one_run(four_ranks: Ranks, tmp_path: Path) -> None:
    """By the command line: a training whose sharding changes from one checkpoint to the next."""
    four_ranks(save_sharded, str(tmp_path / "run"))
    words = ["publish", "--from", str(tmp_path / "run"), "--to", str(tmp_path / "place"), "--json"]
    newest = json.loads(CliRunner().invoke(app, words).stdout)
    assert [row["step"] for row in newest] == [3]
    served = zeros(step_of(0))
    publisher = gw.WeightPublisher(tmp_path / "run" / "step-0", tmp_path / "other")
    subscriber = gw.WeightSubscriber(served, tmp_path / "other")
    for step in range(4):
        publication = publisher.publish(step, tmp_path / "run" / f"step-{step}")
        assert (publication.anchor_bytes > 0) == (step == 0)
        assert subscriber.update() == step
        assert same(served, step_of(step))


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_metadata_that_names_other_classes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(weights(), tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(gw.IncompatibleError, match="cannot be read"):
        gw.WeightPublisher(tmp_path / "c", tmp_path / "place")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps({1: [2]}))
    with pytest.raises(gw.IncompatibleError, match="it is not that of"):
        gw.WeightPublisher(tmp_path / "c", tmp_path / "place")
    assert "executed" not in capsys.readouterr().out


def test_files_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    save(copies(weights()), tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:5000])
    found = DistributedCheckpoint(tmp_path / "c")
    with pytest.raises(gw.IncompatibleError, match="is not complete, or was damaged"):
        found.read(found.layout.spans(0, 1)[0])
    file.unlink()
    with pytest.raises(gw.IncompatibleError, match="is not complete"):
        gw.WeightPublisher(tmp_path / "c", tmp_path / "place").publish(0)


def test_damaged_metadata_is_refused_or_read(tmp_path: Path) -> None:
    """Any damage ends in the one error, or in metadata that fits together: nothing else is raised."""
    save(weights(), tmp_path / "c")
    good = (tmp_path / "c" / ".metadata").read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        if rng.random() < 0.2:
            data = data[: int(rng.integers(len(data)))]
        (tmp_path / "c" / ".metadata").write_bytes(data)
        try:
            DistributedCheckpoint(tmp_path / "c")
        except gw.IncompatibleError:
            refused += 1
    assert refused > 200
