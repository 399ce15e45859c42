"""What is damaged, lost, reordered, repeated or foreign is refused by name, and the weights stay as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from weight_cases import copies, files, manifest, nudge, same, weights, zeros

import gradwire as gw
from benchmarks.trials.hostile_patches import attempt, prepare
from gradwire.publish.container import read_head
from gradwire.publish.manifest import MANIFEST, Manifest


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, list[dict[str, torch.Tensor]], list[bytes]]:
    """An anchor and three patches, the weights of each step, and the files' bytes."""
    states, names = files(tmp_path, steps=4)
    return tmp_path, states, [(tmp_path / name).read_bytes() for name in names]


def at(
    step: int, published: tuple[Path, list[dict[str, torch.Tensor]], list[bytes]]
) -> tuple[gw.WeightSubscriber, dict[str, torch.Tensor]]:
    """A subscriber with the weights of a step, and its tensors."""
    folder, states, data = published
    served = zeros(states[0])
    subscriber = gw.WeightSubscriber(served, folder)
    for octets in data[: step + 1]:
        subscriber.apply(octets)
    assert same(served, states[step])
    return subscriber, served


Published = tuple[Path, list[dict[str, torch.Tensor]], list[bytes]]


def test_patches_apply_in_order_alone(published: Published) -> None:
    _, states, data = published
    subscriber, served = at(1, published)
    for octets, reason in (
        (data[3], "patch from step 2 to step 3 does not follow .* step 1: patches between them are missing"),
        (data[1], "patch from step 0 to step 1 does not follow .* a second time, or late"),
        (data[0], "anchor of step 0 comes a second time, or late"),
    ):
        with pytest.raises(gw.PayloadError, match=reason):
            subscriber.apply(octets)
        assert subscriber.step == 1
        assert same(served, states[1])
    assert subscriber.apply(data[2]) == 2
    assert same(served, states[2])


def test_a_patch_of_no_known_weights_is_refused(published: Published) -> None:
    served = zeros(published[1][0])
    with pytest.raises(gw.PayloadError, match="patch from step 0 to step 1 does not follow on these weights"):
        gw.WeightSubscriber(served, published[0]).apply(published[2][1])
    assert same(served, zeros(served))


def test_patches_of_another_run_are_refused(published: Published, tmp_path: Path) -> None:
    trained = weights()
    other = gw.WeightPublisher(trained, tmp_path / "other")
    other.publish(0)
    nudge(trained, 0)
    other.publish(1)
    (patch,) = (tmp_path / "other").glob("patch-*")
    subscriber, served = at(0, published)
    with pytest.raises(gw.PayloadError, match=f"is of run {other.run[:8]}, and these weights are of run"):
        subscriber.apply(patch.read_bytes())
    assert same(served, published[1][0])
    # An anchor begins anew, unless the subscriber was told which run to follow.
    anchor = next((tmp_path / "other").glob("anchor-*")).read_bytes()
    bound = gw.WeightSubscriber(served, published[0], run=manifest(published[0]).run)
    with pytest.raises(gw.PayloadError, match=f"anchor of step 0 has run {other.run[:8]}, and this subscriber follows"):
        bound.apply(anchor)
    assert same(served, published[1][0])
    assert subscriber.apply(published[2][1]) == 1


def test_truncated_and_extended_files_are_refused(published: Published) -> None:
    subscriber, served = at(0, published)
    patch = published[2][1]
    for size in (0, 1, 100, 143, 144, 200, len(patch) - 1):
        with pytest.raises(gw.PayloadError):
            subscriber.apply(patch[:size])
    with pytest.raises(gw.PayloadError, match="truncated or extended"):
        subscriber.apply(patch + b"\0")
    assert same(served, published[1][0])


def test_every_damaged_byte_is_noticed(published: Published) -> None:
    """One byte of every hundred of a patch, and every one of its head and tables."""
    subscriber, served = at(0, published)
    patch = bytearray(published[2][1])
    body_at = read_head(np.frombuffer(patch, np.uint8)).body_at
    for place in (*range(body_at), *range(body_at, len(patch), 100)):
        patch[place] ^= 1 << place % 8
        with pytest.raises(gw.PayloadError):
            subscriber.apply(bytes(patch))
        patch[place] ^= 1 << place % 8
    assert same(served, published[1][0])
    assert subscriber.apply(bytes(patch)) == 1


def test_a_damaged_patch_is_named_and_the_next_anchor_mends_it(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=3)
    publisher.publish(0)
    served = zeros(trained)
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    states = [copies(trained)]
    for step in (1, 2):
        nudge(trained, step)
        publisher.publish(step)
        states.append(copies(trained))
    (second,) = tmp_path.glob("patch-000000000002-*")
    octets = bytearray(second.read_bytes())
    octets[-1] ^= 1
    second.write_bytes(octets)
    for _ in range(2):
        with pytest.raises(gw.PayloadError, match="patch from step 1 to step 2: chunk 0 was damaged"):
            subscriber.update()
        # The patch before it has been written.
        assert subscriber.step == 1
        assert same(served, states[1])
    second.write_bytes(octets[:500])
    with pytest.raises(gw.PayloadError, match=rf"{second.name}: the file was truncated .* and has 500"):
        subscriber.update()
    nudge(trained, 3)
    assert publisher.publish(3).anchor_bytes
    assert subscriber.update() == 3
    assert [file.name for file in subscriber.applied] == ["anchor of step 3"]
    assert same(served, trained)


def test_a_missing_patch_is_no_half_of_an_update(published: Published) -> None:
    folder, states, _ = published
    subscriber, served = at(0, published)
    (lost,) = folder.glob("patch-000000000002-*")
    lost.unlink()
    with pytest.raises(gw.PayloadError, match=r"lost: .*patch-000000000002"):
        subscriber.update()
    assert subscriber.step == 1
    assert same(served, states[1])


def test_a_file_under_the_name_of_another_is_refused(published: Published) -> None:
    folder, states, data = published
    subscriber, served = at(0, published)
    (second,) = folder.glob("patch-000000000001-*")
    whole = manifest(folder)
    entry = next(file for file in whole.files if file.name == second.name)
    second.write_bytes(data[2])
    swapped = replace(whole, files=tuple(replace(f, nbytes=len(data[2])) if f == entry else f for f in whole.files))
    (folder / MANIFEST).write_bytes(swapped.pack())
    with pytest.raises(
        gw.PayloadError, match=r"is the patch from step 1 to step 2 .* not the file that the manifest lists"
    ):
        subscriber.update()
    assert same(served, states[0])


def test_tensors_that_something_else_has_changed_are_noticed_and_mended(published: Published) -> None:
    _, states, _ = published
    subscriber, served = at(2, published)
    served["layer.weight"][7, 7] += 1
    changed = copies(served)
    with pytest.raises(gw.PayloadError, match=r"something else has changed the tensor 'layer.weight'"):
        subscriber.update()
    assert same(served, changed)
    assert subscriber.update() == 3
    assert same(served, states[3])
    assert subscriber.applied[0].name == "anchor of step 0"


def test_an_older_manifest_takes_no_reader_back(published: Published) -> None:
    folder, states, _ = published
    subscriber, served = at(3, published)
    whole = manifest(folder)
    (folder / MANIFEST).write_bytes(replace(whole, files=whole.files[:2]).pack())
    assert subscriber.update() == 3
    assert same(served, states[3])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-40], "not complete"),
        (lambda text: text.replace(b"anchor", b"author", 1), "not complete"),
        (lambda text: b"", "not complete"),
    ],
)
def test_a_torn_manifest_is_refused(published: Published, change: object, reason: str) -> None:
    folder, states, _ = published
    subscriber, served = at(0, published)
    path = folder / MANIFEST
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(gw.PayloadError, match=reason):
        subscriber.update()
    assert same(served, states[0])


@pytest.mark.parametrize("name", ["../x.gww", "/etc/x.gww", "a/b.gww", "x.json", "", "a" * 300 + ".gww", "\u00e9.gww"])
def test_a_manifest_names_files_of_its_own_folder_alone(published: Published, name: str) -> None:
    whole = manifest(published[0])
    bad = replace(whole, files=(replace(whole.files[0], name=name), *whole.files[1:]))
    with pytest.raises(gw.PayloadError, match="names the file"):
        Manifest.parse(bad.pack())


def test_hostile_patches_are_refused_and_the_weights_untouched() -> None:
    """A small run of the trial: fields and bytes changed at will, with all digests made to fit."""
    case = prepare(seed=0)
    outcomes = [attempt(case, number) for number in range(400)]
    assert {outcome for outcome, _ in outcomes} <= {"refused", "right"}
    assert sum(outcome == "refused" for outcome, _ in outcomes) > 380
    assert len({reason for _, reason in outcomes}) > 10
