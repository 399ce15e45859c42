"""The places where weights are published: URLs, stores, process groups."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from weight_cases import copies, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.container import Octets
from gradwire.publish.encoder import FilePieces
from gradwire.publish.manifest import MANIFEST
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


def test_files_of_runs_before_are_removed_from_a_store() -> None:
    """A store cannot list what it has: the names are those of the manifest before."""
    trained, store = weights(), dist.HashStore()
    for run in range(3):
        publisher = gw.WeightPublisher(trained, store)
        for step in range(3 - run):
            publisher.publish(step)
            nudge(trained, 10 * run + step)
    # The manifest and an anchor: no file is longer than one value of a store.
    assert store.num_keys() == 2
    assert gw.WeightSubscriber(zeros(trained), store).update() == 0


def two_runs_in_a_group() -> list[tuple[int | None, str]]:
    """Rank 0 publishes by two publishers in turn; rank 1 follows the first run alone, and rank 2 any."""
    trained, group, rank = weights(), dist.group.WORLD, dist.get_rank()
    publishers = [gw.WeightPublisher(trained, group) for _ in range(2)] if rank == 0 else []
    run = [publishers[0].run if publishers else None]
    dist.broadcast_object_list(run)
    found: list[tuple[int | None, str]] = []
    served, kept = zeros(trained), zeros(trained)
    subscriber = None if publishers else gw.WeightSubscriber(served, group, run=run[0] if rank == 1 else None)
    for step, turn in enumerate((0, 0, 1, 1)):
        if publishers:
            found.append((publishers[turn].publish(step).step, publishers[turn].run))
        elif subscriber is not None:
            try:
                found.append((subscriber.update(), "right" if same(served, trained) else "wrong"))
            except gw.PayloadError as error:
                found.append((subscriber.step, str(error).split(", ")[1] if same(served, kept) else "wrong"))
            kept = copies(served)
        nudge(trained, step)
    return found


@pytest.mark.ranks
def test_a_reader_of_one_run_refuses_another_in_a_process_group(three_ranks: Ranks) -> None:
    (first, *_), bound, free = three_ranks(two_runs_in_a_group)
    refusal = f"and this subscriber follows run {first[1][:8]} alone: build it with run=None to follow any"
    assert bound == [(0, "right"), (1, "right"), (1, refusal), (1, refusal)]
    assert free == [(step, "right") for step in range(4)]


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
            assert (publication.anchor_bytes > 0) != (publication.patch_bytes > 0)
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


@pytest.fixture
def url() -> str:
    """A place of fsspec, empty."""
    return f"memory://{secrets.token_hex(8)}"


CALLS = ("open", "cat_file", "info", "makedirs", "rm_file", "exists", "ls")


def test_a_manifest_that_is_replaced_while_it_is_read_is_read_whole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each call for it that a reader makes, the publisher puts a longer one in its place."""
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, url), gw.WeightSubscriber(served, url)
    states = [copies(trained)]
    publisher.publish(0)
    reading = False

    def replacing(call: Callable[..., Any]) -> Callable[..., Any]:
        def replace(system: object, path: str, *words: Any, **options: Any) -> Any:
            nonlocal reading
            result = call(system, path, *words, **options)
            if reading and path.endswith(MANIFEST):
                reading = False
                nudge(trained, len(states))
                publisher.publish(len(states))
                states.append(copies(trained))
                reading = True
            return result

        return replace

    for name in CALLS:
        monkeypatch.setattr(MemoryFileSystem, name, replacing(getattr(MemoryFileSystem, name)))
    for _ in range(3):
        reading = True
        step = subscriber.update()
        reading = False
        assert step is not None
        assert same(served, states[step])
    assert len(states) > 3


class Torn:
    """A place that returns less than its manifest, or an error, a number of times."""

    def __init__(self, error: OSError | None) -> None:
        self.files, self.left, self.error = dict[str, Octets](), 0, error

    def write(self, name: str, pieces: Sequence[Octets | bytes]) -> None:
        self.files[name] = np.frombuffer(bytearray().join(bytes(piece) for piece in pieces), np.uint8)

    def read(self, name: str, most_bytes: int) -> Octets:
        if name not in self.files:
            raise FileNotFoundError(name)
        self.left -= name == MANIFEST
        if name != MANIFEST or self.left < 0:
            return self.files[name]
        if self.error is not None:
            raise self.error
        return self.files[name][:-20]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def names(self) -> list[str]:
        return list(self.files)


@pytest.mark.parametrize("error", [None, OSError("file expired"), PermissionError("locked")])
def test_a_manifest_that_cannot_be_read_is_read_again(error: OSError | None) -> None:
    trained, served = weights(), zeros(weights())
    place = Torn(error)
    gw.WeightPublisher(trained, place).publish(0)
    subscriber = gw.WeightSubscriber(served, place)
    # But not for ever.
    place.left = 1000
    with pytest.raises((gw.PayloadError, OSError), match=r"file expired|locked|it is being written"):
        subscriber.update()
    assert subscriber.step is None
    assert 900 < place.left < 1000
    place.left = 2
    assert subscriber.update() == 0
    assert same(served, trained)


def test_no_more_of_a_file_is_read_than_is_expected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = UrlPlace(url)
    place.write("a.gww", [bytes(1000)])
    read = MemoryFileSystem.cat_file
    asked = list[int]()

    def counting(system: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None) -> bytes:
        data: bytes = read(system, path, start, end)
        asked.append(len(data))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counting)
    with pytest.raises(gw.PayloadError, match="has 1000 bytes, more than the 10 expected"):
        place.read("a.gww", 10)
    assert asked == [11]


class EndpointConnectionError(Exception):
    """What botocore raises where there is no network: no OSError."""


@pytest.mark.parametrize("size", [3, 1 << 27])
def test_exceptions_of_a_file_system_are_errors_of_the_operating_system(
    url: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = UrlPlace(url)
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: place.write("a.gww", [b"abc"]),
        "read": lambda: place.read("a.gww", size),
        "read_range": lambda: place.read_range("a.gww", 0, 2),
        "remove": lambda: place.remove("a.gww"),
        "names": place.names,
    }
    calls["write"]()
    raised: BaseException = EndpointConnectionError("no network")

    def failing(*words: object, **options: object) -> None:
        raise raised

    for name in CALLS:
        monkeypatch.setattr(MemoryFileSystem, name, failing)
    for call in calls.values():
        with pytest.raises(OSError, match=f"{url}.*: EndpointConnectionError: no network") as caught:
            call()
        assert caught.value.__cause__ is raised
    # What has a meaning here stays as it is.
    for raised in (KeyboardInterrupt(), gw.PayloadError("own"), PermissionError("not yours")):
        for call in calls.values():
            with pytest.raises(type(raised)) as kept:
                call()
            assert kept.value is raised


def test_errors_of_pieces_that_are_encoded_while_they_are_written_stay_as_they_are(url: str) -> None:
    class Pieces(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"abc"
            raise ZeroDivisionError("in an encoder")

    with pytest.raises(ZeroDivisionError, match="in an encoder"):
        UrlPlace(url).write("a.gww", Pieces())


def swap_and_follow(_: object) -> list[tuple[int | None, str, bool]]:
    """Both readers follow in staging copies for two steps, and then by themselves."""
    trained, group, found = weights(), dist.group.WORLD, list[tuple[int | None, str, bool]]()
    publisher = gw.WeightPublisher(trained, group, lossy="diana") if dist.get_rank() == 0 else None
    served = zeros(trained)
    subscriber = None if publisher else gw.WeightSubscriber(served, group, lossy=True)
    kept = zeros(trained)
    for step in range(6):
        if publisher is not None:
            publisher.publish(step)
        elif subscriber is not None:
            into = "staging" if step < 3 else None
            found.append((subscriber.update(into), subscriber.applied[0].name.split()[0], same(served, kept)))
            if into:
                subscriber.swap()
            kept = copies(served)
        nudge(trained, step)
    return found


@pytest.mark.ranks
def test_a_reader_that_has_swapped_begins_with_an_anchor_in_a_process_group(three_ranks: Ranks) -> None:
    """Its tensors have not seen the patches themselves, and lack what the method remembers."""
    _, *readers = three_ranks(swap_and_follow, None)
    kinds = ["anchor", "patch", "patch", "anchor", "patch", "patch"]
    for found in readers:
        assert found == [(step, kind, step < 3) for step, kind in enumerate(kinds)]


def follow_exactly(_: object) -> list[tuple[int, list[str]] | str]:
    """Rank 0 rounds differences for three steps, then begins a run that does not. Rank 2 wants exact weights."""
    trained, group, rank = weights(), dist.group.WORLD, dist.get_rank()
    subscriber = gw.WeightSubscriber(zeros(trained), group, lossy=rank == 1) if rank else None
    publisher, found = None, list[Any]()
    for step in range(5):
        if subscriber is not None:
            try:
                found.append((subscriber.update(), [file.name.split()[0] for file in subscriber.applied]))
            except gw.IncompatibleError as error:
                found.append(str(error))
        else:
            if step in (0, 3):
                publisher = gw.WeightPublisher(trained, group, lossy=None if step else "natural")
            if publisher is not None:
                publisher.publish(step)
        nudge(trained, step)
    return found


@pytest.mark.ranks
def test_a_reader_of_exact_weights_refuses_a_group_that_rounds_and_asks_for_nothing(three_ranks: Ranks) -> None:
    _, first, second = three_ranks(follow_exactly, None)
    kinds = ["anchor", "patch", "patch", "anchor", "patch"]
    assert first == [(step, [kind]) for step, kind in enumerate(kinds)]
    assert second[3:] == first[3:]
    for message in second[:3]:
        assert message.startswith("rank 0 rounds differences by Natural(")
        assert "lossy=True" in message


def follow_after_errors(_: object) -> list[tuple[int | None, bool]]:
    """Rank 0 cannot encode step 1, not read step 2 and not join step 6; rank 1 has another type of tensor at step 4."""
    trained, group, rank = weights(), dist.group.WORLD, dist.get_rank()
    publisher = gw.WeightPublisher(trained, group) if rank == 0 else None
    served = zeros(trained)
    subscriber = None if publisher else gw.WeightSubscriber(served, group)
    found: list[tuple[int | None, bool]] = []
    for step in range(8):
        if subscriber is not None and rank == 1 and step == 4:
            bias = served["layer.bias"]
            bias.data = bias.data.double()
            with pytest.raises(gw.IncompatibleError, match=r"'layer\.bias' F64"):
                subscriber.update()
            bias.data = bias.data.bfloat16()
        elif subscriber is not None:
            found.append((subscriber.update(), same(served, trained)))
        elif publisher is not None and step in (1, 6):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(publisher, "_encode", _no_memory if step == 1 else _no_memory_later)
                with pytest.raises(MemoryError):
                    publisher.publish(step)
        elif publisher is not None and step == 2:
            with pytest.raises(gw.IncompatibleError, match="the tensors differ from the first ones"):
                publisher.publish(step, {"another": trained["scale"]})
        elif publisher is not None:
            found.append((publisher.publish(step).step, True))
        nudge(trained, step)
    return found


def _no_memory(*_: object) -> Any:
    raise MemoryError


def _no_memory_later(*_: object) -> tuple[None, tuple[None, FilePieces], int]:
    """Return an anchor of which a piece cannot be made, which is asked for when it is sent."""
    return None, (None, FilePieces([b"", _no_memory])), 0


@pytest.mark.ranks
def test_a_group_goes_on_after_a_step_that_failed_on_one_rank(three_ranks: Ranks) -> None:
    source, first, second = three_ranks(follow_after_errors, None)
    assert source == [(0, True), (3, True), (4, True), (5, True), (7, True)]
    assert first == [(0, True), (0, False), (0, False), (3, True), (5, True), (5, False), (7, True)]
    assert second == [(0, True), (0, False), (0, False), (3, True), (4, True), (5, True), (5, False), (7, True)]


def follow_after_bad_usage(folder: str) -> list[int | None]:
    """Rank 0 publishes step 0 twice; rank 1 writes to nothing that there is at step 1; rank 2 follows in a file."""
    trained, group, rank = weights(), dist.group.WORLD, dist.get_rank()
    publisher = gw.WeightPublisher(trained, group) if rank == 0 else None
    served: Any = Path(folder) / "w.safetensors" if rank == 2 else zeros(trained)
    if rank == 2:
        with pytest.raises(gw.IncompatibleError, match="in a process group a file has to be there"):
            gw.WeightSubscriber(served, group)
        save_file(zeros(trained), served)
    subscriber = None if publisher else gw.WeightSubscriber(served, group)
    found = list[int | None]()
    for step in (0, 0, 1, 2, 3):
        try:
            if publisher is not None:
                found.append(publisher.publish(step).step)
            elif subscriber is not None:
                found.append(subscriber.update("elsewhere" if (rank, step) == (1, 1) else None))
        except gw.GradwireError:
            found.append(None)
        nudge(trained, step)
    return found


@pytest.mark.ranks
def test_a_group_goes_on_after_bad_usage_on_one_rank(three_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 has passed over a patch, so that the next one does not follow, and asks for an anchor then."""
    found = three_ranks(follow_after_bad_usage, str(tmp_path))
    assert found == [[0, None, 1, 2, 3], [0, 0, None, None, 3], [0, 0, 1, 2, 3]]
