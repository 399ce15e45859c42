"""Readers that hold slices, of weights that one process publishes whole or in strips."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from weight_cases import DTYPES, any_bits, copies, manifest, nudge, octets, same, weights, zeros

import gradwire as gw

COLUMNS = (slice(None), slice(250, 500))
ROWS = (slice(75, 150),)
STRIPS = {"layer.weight": (1, 4), "*": (0, 4)}
BY_ROWS = {"*": (0, 4)}


def slice_of(trained: dict[str, torch.Tensor], ranges: tuple[slice, ...]) -> dict[str, torch.Tensor]:
    """The weights of a reader that holds a part of the matrix."""
    return trained | {"layer.weight": trained["layer.weight"][ranges].contiguous()}


@pytest.fixture(params=["folder", "memory", "store"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    kinds = {"folder": tmp_path / "place", "memory": f"memory://{secrets.token_hex(8)}", "store": dist.HashStore()}
    return kinds[request.param]


@pytest.mark.parametrize("ranges", [COLUMNS, ROWS], ids=["columns", "rows"])
@pytest.mark.parametrize("strips", [None, STRIPS, {"*": (0, 4)}], ids=["whole", "columns", "rows"])
def test_slices_of_any_publication_are_followed(
    ranges: tuple[slice, ...], strips: dict[str, tuple[int, int]] | None, where: object
) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, where, 3, strips=strips)
    served = zeros(slice_of(trained, ranges))
    subscriber = gw.WeightSubscriber(served, where, slices={"layer.weight": ranges})
    assert subscriber.update() is None
    for step in range(5):
        publisher.publish(step)
        assert subscriber.update() == subscriber.step == step
        assert same(slice_of(trained, ranges), served)
        assert step == 0 or "patch" in subscriber.applied[0].name
        nudge(trained, step)
    late = zeros(served)
    assert gw.WeightSubscriber(late, where, slices={"layer.weight": ranges}).update() == 4
    assert same(late, served)


def test_readers_of_strips_fetch_theirs_alone(where: object) -> None:
    """A quarter of the matrix, by anchor and by patch: what is beside it is a few kilobytes."""
    trained = {"w": torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()}
    publisher = gw.WeightPublisher(trained, where, strips={"w": (1, 4)})
    ranges = (slice(None), slice(512, 1024))
    served = {"w": torch.zeros(1024, 512, dtype=torch.bfloat16)}
    subscriber = gw.WeightSubscriber(served, where, slices={"w": ranges})
    for step in range(3):
        publication = publisher.publish(step)
        assert subscriber.update() == step
        assert torch.equal(served["w"], trained["w"][ranges])
        published = publication.patch_bytes or publication.anchor_bytes
        (file,) = subscriber.applied
        assert published / 4.2 < file.nbytes < published / 4 + 70_000
        nudge(trained, step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_any_type_arrive(dtype: torch.dtype, tmp_path: Path) -> None:
    trained = {"w": any_bits(12 * 10, dtype).reshape(12, 10)}
    served = {"w": any_bits(12 * 3, dtype, 1).reshape(12, 3)}
    publisher = gw.WeightPublisher(trained, tmp_path, strips={"w": (1, 4)})
    subscriber = gw.WeightSubscriber(served, tmp_path, slices={"w": (slice(None), slice(5, 8))})
    for step in range(2):
        publisher.publish(step)
        subscriber.update()
        assert torch.equal(octets(served["w"]), octets(trained["w"][:, 5:8].contiguous()))
        octets(trained["w"])[::3] = octets(any_bits(120, dtype, 2))[::3]


def test_whole_tensors_and_files_follow_strips(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher = gw.WeightPublisher(trained, tmp_path / "place", strips=BY_ROWS)
    subscriber = gw.WeightSubscriber(served, tmp_path / "place")
    follower = gw.WeightSubscriber(tmp_path / "model", tmp_path / "place")
    for step in range(3):
        publisher.publish(step)
        assert subscriber.update() == follower.update() == step
        assert same(trained, served)
        nonempty = {name: tensor for name, tensor in trained.items() if tensor.numel()}
        found = load_file(tmp_path / "model" / "model.safetensors")
        assert same(nonempty, {name: tensor for name, tensor in found.items() if tensor.numel()})
        nudge(trained, step)
    # One that begins anew finds by its bytes which step it has.
    again = gw.WeightSubscriber(tmp_path / "model", tmp_path / "place")
    assert again.update() == 2
    assert again.applied == ()


def test_files_are_published_in_strips(tmp_path: Path) -> None:
    trained = weights()
    save_file(trained, tmp_path / "w.safetensors")
    publisher = gw.WeightPublisher(tmp_path / "w.safetensors", tmp_path / "place", strips=STRIPS)
    served = zeros(slice_of(trained, COLUMNS))
    subscriber = gw.WeightSubscriber(served, tmp_path / "place", slices={"layer.weight": COLUMNS})
    for step in range(2):
        publisher.publish(step)
        assert subscriber.update() == step
        assert same(slice_of(trained, COLUMNS), served)
        nudge(trained, step)
        save_file(trained, tmp_path / "w.safetensors")


def test_slices_are_staged_and_swapped(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path)
    served = zeros(slice_of(trained, COLUMNS))
    subscriber = gw.WeightSubscriber(served, tmp_path, slices={"layer.weight": COLUMNS})
    for step in range(4):
        publisher.publish(step)
        before = copies(served)
        assert subscriber.update(into="staging" if step != 2 else None) == step
        if step != 2:
            assert same(served, before)
            subscriber.swap()
        assert same(slice_of(trained, COLUMNS), served)
        assert step == 0 or "patch" in subscriber.applied[0].name
        nudge(trained, step)


def test_a_damaged_strip_is_refused_and_another_one_is_not_seen(tmp_path: Path) -> None:
    """The chunk of strip 3 is damaged: who reads strip 1 does not fetch it, who reads strip 3 refuses it."""
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path, strips={"layer.weight": (1, 4)})
    readers = []
    for strip in (1, 3):
        ranges = (slice(None), slice(250 * strip, 250 * strip + 250))
        served = zeros(slice_of(trained, ranges))
        readers.append((ranges, served, gw.WeightSubscriber(served, tmp_path, slices={"layer.weight": ranges})))
    publisher.publish(0)
    for _, _, subscriber in readers:
        subscriber.update()
    before = copies(readers[1][1])
    nudge(trained, 0)
    publisher.publish(1)
    path = tmp_path / manifest(tmp_path).files[-1].name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    ranges, served, subscriber = readers[0]
    assert subscriber.update() == 1
    assert same(slice_of(trained, ranges), served)
    with pytest.raises(gw.PayloadError, match="was damaged: its digest differs"):
        readers[1][2].update()
    assert same(readers[1][1], before)


def test_slices_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    trained = weights()
    gw.WeightPublisher(trained, tmp_path, strips=STRIPS).publish(0)
    with pytest.raises(gw.IncompatibleError, match="no tensor of that name"):
        gw.WeightSubscriber(trained, tmp_path, slices={"x": COLUMNS})
    with pytest.raises(gw.IncompatibleError, match="without steps"):
        gw.WeightSubscriber(trained, tmp_path, slices={"layer.weight": (slice(0, 4, 2),)})
    for ranges in (COLUMNS, (slice(0, 400),), (slice(None),) * 3):
        with pytest.raises(gw.IncompatibleError, match=r"'layer.weight' has the shape \[300, 1000\] here"):
            gw.WeightSubscriber(trained, tmp_path, slices={"layer.weight": ranges}).update()
    with pytest.raises(gw.IncompatibleError, match="no 'scale' here"):
        gw.WeightSubscriber({n: t for n, t in trained.items() if n != "scale"}, tmp_path).update()
    with pytest.raises(gw.IncompatibleError, match="a file has whole tensors"):
        gw.WeightSubscriber(tmp_path / "w", tmp_path, slices={"layer.weight": COLUMNS})
    sliced = gw.WeightSubscriber(trained, tmp_path)
    sliced.update()
    with pytest.raises(gw.IncompatibleError, match="in pieces are followed by"):
        sliced.apply(b"")
