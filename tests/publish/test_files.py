"""Safetensors files, to publish and to follow."""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_cases import copies, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish import following_file
from gradwire.publish.container import anchor_layout, read_head
from gradwire.publish.weights import SavedTensors


def test_files_are_published_and_followed(tmp_path: Path) -> None:
    """From one checkpoint to the next, into a file that safetensors reads."""
    trained, place, target = weights(), tmp_path / "published", tmp_path / "weights"
    save_file(trained, tmp_path / "first.safetensors")
    publisher = gw.WeightPublisher(tmp_path / "first.safetensors", place)
    subscriber = gw.WeightSubscriber(target, place)
    publisher.publish(0)
    assert subscriber.update() == 0
    assert same(load_file(target / "model.safetensors"), trained)
    for step in (1, 2):
        nudge(trained, step)
        save_file(trained, tmp_path / f"{step}.safetensors")
        publication = publisher.publish(step, tmp_path / f"{step}.safetensors")
        assert publication.anchor_bytes == 0
    assert subscriber.update() == 2
    assert [file.step for file in subscriber.applied] == [1, 2]
    assert same(load_file(target / "model.safetensors"), trained)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    # One that begins anew finds by its bytes which step it has.
    again = gw.WeightSubscriber(str(target), place)
    assert again.update() == 2
    assert again.applied == ()


def test_who_has_opened_the_old_file_keeps_it(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path / "published")
    subscriber = gw.WeightSubscriber(tmp_path / "w.safetensors", tmp_path / "published")
    publisher.publish(0)
    subscriber.update()
    before = copies(trained)
    with (tmp_path / "w.safetensors").open("rb") as held:
        nudge(trained, 0)
        publisher.publish(1)
        subscriber.update()
        old = held.read()
    (tmp_path / "old.safetensors").write_bytes(old)
    assert same(load_file(tmp_path / "old.safetensors"), before)
    assert same(load_file(tmp_path / "w.safetensors"), trained)


def test_a_folder_of_shards_is_one_model(tmp_path: Path) -> None:
    trained = weights()
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(trained)
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: trained[name] for name in part}, folder / f"model-{number:05d}-of-00002.safetensors")
    index = {name: f"model-{1 + (name in names[2:]):05d}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    served = zeros(trained)
    gw.WeightPublisher(folder, tmp_path / "published").publish(0)
    gw.WeightSubscriber(served, tmp_path / "published").update()
    assert same(trained, served)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(gw.IncompatibleError, match=r"is not complete: .* names model-00002"):
        gw.WeightPublisher(folder, tmp_path / "published")


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(), path)
    data = path.read_bytes()
    for size in (0, 4, 50, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(gw.IncompatibleError, match=r"complete|safetensors"):
            gw.WeightPublisher(path, tmp_path / "published")
    for header in (b"{", b"[]", b'{"w": 3}', b'{"w": {"dtype": "BF17", "shape": [], "data_offsets": [0, 0]}}'):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(gw.IncompatibleError, match="known types"):
            gw.WeightPublisher(path, tmp_path / "published")
    with pytest.raises(gw.IncompatibleError, match="neither a safetensors file nor a folder"):
        gw.WeightPublisher(tmp_path / "nothing", tmp_path / "published")


def a_patch_behind(folder: Path) -> tuple[dict[str, torch.Tensor], gw.WeightSubscriber, bytes, Path]:
    """Return published weights, a reader that lacks their last patch, the bytes of its file, and the patch."""
    trained = weights()
    publisher = gw.WeightPublisher(trained, folder / "published")
    subscriber = gw.WeightSubscriber(folder / "w.safetensors", folder / "published")
    publisher.publish(0)
    subscriber.update()
    before = (folder / "w.safetensors").read_bytes()
    nudge(trained, 0)
    publisher.publish(1)
    (patch,) = (folder / "published").glob("patch-*")
    return trained, subscriber, before, patch


def test_a_refused_update_leaves_the_file(tmp_path: Path) -> None:
    _, subscriber, before, patch = a_patch_behind(tmp_path)
    octets = bytearray(patch.read_bytes())
    octets[-3] ^= 1
    patch.write_bytes(octets)
    with pytest.raises(gw.PayloadError, match="chunk 0 was damaged"):
        subscriber.update()
    assert (tmp_path / "w.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published", "w.safetensors"]
    assert subscriber.step == 0
    with pytest.raises(gw.IncompatibleError, match="for tensors in memory"):
        subscriber.update(into="staging")


def test_another_model_in_the_place_replaces_the_file(tmp_path: Path) -> None:
    subscriber = gw.WeightSubscriber(tmp_path / "w.safetensors", tmp_path / "published")
    for trained in (weights(), {"other": torch.ones(7, dtype=torch.float16)}):
        gw.WeightPublisher(trained, tmp_path / "published").publish(1)
        assert subscriber.update() == 1
        assert same(load_file(tmp_path / "w.safetensors"), trained)


@pytest.mark.parametrize("system", ["copies ranges", "has no call for that"])
def test_what_no_patch_changes_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """Also in pieces smaller than a tensor, and from a file that somebody else has written."""
    monkeypatch.setattr(following_file, "PIECE_BYTES", 1000)
    if system != "copies ranges":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    trained, target = weights(), tmp_path / "w.safetensors"
    save_file(trained, target, metadata={"of": "another writer, whose header is longer"})
    publisher = gw.WeightPublisher(trained, tmp_path / "published")
    publisher.publish(0)
    subscriber = gw.WeightSubscriber(target, tmp_path / "published")
    assert subscriber.update() == 0
    assert subscriber.applied == ()
    for step in (1, 2, 3):
        trained["layer.weight"][step * 90, :7] += 1.0
        publisher.publish(step)
        if step != 2:
            # Step 2 and step 3 are written into the same new file.
            assert subscriber.update() == step
            assert same(load_file(target), trained)
    trained["steps"] += 1
    publisher.publish(4)
    assert subscriber.update() == 4
    assert same(load_file(target), trained)
    assert len(subscriber.applied) == 1


def test_a_patch_that_is_refused_late_leaves_the_file_and_what_is_known_of_it(tmp_path: Path) -> None:
    trained, subscriber, before, patch = a_patch_behind(tmp_path)
    # Its sums are those of other weights: this is seen once all of it has been written.
    (anchor,) = (tmp_path / "published").glob("anchor-*")
    octets = np.fromfile(patch, np.uint8)
    head, layout = read_head(octets), anchor_layout(read_head(np.fromfile(anchor, np.uint8)))
    sums = (head.sums[0] ^ 1, *head.sums[1:])
    _, lying = replace(head, sums=sums, state=layout.state(sums)).pack()
    with pytest.raises(gw.PayloadError, match="differs from the publisher's"):
        subscriber.apply(lying + octets[head.body_at :].tobytes())
    assert (tmp_path / "w.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published", "w.safetensors"]
    assert subscriber.step == 0
    assert subscriber.apply(octets) == 1
    assert same(load_file(tmp_path / "w.safetensors"), trained)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """A model and its moving average, as accelerator.save_state writes them."""
    trained, folder = weights(), tmp_path / "state"
    folder.mkdir()
    save_file(trained, folder / "model.safetensors")
    averaged = {name: tensor.float() for name, tensor in trained.items()}
    for second in (zeros(trained), averaged, {"other": torch.ones(3), "layer.bias": trained["layer.bias"]}):
        save_file(second, folder / "model_1.safetensors")
        with pytest.raises(gw.IncompatibleError, match=r"model.safetensors and model_1.safetensors both have a tensor"):
            gw.WeightPublisher(folder, tmp_path / "published")
    gw.WeightPublisher(folder / "model.safetensors", tmp_path / "published").publish(0)
    gw.WeightSubscriber(served := zeros(trained), tmp_path / "published").update()
    assert same(served, trained)


def save_shards(trained: dict[str, torch.Tensor], folder: Path, names: list[str]) -> dict[str, str]:
    """Save a model in files of these names, one tensor after the other; return the file of each tensor."""
    folder.mkdir(exist_ok=True)
    owners = {name: names[number % len(names)] for number, name in enumerate(trained)}
    for file in names:
        save_file({name: trained[name] for name in trained if owners[name] == file}, folder / file)
    return owners


def test_an_index_says_which_files_are_the_model(tmp_path: Path) -> None:
    """Another file beside them, such as of an adapter or of a save before, is not read."""
    trained, folder = weights(), tmp_path / "model"
    index = save_shards(trained, folder, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(zeros(trained), folder / "model-00001-of-00003.safetensors")
    save_file({"adapter": torch.ones(3)}, folder / "adapter_model.safetensors")
    gw.WeightPublisher(folder, tmp_path / "published").publish(0)
    gw.WeightSubscriber(served := zeros(trained), tmp_path / "published").update()
    assert same(served, trained)


@pytest.mark.parametrize(
    "index", [b"", b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"w": [3]}}', b"\xff"]
)
def test_an_index_that_is_not_whole_is_refused(tmp_path: Path, index: bytes) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(gw.IncompatibleError, match=r"index.json is not a complete index"):
        gw.WeightPublisher(tmp_path, tmp_path / "published")


@pytest.mark.parametrize("name", ["model-{:05d}-of-00003", "model.fp16-{:05d}-of-00003", "model-{:05d}-of-00003.fp16"])
@pytest.mark.parametrize("first", [0, 1])
def test_shards_without_an_index_are_all_there_or_refused(tmp_path: Path, name: str, first: int) -> None:
    trained, folder = weights(), tmp_path / "model"
    names = [f"{name.format(number)}.safetensors" for number in range(first, first + 3)]
    save_shards(trained, folder, names)
    gw.WeightPublisher(folder, tmp_path / "published").publish(0)
    gw.WeightSubscriber(served := zeros(trained), tmp_path / "published").update()
    assert same(served, trained)
    for lost in names:
        data = (folder / lost).read_bytes()
        (folder / lost).unlink()
        with pytest.raises(gw.IncompatibleError, match=r"model is not complete: .*-of-00003.* is not there"):
            gw.WeightPublisher(folder, tmp_path / "published")
        (folder / lost).write_bytes(data)


def test_a_file_that_is_removed_while_it_is_published_is_read_to_its_end(tmp_path: Path) -> None:
    """As a trainer does that keeps its latest checkpoints alone."""
    save_file(weights(), tmp_path / "w.safetensors")
    saved = SavedTensors(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").unlink()
    assert len(saved.read(saved.layout.spans(0, 1)[0])) == saved.layout.spans(0, 1)[0].elements * 2


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(weights(), tmp_path / "w.safetensors")

    def refuse(path: object, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(gw.IncompatibleError, match=r"w.safetensors cannot be read: Permission denied"):
        SavedTensors(tmp_path / "w.safetensors")
