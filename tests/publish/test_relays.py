"""Subscribers that serve others: chains, trees, process groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from weight_cases import copies, manifest, nudge, same, weights, zeros

import gradwire as gw
from ranks import Ranks


@pytest.mark.parametrize("strips", [None, {"*": (0, 4)}], ids=["whole", "strips"])
def test_a_chain_follows_by_the_publishers_own_patches(strips: Any, tmp_path: Path) -> None:
    """Three hops; anchors are encoded anew at each, and have the publisher's bytes."""
    trained, places = weights(), [tmp_path / str(hop) for hop in range(3)]
    publisher = gw.WeightPublisher(trained, places[0], 3, strips=strips)
    served = [zeros(trained) for _ in places]
    hops = [
        gw.WeightSubscriber(tensors, place, relay=following)
        for tensors, place, following in zip(served, places, [*places[1:], None])
    ]
    for step in range(8):
        publisher.publish(step)
        for tensors, hop in zip(served, hops):
            assert hop.update() == step
            assert same(tensors, trained)
            assert step == 0 or [file.name.split()[0] for file in hop.applied] == ["patch"]
        nudge(trained, step)
    for place in places[1:]:
        assert manifest(place).files == manifest(places[0]).files
        for file in manifest(place).files:
            assert (place / file.name).read_bytes() == (places[0] / file.name).read_bytes()
        assert {path.name for path in place.iterdir()} == {path.name for path in places[0].iterdir()}
        assert gw.WeightSubscriber(late := zeros(trained), place).update() == 7
        assert same(late, served[0])


def test_files_and_readers_of_slices_follow_a_relay(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path / "a", strips={"layer.weight": (1, 4)})
    relay = gw.WeightSubscriber(tmp_path / "model", tmp_path / "a", relay=tmp_path / "b")
    columns = (slice(None), slice(250, 500))
    served = zeros(trained | {"layer.weight": trained["layer.weight"][columns]})
    reader = gw.WeightSubscriber(served, tmp_path / "b", slices={"layer.weight": columns})
    for step in range(3):
        publisher.publish(step)
        assert relay.update() == reader.update() == step
        assert same(served, trained | {"layer.weight": trained["layer.weight"][columns]})
        nudge(trained, step)
    sliced = gw.WeightSubscriber(served, tmp_path / "a", slices={"layer.weight": columns}, relay=tmp_path / "c")
    with pytest.raises(gw.IncompatibleError, match="a relay serves whole weights"):
        sliced.update(full=True)


def test_what_a_hop_refuses_goes_no_further(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher = gw.WeightPublisher(trained, tmp_path / "a", 3)
    relay = gw.WeightSubscriber(served, tmp_path / "a", relay=tmp_path / "b")
    reader = gw.WeightSubscriber(behind := zeros(trained), tmp_path / "b")
    publisher.publish(0)
    assert relay.update() == reader.update() == 0
    before = copies(behind)
    nudge(trained, 0)
    publisher.publish(1)
    (patch,) = (tmp_path / "a").glob("patch-*")
    data = bytearray(patch.read_bytes())
    data[-3] ^= 1
    patch.write_bytes(data)
    with pytest.raises(gw.PayloadError, match="was damaged"):
        relay.update()
    assert reader.update() == 0
    assert same(behind, before)
    for step in (2, 3):
        nudge(trained, step)
        publisher.publish(step)
    assert relay.update() == reader.update() == 3
    assert same(behind, trained)


def test_a_relay_that_begins_anew_or_could_not_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = weights(), zeros(weights())
    publisher = gw.WeightPublisher(trained, tmp_path / "a")
    reader = gw.WeightSubscriber(behind := zeros(trained), tmp_path / "b")
    relay = gw.WeightSubscriber(served, tmp_path / "a", relay=tmp_path / "b")
    publisher.publish(0)
    assert relay.update() == reader.update() == 0
    # A write that fails: the weights are at hand, and the next update brings both patches.
    nudge(trained, 1)
    publisher.publish(1)
    replace = os.replace
    with monkeypatch.context() as context:
        context.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            relay.update()
    assert os.replace is replace
    assert same(served, trained)
    nudge(trained, 2)
    publisher.publish(2)
    assert relay.update() == reader.update() == 2
    assert [file.name.split()[0] for file in reader.applied] == ["patch", "patch"]
    # Another process with the weights of step 2, in which the place's last step is known.
    again = gw.WeightSubscriber(copies(served), tmp_path / "a", relay=tmp_path / "b")
    nudge(trained, 3)
    publisher.publish(3)
    assert again.update() == reader.update() == 3
    assert [file.name.split()[0] for file in reader.applied] == ["patch"]
    # And one whose place is empty.
    other = gw.WeightSubscriber(copies(trained), tmp_path / "a", relay=tmp_path / "c")
    assert other.update() == gw.WeightSubscriber(zeros(trained), tmp_path / "c").update() == 3
    # Another run of the publisher.
    nudge(trained, 4)
    gw.WeightPublisher(trained, tmp_path / "a").publish(9)
    assert again.update() == reader.update() == 9
    assert same(behind, trained)


def follow_in_a_group(folder: str, steps: int) -> list[tuple[int | None, bool]]:
    """Rank 0 follows a folder and serves the others; rank 2 serves a folder of its own, too."""
    trained, rank, found = weights(), dist.get_rank(), []
    publisher = gw.WeightPublisher(trained, folder) if rank == 0 else None
    served = zeros(trained)
    group = dist.group.WORLD
    if rank == 0:
        subscriber = gw.WeightSubscriber(served, folder, relay=group)
    else:
        with pytest.raises(gw.IncompatibleError, match="is for its rank 0"):
            gw.WeightSubscriber(served, folder, relay=group)
        subscriber = gw.WeightSubscriber(served, group, relay=f"{folder}/{rank}" if rank == 2 else None)
    for step in range(steps):
        # Rank 0 publishes two steps at once, or none.
        for part in (0, 1) if step % 3 == 1 else (0,) if step % 3 == 0 else ():
            if publisher is not None:
                publisher.publish(2 * step + part)
            published = copies(trained)
            nudge(trained, 2 * step + part)
        if step == 4 and rank == 1:
            served["layer.weight"][0, 0] += 1
        try:
            found.append((subscriber.update(), same(published, served)))
        except gw.PayloadError:
            found.append((None, same(published, served)))
    return found


@pytest.mark.ranks
def test_a_group_is_served_by_its_first_rank(three_ranks: Ranks, tmp_path: Path) -> None:
    source, first, second = three_ranks(follow_in_a_group, str(tmp_path), 7)
    expected = [(0, True), (3, True), (3, True), (6, True), (9, True), (9, True), (12, True)]
    assert source == second == expected
    assert first == [*expected[:4], (None, False), *expected[5:]]
    served = zeros(weights())
    assert gw.WeightSubscriber(served, tmp_path / "2").update() == 12
    # Rank 1 has asked for an anchor once, which all were sent.
    found = [(stage.kind, stage.step) for stage in manifest(tmp_path / "2").stages]
    patches = [("patch", step) for step in (2, 3, 6, 8, 9)]
    assert found == [("anchor", 0), *patches, ("anchor", 9), ("patch", 12)]
