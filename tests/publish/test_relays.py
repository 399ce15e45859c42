"""Subscribers that serve others: chains, trees, process groups."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weight_cases import copies, manifest, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.lossy import lossy_spec
from gradwire.publish.manifest import Manifest
from gradwire.publish.stores import StorePlace
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


@pytest.mark.parametrize("anchor_every", [50, 4, 1])
def test_what_a_relay_fetches_anew_is_in_its_place_already(anchor_every: int, tmp_path: Path) -> None:
    """A relay that was restarted with fresh tensors, is told to, or was disturbed: readers behind it go on."""
    trained, places = weights(), (tmp_path / "a", tmp_path / "b")
    publisher = gw.WeightPublisher(trained, places[0], anchor_every)
    relay = gw.WeightSubscriber(served := zeros(trained), places[0], relay=places[1])
    reader = gw.WeightSubscriber(behind := zeros(trained), places[1])

    def listed() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in places[1].iterdir()}

    def follow(step: int) -> None:
        nudge(trained, step)
        publisher.publish(step)
        assert relay.update() == reader.update() == step
        assert [file.name.split()[0] for file in reader.applied] == ["patch" if step else "anchor"]
        assert same(behind, trained)

    for step in range(3):
        follow(step)
    before = listed()
    relay = gw.WeightSubscriber(served := zeros(trained), places[0], relay=places[1])
    assert relay.update() == reader.update() == 2
    assert same(served, trained)
    assert (listed(), reader.applied) == (before, ())
    follow(3)
    before = listed()
    assert relay.update(full=True) == reader.update() == 3
    assert (listed(), reader.applied) == (before, ())
    follow(4)
    served["layer.weight"][0, 0] += 1
    nudge(trained, 5)
    publisher.publish(5)
    with pytest.raises(gw.PayloadError, match="something else has changed"):
        relay.update()
    assert reader.update() == 4
    assert relay.update() == reader.update() == 5
    follow(6)
    assert manifest(places[1]).files == manifest(places[0]).files
    assert gw.WeightSubscriber(late := zeros(trained), places[1]).update() == 6
    assert same(late, trained)


def test_a_relay_whose_update_fails_on_its_way_takes_no_reader_back(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path / "a")
    relay = gw.WeightSubscriber(zeros(trained), tmp_path / "a", relay=tmp_path / "b")
    for step in range(3):
        nudge(trained, step)
        publisher.publish(step)
        relay.update()
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    (patch,) = (tmp_path / "a").glob("patch-000000000002-*")
    whole = patch.read_bytes()
    patch.write_bytes(whole[:-1])
    fresh = gw.WeightSubscriber(served := zeros(trained), tmp_path / "a", relay=tmp_path / "b")
    with pytest.raises(gw.PayloadError):
        fresh.update()
    assert fresh.step == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before
    patch.write_bytes(whole)
    nudge(trained, 3)
    publisher.publish(3)
    assert fresh.update() == 3
    assert gw.WeightSubscriber(late := zeros(trained), tmp_path / "b").update() == 3
    assert same(late, trained)
    assert same(served, trained)


@pytest.mark.parametrize("anchor_every", [50, 1])
def test_a_relay_follows_a_publisher_that_went_back(anchor_every: int, tmp_path: Path) -> None:
    """Its place is that of an earlier day, and its run goes on from there."""
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path / "a", anchor_every)
    publisher.publish(0)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    relay = gw.WeightSubscriber(zeros(trained), tmp_path / "a", relay=tmp_path / "b")
    first = copies(trained)
    for step in range(1, 6):
        nudge(trained, step)
        publisher.publish(step)
        relay.update()
    resumed = gw.WeightPublisher(first, tmp_path / "copy", anchor_every, resume=True)
    assert resumed.run == publisher.run
    relay = gw.WeightSubscriber(zeros(trained), tmp_path / "copy", relay=tmp_path / "b")
    for step in (1, 2):
        nudge(first, 10 + step)
        resumed.publish(step)
        assert relay.update() == gw.WeightSubscriber(late := zeros(trained), tmp_path / "b").update() == step
        assert same(late, first)
    names = {file.name for file in manifest(tmp_path / "b").files}
    assert {path.name for path in (tmp_path / "b").iterdir()} == {*names, "manifest.json"}


def test_a_relay_removes_files_of_runs_before_from_a_store(tmp_path: Path) -> None:
    """A store cannot list what it has: the names are those of the manifest before."""
    trained, store = weights(), dist.HashStore()
    relay = gw.WeightSubscriber(zeros(trained), tmp_path, relay=store)
    for step in range(3):
        publisher = gw.WeightPublisher(trained, tmp_path)
        publisher.publish(5 - step)
        nudge(trained, step)
        publisher.publish(6 - step)
        assert relay.update() == 6 - step
        if step:
            relay = gw.WeightSubscriber(zeros(trained), tmp_path, relay=store)
    listed = Manifest.parse(StorePlace(store).read("manifest.json", 10**6)).files
    assert listed[-1].step == 4
    # No file is longer than one value of a store.
    assert store.num_keys() == 1 + len(listed)


@pytest.mark.parametrize("lossy", ["DIANA(compressor=QSGDinf())", "EF21(compressor=TopK(density=0.3))"])
def test_late_readers_of_a_relay_begin_where_the_rounds_of_a_method_do(lossy: str, tmp_path: Path) -> None:
    """Patches outweigh the weights early; an anchor between two of the publisher's would lead nowhere."""
    trained = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0))}
    publisher = gw.WeightPublisher(trained, tmp_path / "a", 12, lossy=lossy)
    relay = gw.WeightSubscriber(zeros(trained), tmp_path / "a", relay=tmp_path / "b", lossy=True)
    for step in range(30):
        publisher.publish(step)
        assert relay.update() == step
        assert gw.WeightSubscriber(zeros(trained), tmp_path / "b", lossy=True).update() == step
        trained["w"] += torch.randn(3000, generator=torch.Generator().manual_seed(step))
        if step == 17:
            # It begins anew between two anchors, and in a place without files waits for the next one.
            relay = gw.WeightSubscriber(zeros(trained), tmp_path / "a", relay=tmp_path / "b", lossy=True)
    assert {stage.step for stage in manifest(tmp_path / "b").stages if stage.kind == "anchor"} == {12, 24}


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


def follow_rounds_in_a_group(folder: str, steps: int, most: int) -> list[int | None]:
    """Rank 0 falls behind for several steps, whose patches outweigh the weights.

    It writes to a staging copy at step 2. All are restarted after step 10, and rank 2 loses its weights at step 14.
    Rank 1 serves a folder.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradwire.publish.relay.MOST_FILES", most)
        return _follow_rounds_in_a_group(folder, steps)


def _follow_rounds_in_a_group(folder: str, steps: int) -> list[int | None]:
    trained = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0))}
    rank, group = dist.get_rank(), dist.group.WORLD
    publisher = gw.WeightPublisher(trained, folder, 12, lossy="DIANA(compressor=QSGDinf())") if rank == 0 else None
    served = zeros(trained)
    where, relay = [(folder, group), (group, f"{folder}/1"), (group, None)][rank]
    subscriber = gw.WeightSubscriber(served, where, relay=relay, lossy=True)
    found = []
    for step in (*range(11), *range(10, steps)):
        if found[-1:] == [step]:
            subscriber = gw.WeightSubscriber(served, where, relay=relay, lossy=True)
        elif publisher is not None:
            publisher.publish(step)
        trained["w"] += torch.randn(3000, generator=torch.Generator().manual_seed(step))
        if 5 <= step < 9:
            continue
        if step == 14 and rank == 2:
            served["w"].zero_()
        try:
            found.append(subscriber.update("staging" if rank == 0 and step == 2 else None))
        except gw.PayloadError:
            found.append(None)
        if rank == 1:
            assert gw.WeightSubscriber(zeros(trained), f"{folder}/1", lossy=True).update() == step
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("most", [1024, 3])
def test_ranks_that_lose_their_weights_begin_where_the_rounds_of_a_method_do(
    most: int, three_ranks: Ranks, tmp_path: Path
) -> None:
    """After the step at which it was noticed, rank 2 follows step by step again, also where the rounds are too many."""
    source, first, second = three_ranks(follow_rounds_in_a_group, str(tmp_path), 18, most)
    assert source == first == [*range(5), 9, 10, *range(10, 18)]
    assert second == [*first[:11], None, *first[12:]]


class Crash(BaseException):
    """Ends a relay, as a kill does: nothing behind it runs."""


def crash(*_: object) -> None:
    raise Crash


def follow_behind_groups(folder: str, lossy: str | None, steps: int) -> list[Any]:
    """Rank 0 publishes to rank 1, which relays to rank 2, which relays to a folder, and is killed and restarted.

    Returns:
        For each step, what three readers of the folder are at, and whether they hold what rank 2 does: one that has
        followed from the start, one that begins now, and one that was restarted at step 15 with the weights of the
        first. Last, the method in the folder's manifest, and the steps of its anchors.
    """
    trained, rank = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0))}, dist.get_rank()
    first, second = (dist.new_group([low, low + 1]) for low in (0, 1))
    where, relay = (first, second) if rank == 1 else (second, folder)
    publisher = gw.WeightPublisher(trained, first, 12, lossy=lossy) if rank == 0 else None
    served, early, found = zeros(trained), zeros(trained), list[Any]()
    subscriber = None if publisher else gw.WeightSubscriber(served, where, relay=relay, lossy=True)
    readers = [(early, gw.WeightSubscriber(early, folder, lossy=True))]
    for step in range(steps):
        if publisher is not None:
            publisher.publish(step)
        elif subscriber is not None and rank == 2 and step == 5:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(os, "replace", crash)
                with pytest.raises(Crash):
                    subscriber.update()
            served = zeros(trained)
            subscriber = gw.WeightSubscriber(served, where, relay=relay, lossy=True)
        elif subscriber is not None:
            assert subscriber.update() == step
        if rank == 2 and step != 5:
            late = zeros(trained)
            rows = [*readers, (late, gw.WeightSubscriber(late, folder, lossy=True))]
            found.append([(reader.update(), same(tensors, served)) for tensors, reader in rows])
            assert lossy or same(served, trained)
        if step == 15:
            again = copies(early)
            readers.append((again, gw.WeightSubscriber(again, folder, lossy=True)))
        trained["w"] += torch.randn(3000, generator=torch.Generator().manual_seed(step))
    if rank != 2:
        return found
    listed = manifest(Path(folder))
    return [*found, (listed.lossy, [stage.step for stage in listed.stages if stage.kind == "anchor"])]


@pytest.mark.ranks
@pytest.mark.parametrize("lossy", [None, "qsgdinf", "diana"])
def test_late_readers_behind_process_groups_hold_what_early_ones_do(
    lossy: str | None, three_ranks: Ranks, tmp_path: Path
) -> None:
    *found, (told, anchors) = three_ranks(follow_behind_groups, str(tmp_path / "weights"), lossy, 30)[2]
    assert found == [[(step, True)] * (2 + (step > 15)) for step in range(30) if step != 5]
    assert told == (lossy_spec(lossy) if lossy else "")
    # The publisher's exact steps.
    assert lossy != "diana" or anchors == [12, 24]


def follow_many_patches_in_a_group(folder: str) -> tuple[int | None, list[str]]:
    """Rank 0 has fetched more patches than the weights have bytes."""
    trained = weights()
    rank, group = dist.get_rank(), dist.group.WORLD
    publisher = gw.WeightPublisher(trained, folder, 100) if rank == 0 else None
    where: Any = folder if rank == 0 else group
    subscriber = gw.WeightSubscriber(zeros(trained), where, relay=group if rank == 0 else None)
    for step in range(12):
        if publisher is not None:
            publisher.publish(step)
        nudge(trained, step, density=0.5)
        if step in (0, 11):
            subscriber.update()
    return subscriber.step, [file.name.split()[0] for file in subscriber.applied]


@pytest.mark.ranks
def test_a_group_gets_an_anchor_where_patches_are_longer(three_ranks: Ranks, tmp_path: Path) -> None:
    _, first, second = three_ranks(follow_many_patches_in_a_group, str(tmp_path))
    assert first == second == (11, ["anchor"])
