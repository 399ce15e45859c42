"""Publishing and following: every byte, late joiners, restarts, retention, staging."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from weight_cases import DTYPES, any_bits, copies, files, manifest, nudge, octets, same, weights, zeros

import gradwire as gw
from gradwire.publish.chunks import in_parallel
from gradwire.publish.stores import FolderPlace


def test_readers_hold_every_byte_of_each_step(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    assert subscriber.update() is None
    for step in (3, 4, 9):
        publication = publisher.publish(step)
        assert subscriber.update() == subscriber.step == step
        assert same(trained, served)
        assert (publication.anchor_bytes > 0) == (step == 3)
        nudge(trained, step)
    assert subscriber.update() == 9
    assert subscriber.applied == ()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_of_any_type_arrive(dtype: torch.dtype, tmp_path: Path) -> None:
    trained = {"w": any_bits(1001, dtype), "two": any_bits(64, dtype, 5).reshape(8, 8)}
    served = zeros(trained)
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    assert same(trained, served)
    octets(trained["w"])[::3] = octets(any_bits(1001, dtype, 1))[::3]
    publisher.publish(1)
    subscriber.update()
    assert same(trained, served)


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.5, 0.9, 1.0])
def test_any_share_of_changes_arrives(density: float, tmp_path: Path) -> None:
    trained = {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    served = zeros(trained)
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    changed = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) < density
    trained["w"].view(torch.int16)[changed] += 1
    publication = publisher.publish(1)
    subscriber.update()
    assert same(trained, served)
    assert publication.changed == int(changed.sum())
    assert publication.patch_bytes < 400_000


def test_a_patch_of_one_change_in_a_hundred_takes_nine_bits_a_change(tmp_path: Path) -> None:
    """A million elements, by one unit either way: the entropy is 9.08 bits a change, and 6 % more are promised."""
    trained = {"w": torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()}
    publisher = gw.WeightPublisher(trained, tmp_path)
    publisher.publish(0)
    generator = torch.Generator().manual_seed(1)
    changed = torch.rand(1 << 20, generator=generator) < 0.01
    up = torch.rand(1 << 20, generator=generator) < 0.5
    trained["w"].view(torch.int16)[changed & up] += 1
    trained["w"].view(torch.int16)[changed & ~up] -= 1
    publication = publisher.publish(1)
    assert 8 * publication.patch_bytes <= 1.06 * 9.08 * publication.changed
    assert 8 * publication.patch_bytes <= 0.11 * (1 << 20)


def test_modules_are_followed_with_buffers_and_ties(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 40))
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
        tied = nn.ModuleDict({"body": model, "head": nn.Linear(40, 30, bias=False)})
        tied["head"].weight = model[0].weight  # type: ignore[assignment]
        return tied

    torch.manual_seed(0)
    trained = build()
    torch.manual_seed(1)
    served = build()
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(3):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(0.1)
        publisher.publish(step)
        subscriber.update()
        for (name, first), second in zip(trained.state_dict().items(), served.state_dict().values()):
            assert torch.equal(first, second), name
    assert served["head"].weight is served["body"][0].weight  # type: ignore[index]


def test_masters_in_float32_are_published_in_bfloat16(tmp_path: Path) -> None:
    trained = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(0)), "n": torch.arange(3)}
    served = {"w": torch.zeros(5000, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int64)}
    publisher = gw.WeightPublisher(trained, tmp_path, dtype=torch.bfloat16)
    subscriber = gw.WeightSubscriber(served, tmp_path)
    for step in range(3):
        publisher.publish(step)
        subscriber.update()
        assert torch.equal(served["w"], trained["w"].bfloat16())
        trained["w"] += 1e-3


def test_tensors_that_are_not_contiguous_are_served(tmp_path: Path) -> None:
    trained = {"w": torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).t()}
    served = {"w": torch.zeros(2, 40, 30)[1]}
    held = {"w": torch.zeros(30, 80)[:, ::2].t()}
    publisher = gw.WeightPublisher(trained, tmp_path)
    subscribers = [gw.WeightSubscriber(tensors, tmp_path) for tensors in (served, held)]
    for step in range(2):
        publisher.publish(step)
        for subscriber, tensors in zip(subscribers, (served, held)):
            subscriber.update()
            assert torch.equal(tensors["w"], trained["w"])
        trained["w"][3, 4] += 1


def test_late_readers_take_the_way_of_the_fewest_bytes(tmp_path: Path) -> None:
    states, names = files(tmp_path, steps=7, anchor_every=3, keep_anchors=9)
    kinds = [name.partition("-")[0] for name in names]
    assert kinds == ["anchor", "patch", "patch", "patch", "anchor", "patch", "patch", "patch", "anchor"]
    late = zeros(states[0])
    subscriber = gw.WeightSubscriber(late, tmp_path)
    assert subscriber.update() == 6
    assert same(late, states[6])
    assert [file.name for file in subscriber.applied] == ["anchor of step 6"]
    # Patches are smaller than an anchor, also for a reader that has the weights of a step by other means.
    early = copies(states[4])
    subscriber = gw.WeightSubscriber(early, tmp_path)
    assert subscriber.update() == 6
    assert [file.step for file in subscriber.applied] == [5, 6]
    assert same(early, states[6])
    assert subscriber.update(full=True) == 6
    assert [file.name for file in subscriber.applied] == ["anchor of step 6"]


def test_old_files_are_removed(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=2, keep_anchors=2)
    for step in range(12):
        publisher.publish(step)
        nudge(trained, step)
        assert len(list(tmp_path.iterdir())) <= 8
    listed = {file.name for file in manifest(tmp_path).files}
    assert {path.name for path in tmp_path.iterdir()} == {*listed, "manifest.json"}
    assert sum(name.startswith("anchor") for name in listed) == 2


def test_a_publisher_that_was_restarted_is_followed_by_its_anchor(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    subscriber = gw.WeightSubscriber(served, tmp_path)
    gw.WeightPublisher(trained, tmp_path).publish(5)
    bound = gw.WeightSubscriber(zeros(trained), tmp_path, run=manifest(tmp_path).run)
    assert subscriber.update() == bound.update() == 5
    nudge(trained, 1)
    second = gw.WeightPublisher(trained, tmp_path)
    second.publish(3)
    assert subscriber.update() == 3
    assert same(trained, served)
    with pytest.raises(gw.PayloadError, match="follows run"):
        bound.update()
    assert bound.step == 5


def test_a_new_run_that_passes_through_the_readers_weights_is_followed_by_its_anchor(tmp_path: Path) -> None:
    """A trainer is restarted from a checkpoint, and trains the same steps again."""
    trained, served = weights(), zeros(weights())
    states = []
    for step in range(4):
        nudge(trained, step)
        states.append(copies(trained))
    publisher, subscriber = gw.WeightPublisher(states[0], tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(3):
        publisher.publish(step, states[step])
    assert subscriber.update() == 2
    second = gw.WeightPublisher(states[1], tmp_path)
    for step in (1, 2, 3):
        second.publish(step, states[step])
    assert subscriber.update() == 3
    assert [file.name.split()[0] for file in subscriber.applied] == ["anchor", "patch", "patch"]
    assert same(served, states[3])


def test_a_publisher_resumes_its_run_from_the_weights_of_its_latest_step(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    subscriber = gw.WeightSubscriber(served, tmp_path)
    first = gw.WeightPublisher(trained, tmp_path, anchor_every=4)
    for step in range(2):
        first.publish(step)
        nudge(trained, step)
    first.publish(2)
    subscriber.update()
    resumed = gw.WeightPublisher(trained, tmp_path, anchor_every=4, resume=True)
    assert (resumed.run, resumed.step) == (first.run, 2)
    nudge(trained, 3)
    assert resumed.publish(3).anchor_bytes == 0
    assert subscriber.update() == 3
    assert [file.name for file in subscriber.applied] == ["patch from step 2 to step 3"]
    assert same(trained, served)
    nudge(trained, 4)
    other = gw.WeightPublisher(trained, tmp_path, resume=True)
    assert other.run != first.run
    assert other.publish(4).patch_bytes == 0


def test_staged_weights_leave_the_tensors_alone_until_the_swap(tmp_path: Path) -> None:
    states, _ = files(tmp_path, steps=2)
    served = zeros(states[0])
    subscriber = gw.WeightSubscriber(served, tmp_path)
    with pytest.raises(gw.HyperparameterError, match="no staged weights"):
        subscriber.swap()
    assert subscriber.update(into="staging") == 1
    assert (subscriber.step, subscriber.staged_step) == (None, 1)
    assert same(served, zeros(states[0]))
    assert same(dict(subscriber.staged()), states[1])
    assert subscriber.swap() == 1
    assert same(served, states[1])
    with pytest.raises(gw.HyperparameterError, match="into"):
        subscriber.update(into="stage")


def test_staging_goes_on_by_patches(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(4):
        publisher.publish(step)
        assert subscriber.update(into="staging") == step
        assert step == 0 or subscriber.applied[0].name.startswith("patch")
        subscriber.swap()
        assert same(trained, served)
        nudge(trained, step)


def test_staging_reads_no_more_than_what_changes_once_it_was_verified(tmp_path: Path) -> None:
    """The first update into the copy checks all of it; later ones follow the sums of the words that they write."""
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    for step in (1, 2):
        trained["layer.weight"].view(torch.int16)[0, step] += 1
        publisher.publish(step)
        if step == 2:
            # What nobody may do: it is not looked at, so that the swapped weights would have it.
            octets(subscriber.staged()["layer.weight"])[-1] ^= 1
        assert subscriber.update(into="staging") == step
        subscriber.swap()
    octets(served["layer.weight"])[-1] ^= 1
    assert same(trained, served)


def test_a_staging_copy_of_changed_tensors_is_noticed(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    served["layer.weight"][-1, -1] += 1
    trained["layer.weight"][0, 0] += 1
    publisher.publish(1)
    with pytest.raises(gw.PayloadError, match=r"something else has changed the tensor 'layer.weight'"):
        subscriber.update(into="staging")
    assert subscriber.update(into="staging") == 1
    subscriber.swap()
    assert same(served, trained)


def test_a_staged_patch_with_other_sums_is_not_handed_over(tmp_path: Path) -> None:
    trained, served = weights(), zeros(weights())
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(2):
        publisher.publish(step)
        subscriber.update(into="staging")
        subscriber.swap()
        trained["layer.weight"].view(torch.int16)[0] += 1
    before = copies(served)
    # A word that the patch changes is another one than the publisher's.
    octets(subscriber.staged()["layer.weight"])[1] ^= 1
    publisher.publish(2)
    with pytest.raises(gw.PayloadError, match=r"patch from step 1 to step 2: the digest of 'layer.weight' differs"):
        subscriber.update(into="staging")
    assert subscriber.staged_step is None
    with pytest.raises(gw.HyperparameterError, match="no staged weights"):
        subscriber.swap()
    assert same(served, before)
    assert subscriber.update(into="staging") == 2
    assert subscriber.applied[0].name.startswith("anchor")
    subscriber.swap()
    assert same(served, trained)


@pytest.mark.parametrize("base", ["file", "sums"])
def test_bases_without_a_copy_in_memory(base: str, tmp_path: Path) -> None:
    place = tmp_path / "published"
    trained, served = weights(), zeros(weights())
    publisher = gw.WeightPublisher(trained, place, base=tmp_path / "base.bin" if base == "file" else base)
    subscriber = gw.WeightSubscriber(served, place)
    for step in range(3):
        publication = publisher.publish(step)
        assert subscriber.update() == step
        assert same(trained, served)
        trained["layer.weight"][0, 17] += 1
    if base == "sums":
        # The one block that changed, whole and coded.
        assert 1.3 * 2**17 < publication.patch_bytes < 1.4 * 2**17
    else:
        assert publication.patch_bytes < 400
        assert (tmp_path / "base.bin").stat().st_size >= 600_000


def test_threads_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.publish.encoder.CHUNK_ELEMENTS", 1 << 17)
    patches = []
    for threads in (1, 3):
        trained, served, folder = weights(), zeros(weights()), tmp_path / str(threads)
        monkeypatch.setattr("secrets.token_bytes", bytes)
        publisher = gw.WeightPublisher(trained, folder, threads=threads)
        subscriber = gw.WeightSubscriber(served, folder, threads=threads)
        for step in range(3):
            publisher.publish(step)
            subscriber.update()
            nudge(trained, step)
        patches.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert subscriber.step == 2
    assert patches[0] == patches[1]
    assert sum(name.startswith("patch") for name in patches[0]) == 2


def test_what_cannot_be_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gw.IncompatibleError, match="no tensors"):
        gw.WeightPublisher({}, tmp_path)
    with pytest.raises(gw.IncompatibleError, match="not supported"):
        gw.WeightPublisher({"w": torch.zeros(2, 2).to_sparse()}, tmp_path)
    with pytest.raises(gw.HyperparameterError, match="anchor_every=0"):
        gw.WeightPublisher(weights(), tmp_path, 0)
    with pytest.raises(gw.HyperparameterError, match="base='memroy'"):
        gw.WeightPublisher(weights(), tmp_path, base="memroy")
    with pytest.raises(gw.IncompatibleError, match="where is a int"):
        gw.WeightPublisher(weights(), 3)
    publisher = gw.WeightPublisher(weights(), tmp_path)
    publisher.publish(4)
    with pytest.raises(gw.HyperparameterError, match="follows step 4"):
        publisher.publish(4)
    with pytest.raises(gw.IncompatibleError, match=r"'scale'"):
        publisher.publish(5, {name: tensor for name, tensor in weights().items() if name != "scale"})
    served = weights() | {"scale": torch.zeros(2)}
    with pytest.raises(gw.IncompatibleError, match=r"'scale' F32 \[\] published, 'scale' F32 \[2\] here"):
        gw.WeightSubscriber(served, tmp_path).update()


def test_two_publishers_in_one_place_do_not_mix(tmp_path: Path) -> None:
    trained = weights()
    first, second = (gw.WeightPublisher(trained, tmp_path) for _ in range(2))
    first.publish(0)
    second.publish(1)
    with pytest.raises(gw.ExchangeError, match="has taken over"):
        first.publish(2)
    served = zeros(trained)
    assert gw.WeightSubscriber(served, tmp_path).update() == 1


def test_a_publisher_takes_over_while_the_one_before_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one must not remove the file that the new one is writing."""
    trained = weights()
    first, second = (gw.WeightPublisher(trained, tmp_path) for _ in range(2))
    first.publish(0)
    write = FolderPlace.write

    def slowly(place: FolderPlace, name: str, pieces: Sequence[Any]) -> None:
        def meanwhile() -> Iterator[Any]:
            with monkeypatch.context() as usual:
                usual.setattr(FolderPlace, "write", write)
                first.publish(1)
            yield from pieces

        write(place, name, meanwhile() if name.startswith("anchor") else pieces)  # type: ignore[arg-type]

    with monkeypatch.context() as slow:
        slow.setattr(FolderPlace, "write", slowly)
        second.publish(5)
    with pytest.raises(gw.ExchangeError, match="has taken over"):
        first.publish(2)
    assert gw.WeightSubscriber(zeros(trained), tmp_path).update() == 5
    assert len(list(tmp_path.iterdir())) == 2, "what the first one wrote is removed"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """Chained parameters of two modules: the second one's took the place of the first one's."""
    both = [torch.nn.Linear(2, 2) for _ in range(2)]
    for build in (gw.WeightPublisher, gw.WeightSubscriber):
        with pytest.raises(gw.IncompatibleError, match="two tensors have the name 'weight'"):
            build(itertools.chain(*(module.named_parameters() for module in both)), tmp_path)
    with pytest.raises(gw.IncompatibleError, match="the name 0 is a int"):
        gw.WeightPublisher({0: torch.zeros(2)}, tmp_path)  # type: ignore[arg-type]


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    publisher = gw.WeightPublisher(weights(), tmp_path)
    assert publisher.publish(np.int64(3)).step == 3  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integer"):
        publisher.publish(4.5)  # type: ignore[arg-type]
    assert publisher.publish(4).step == 4


def test_threads_work_on_the_streams_of_who_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the default streams, which do not wait for a step that runs on another one."""
    current = threading.local()

    def on(number: int) -> str:
        return getattr(current, "streams", {}).get(number, f"default {number}")

    def enter(stream: str) -> None:
        number = int(stream.split()[1])
        assert stream != f"default {number}", "setting it would make a context on that GPU"
        current.streams = {**getattr(current, "streams", {}), number: stream}

    for name, function in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_stream": on,
        "default_stream": lambda number: f"default {number}",
        "set_stream": enter,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    enter("training 1")
    found = in_parallel(lambda item: (threading.current_thread().name, on(0), on(1)), range(8), 3)
    assert {(first, second) for _, first, second in found} == {("default 0", "training 1")}
    assert all(name.startswith("gradwire-publish") for name, _, _ in found)
