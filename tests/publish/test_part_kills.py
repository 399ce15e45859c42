"""One of two ranks that publish the parts of a model ends anywhere: readers find all parts of a step, or none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kills import Breaker, Crash
from weight_cases import copies, manifest, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.boxes import TensorBox, pieces_of
from gradwire.publish.stores import FolderPlace
from gradwire.publish.weights import LiveTensors


class Meeting:
    """Two threads as ranks, which tell one another what ranks of a process group do; the end of one breaks it."""

    def __init__(self) -> None:
        self.barrier, self.told = threading.Barrier(2), [b"", b""]

    def rank(self, number: int) -> Any:
        """Return the ranks as one of them sees them."""
        return Seat(self, number)


class Seat:
    """A rank of a meeting."""

    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def gather(self, data: bytes) -> list[bytes]:
        self.meeting.told[self.rank] = data
        try:
            self.meeting.barrier.wait(60)
            told = list(self.meeting.told)
            self.meeting.barrier.wait(60)
        except threading.BrokenBarrierError as error:
            raise gw.ExchangeError("the other rank has ended") from error
        return told


def half(tensors: dict[str, torch.Tensor], strips: Any, rank: int, dtype: Any) -> LiveTensors:
    """Return the pieces of a rank: half of the matrix, and every second one of the other tensors."""
    views = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        whole = TensorBox.of_all(tensor.shape)
        box = dict(whole.strips(0, 2)).get(rank) if name == "layer.weight" else whole if number % 2 == rank else None
        views |= {p.label: tensor[p.box.within(whole)] for p in pieces_of([(name, box)] if box else [], {})}
    return LiveTensors(views)


class Two:
    """Publishers of two ranks, each called in a thread of its own."""

    def __init__(self, trained: dict[str, torch.Tensor], folder: Path, **settings: int) -> None:
        self.meeting = Meeting()
        self.publishers: list[Any] = [None, None]

        def build(rank: int) -> None:
            seat = self.meeting.rank(rank)
            self.publishers[rank] = gw.WeightPublisher(trained, folder, group=seat, **settings)

        self.both(build)

    def publish(self, step: int) -> list[BaseException]:
        """Publish on both; return what they raised."""
        return self.both(lambda rank: self.publishers[rank].publish(step))

    def both(self, work: Callable[[int], object]) -> list[BaseException]:
        raised: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                raised.append(error)
                if isinstance(error, Crash):
                    self.meeting.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


@pytest.fixture(autouse=True)
def _ranks_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.publish.publisher.GroupRanks", lambda group: group)
    monkeypatch.setattr("gradwire.publish.publisher.own_pieces", half)


def test_readers_see_all_parts_or_none_whichever_write_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with patches alone, with anchors, and with files to remove, over a reader of all and one of a slice."""
    breaker, number, ended, steps = Breaker(monkeypatch), 0, 0, set()
    rows = {"layer.weight": (slice(100, 300),)}
    while True:
        number += 1
        folder, trained = tmp_path / str(number), weights()
        breaker.arm(0)
        two = Two(trained, folder, anchor_every=2, keep_anchors=1)
        assert two.publish(0) == []
        served = zeros(trained)
        part = zeros(trained | {"layer.weight": trained["layer.weight"][100:300]})
        readers = gw.WeightSubscriber(served, folder), gw.WeightSubscriber(part, folder, slices=rows)
        for reader in readers:
            assert reader.update() == 0
        states = {0: copies(trained)}
        breaker.arm(number)
        for step in (1, 2):
            nudge(trained, step)
            states[step] = copies(trained)
            raised = two.publish(step)
            if raised:
                assert any(isinstance(error, Crash) for error in raised)
                ended += 1
                break
        crashed = breaker.crashed
        breaker.arm(0)
        found, late = readers[0].update(), zeros(trained)
        steps.add(found)
        assert same(served, states[found or 0])
        assert readers[1].update() == found
        expected = states[found or 0]
        assert same(part, expected | {"layer.weight": expected["layer.weight"][100:300]})
        assert gw.WeightSubscriber(late, folder).update() == found
        assert same(late, served)
        # The ranks that follow mend all, and remove what was left.
        nudge(trained, 7)
        assert Two(trained, folder).publish(3) == []
        assert readers[0].update() == readers[1].update() == 3
        assert same(served, trained)
        listed = {file.name for file in manifest(folder).files}
        assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
        if not crashed:
            break
    assert ended == number - 1 >= 40
    assert steps == {0, 1, 2}


def test_ranks_go_on_after_a_part_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both raise, the other one names the rank; the next step brings the one before, by patches alone."""
    trained = weights()
    two, served = Two(trained, tmp_path), zeros(trained)
    assert two.publish(0) == []
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    replace = os.replace

    def broken(source: Any, target: Any) -> None:
        if "part00001" in str(target):
            raise OSError("no space left")
        replace(source, target)

    with monkeypatch.context() as context:
        context.setattr(os, "replace", broken)
        nudge(trained, 1)
        raised = {type(error): str(error) for error in two.publish(1)}
    assert raised[OSError] == "no space left"
    assert "rank 1 could not write its part of step 1: OSError: no space left" in raised[gw.ExchangeError]
    assert subscriber.update() == 0
    nudge(trained, 2)
    assert two.publish(2) == []
    assert subscriber.update() == 2
    assert {file.step for file in subscriber.applied} == {1, 2}
    assert all(file.name.startswith("patch") for file in subscriber.applied)
    assert same(served, trained)


def test_ranks_write_again_what_one_of_them_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the rank whose patch has been written takes part."""
    trained = weights()
    two, served = Two(trained, tmp_path), zeros(trained)
    assert two.publish(0) == []
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    write = FolderPlace.write

    def broken(place: FolderPlace, name: str, pieces: Any) -> None:
        if "part00001" in name:
            raise OSError("no space left")
        write(place, name, pieces)

    nudge(trained, 1)
    with monkeypatch.context() as context:
        context.setattr(FolderPlace, "write", broken)
        assert len(two.publish(1)) == 2
    flushed: list[Any] = []
    assert two.both(lambda rank: flushed.append(two.publishers[rank].flush())) == []
    assert [publication.step for publication in flushed] == [1, 1]
    assert flushed[0].patch_bytes == flushed[1].patch_bytes == sum(f.nbytes for f in manifest(tmp_path).files[-2:])
    assert subscriber.update() == 1
    assert all(file.name.startswith("patch") for file in subscriber.applied)
    assert same(served, trained)


def test_a_manifest_without_a_part_is_refused(tmp_path: Path) -> None:
    trained = weights()
    two = Two(trained, tmp_path)
    assert two.publish(0) == []
    subscriber = gw.WeightSubscriber(served := zeros(trained), tmp_path)
    found = manifest(tmp_path)
    for files in (found.files[1:], found.files[:1], (found.files[0], found.files[0]), found.files[::-1]):
        forged = type(found)(found.run, found.parts, found.nbytes, (*found.files, *found.files), found.sharded)
        forged.__dict__["stages"] = found.stages
        object.__setattr__(forged, "files", files)
        (tmp_path / "manifest.json").write_bytes(forged.pack())
        with pytest.raises(gw.PayloadError, match="for each part"):
            subscriber.update()
    assert same(served, zeros(trained))
