"""The places where weights are published: URLs, stores, process groups."""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from weight_cases import nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.stores import FolderPlace, Place, StorePlace, UrlPlace, open_place
from ranks import Ranks


@pytest.fixture(params=["folder", "path", "file", "memory", "hash", "file store"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """Each kind of place, empty."""
    kinds: dict[str, object] = {
        "folder": str(tmp_path / "a" / "b"),
        "path": tmp_path / "c",
        "file": f"file://{tmp_path}/d",
        "memory": f"memory://{secrets.token_hex(8)}",
        "hash": dist.HashStore(),
        "file store": dist.FileStore(str(tmp_path / "store"), 1),
    }
    return kinds[request.param]


def test_weights_arrive_by_any_place(where: object) -> None:
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, where, 2), gw.WeightSubscriber(served, where)
    assert subscriber.update() is None
    for step in range(6):
        publisher.publish(step)
        assert subscriber.update() == step
        assert same(trained, served)
        assert step == 0 or "patch" in subscriber.applied[0].name
        nudge(trained, step)
    late = zeros(trained)
    assert gw.WeightSubscriber(late, where).update() == 5
    assert same(late, served)


def test_places_keep_files_whole(where: object) -> None:
    place = open_place(where)
    pieces = [np.arange(100, dtype=np.uint8), b"abc", np.zeros(0, np.uint8)]
    with pytest.raises(FileNotFoundError):
        place.read("a.gww", 1000)
    place.remove("a.gww")
    place.write("a.gww", pieces)
    place.write("b.gww", [b""])
    assert place.read("a.gww", 103).tobytes() == bytes(range(100)) + b"abc"
    assert place.read("b.gww", 0).tobytes() == b""
    with pytest.raises(gw.PayloadError, match="has 103 bytes, more than the 102"):
        place.read("a.gww", 102)
    place.write("a.gww", [b"new"])
    assert place.read("a.gww", 1000).tobytes() == b"new"
    assert set(place.names()) in ({"a.gww", "b.gww"}, set())
    place.remove("a.gww")
    with pytest.raises(FileNotFoundError):
        place.read("a.gww", 1000)


def test_values_of_a_store_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.publish.stores.PIECE_BYTES", 1000)
    store = dist.HashStore()
    place = StorePlace(store)
    for size in (0, 1, 1000, 1001, 5500):
        data = secrets.token_bytes(size)
        place.write("x", [data])
        assert place.read("x", size).tobytes() == data
    keys = store.num_keys()
    place.remove("x")
    assert store.num_keys() == keys - 7


def test_a_place_is_chosen_by_what_is_given(tmp_path: Path) -> None:
    class Own:
        def write(self, name: str, pieces: object) -> None: ...
        def read(self, name: str, most_bytes: int) -> object: ...
        def remove(self, name: str) -> None: ...
        def names(self) -> list[str]:
            return []

    own: Place = Own()  # type: ignore[assignment]
    assert open_place(own) is own
    assert isinstance(open_place("plain/folder"), FolderPlace)
    assert isinstance(open_place("memory://x"), UrlPlace)
    with pytest.raises(gw.BackendError, match="nosuch://x cannot be opened"):
        open_place("nosuch://x")


def broadcast(steps: int) -> list[tuple[int | None, bool]]:
    """Publish from rank 0 and follow on the others; break a reader's weights before one step."""
    found: list[tuple[int | None, bool]] = []
    trained = weights()
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        publisher = gw.WeightPublisher(trained, group)
        for step in range(steps):
            publication = publisher.publish(step)
            found.append((step, publication.anchor_bytes > 0))
            nudge(trained, step)
        return found
    served = zeros(trained)
    subscriber = gw.WeightSubscriber(served, group)
    for step in range(steps):
        if step == 2 and dist.get_rank() == 1:
            served["layer.weight"][0, 0] += 1
        try:
            found.append((subscriber.update(), same(trained, served)))
        except gw.PayloadError:
            found.append((None, same(trained, served)))
        nudge(trained, step)
    return found


@pytest.mark.ranks
def test_weights_are_broadcast_in_a_process_group(three_ranks: Ranks) -> None:
    """The reader whose weights were changed refuses a patch, and the next step mends it by an anchor."""
    source, first, second = three_ranks(broadcast, 5)
    assert source == [(0, True), (1, False), (2, False), (3, True), (4, False)]
    assert first == [(0, True), (1, True), (None, False), (3, True), (4, True)]
    assert second == [(step, True) for step in range(5)]


def test_a_manifest_in_a_store_is_replaced_at_once() -> None:
    """One value under one key: a reader finds the old bytes or the new ones, and never waits for a key."""
    store = dist.HashStore()
    place = StorePlace(store)
    place.write("manifest.json", [b"old"])
    keys = store.num_keys()
    place.write("manifest.json", [b"newer"])
    assert store.num_keys() == keys == 1
    assert place.read("manifest.json", 5).tobytes() == b"newer"
    assert place.read_range("manifest.json", 1, 3).tobytes() == b"ew"


def test_a_value_that_is_removed_while_it_is_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of a key and the reading, where a store waits for the key until its timeout."""

    class Removing:
        def __init__(self) -> None:
            self.store = dist.HashStore()
            self.store.set_timeout(timedelta(seconds=0.05))

        def __getattr__(self, name: str) -> object:
            return getattr(self.store, name)

        def get(self, key: str) -> bytes:
            if key.endswith("/1"):
                self.store.delete_key(key)
            return self.store.get(key)

    monkeypatch.setattr("gradwire.publish.stores.PIECE_BYTES", 10)
    place = StorePlace(Removing())
    place.write("x.gww", [bytes(range(25))])
    with pytest.raises(FileNotFoundError):
        place.read("x.gww", 25)
