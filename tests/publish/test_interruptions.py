"""Updates and steps that fail midway, and tensors and files that something else replaces meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_cases import copies, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish import disk
from gradwire.publish.stores import FolderPlace
from gradwire.publish.weights import SavedTensors


def test_an_update_that_cannot_be_handed_over_is_not_taken_for_done(tmp_path: Path) -> None:
    """Tensors that PyTorch does not write to: each update says so, and none returns the step."""
    publisher = gw.WeightPublisher({"a": torch.full((3,), 2.0), "b": torch.full((3,), 4.0)}, tmp_path)
    publisher.publish(5)
    served = {"a": torch.zeros(3, 2)[:, 0], "b": torch.zeros(1).expand(3)}
    subscriber = gw.WeightSubscriber(served, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="single memory location"):
            subscriber.update()
        assert subscriber.step is None


def test_a_file_that_cannot_be_put_in_its_place_is_written_anew(tmp_path: Path, monkeypatch: Any) -> None:
    trained, target = weights(), tmp_path / "w.safetensors"
    publisher = gw.WeightPublisher(trained, tmp_path / "published")
    subscriber = gw.WeightSubscriber(target, tmp_path / "published")
    publisher.publish(0)
    subscriber.update()
    before = copies(trained)
    nudge(trained, 0)
    publisher.publish(1)

    def full(path: Path) -> None:
        raise OSError(errno.EIO, "it cannot be written", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", full)
        with pytest.raises(OSError, match="cannot be written"):
            subscriber.update()
    assert same(load_file(target), before)
    assert subscriber.step is None
    assert subscriber.update() == 1
    assert same(load_file(target), trained)
    assert [path.name for path in target.parent.glob(".*")] == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_folder_that_cannot_be_synchronised_serves_unless_its_disk_fails(
    tmp_path: Path, monkeypatch: Any, code: int
) -> None:
    """Mounted buckets and network shares refuse to synchronise a folder."""
    real = disk.sync

    def files_only(path: Path) -> None:
        if path.is_dir():
            raise OSError(code, "it cannot be synchronised", str(path))
        real(path)

    publisher = gw.WeightPublisher(weights(), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", files_only)
        if code == errno.EIO:
            with pytest.raises(OSError, match="cannot be synchronised"):
                publisher.publish(0)
            return
        publisher.publish(0)
    assert gw.WeightSubscriber(zeros(weights()), tmp_path).update() == 0


def test_a_base_in_a_file_stays_its_publishers_own(tmp_path: Path) -> None:
    """As after a restart while the process before still publishes: that one was ended by a bus error."""
    trained, base = weights(), tmp_path / "base"
    base.symlink_to(tmp_path / "elsewhere")
    first = gw.WeightPublisher(trained, tmp_path / "first", base=base)
    served = zeros(trained)
    subscriber = gw.WeightSubscriber(served, tmp_path / "first")
    first.publish(0)
    subscriber.update()
    second = gw.WeightPublisher({"w": torch.ones(3)}, tmp_path / "second", base=base)
    second.publish(0)
    nudge(trained, 0)
    assert first.publish(1).changed < first.publish(2).elements
    assert subscriber.update() == 2
    assert same(trained, served)
    assert base.is_symlink()


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    publisher = gw.WeightPublisher(weights(), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*anchor-000000000000-.*'"):
            publisher.publish(0)
    assert list(tmp_path.iterdir()) == []
    assert publisher.publish(0).anchor_bytes > 0


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    """Without room the kernel would end the process at the first write to the map."""
    trained, target = weights(), tmp_path / "w.safetensors"
    publisher = gw.WeightPublisher(trained, tmp_path / "published")
    publisher.publish(0)
    handles = list[int]()

    def full(handle: int, offset: int, nbytes: int) -> None:
        handles.append(handle)
        raise OSError(errno.ENOSPC, "no room")

    subscriber = gw.WeightSubscriber(target, tmp_path / "published")
    for step in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(OSError, match=r"no room: .*base"):
                gw.WeightPublisher(trained, tmp_path / "other", base=tmp_path / "base")
            with pytest.raises(OSError, match=r"no room: .*w\.safetensors"):
                subscriber.update()
        assert len(handles) == 2
        # Neither a file nor an open one without a name takes up room.
        assert sorted(path.name for path in tmp_path.iterdir()) == ["published", *["w.safetensors"] * step]
        while handles:
            with contextlib.suppress(OSError):
                assert os.fstat(handles.pop()).st_nlink
        assert subscriber.update() == step
        nudge(trained, step)
        publisher.publish(step + 1)


def test_file_systems_that_reserve_no_room_are_served(tmp_path: Path, monkeypatch: Any) -> None:
    def unknown(handle: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    trained, target = weights(), tmp_path / "w.safetensors"
    gw.WeightPublisher(trained, tmp_path / "published", base=tmp_path / "base").publish(0)
    assert gw.WeightSubscriber(target, tmp_path / "published").update() == 0
    assert same(load_file(target), trained)


def test_two_subscribers_of_one_file_leave_it_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """A service that is replaced may still write while its successor begins."""
    trained, target = weights(), tmp_path / "w.safetensors"
    publisher = gw.WeightPublisher(trained, tmp_path / "published")
    publisher.publish(0)
    first, second = (gw.WeightSubscriber(target, tmp_path / "published") for _ in range(2))
    put = disk.put_in_place

    def late(partial: Path, path: Path) -> None:
        monkeypatch.setattr("gradwire.publish.following_file.put_in_place", put)
        assert second.update() == 0
        put(partial, path)

    monkeypatch.setattr("gradwire.publish.following_file.put_in_place", late)
    assert first.update() == 0
    assert same(load_file(target), trained)
    nudge(trained, 0)
    publisher.publish(1)
    assert first.update() == second.update() == 1
    assert same(load_file(target), trained)


def test_what_a_killed_subscriber_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "w.safetensors"
    disk.partial_of(target).write_bytes(b"left over")
    (other := disk.partial_of(tmp_path / "v.safetensors")).write_bytes(b"of another file")
    gw.WeightSubscriber(target, tmp_path / "published")
    assert list(tmp_path.iterdir()) == [other]


def test_a_write_that_fails_takes_up_no_room(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield b"some bytes"
        raise OSError(errno.ENOSPC, "no room")

    with pytest.raises(OSError, match="no room"):
        FolderPlace(tmp_path).write("anchor.gww", pieces())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest_is_replaced_by_its_publisher(tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path)
    publisher.publish(0)
    file = tmp_path / "manifest.json"
    file.write_bytes(file.read_bytes()[:100])
    nudge(trained, 0)
    publisher.publish(1)
    served = zeros(trained)
    assert gw.WeightSubscriber(served, tmp_path).update() == 1
    assert same(served, trained)


def test_buffers_that_a_module_has_given_up_are_not_followed(tmp_path: Path) -> None:
    """``Module.to`` replaces buffers, and ``load_state_dict(assign=True)`` all tensors."""
    trained, served = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    changes: list[Any] = [
        lambda: None,
        lambda: served.to(torch.float64).to(torch.float32),
        lambda: served.load_state_dict({name: t.clone() for name, t in served.state_dict().items()}, assign=True),
        lambda: served.load_state_dict({name: t + 1 for name, t in served.state_dict().items()}, assign=True),
    ]
    for step, change in enumerate(changes):
        with torch.no_grad():
            for tensor in trained.state_dict().values():
                tensor.add_(1)
        publisher.publish(step)
        change()
        if step == 2:
            subscriber.update(into="staging")
            assert subscriber.swap() == step
        else:
            assert subscriber.update() == step
        assert same(dict(served.state_dict()), dict(trained.state_dict()))
    served.half()
    with pytest.raises(gw.IncompatibleError, match="differ from those that the subscriber was given"):
        subscriber.update()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "named tensors"])
def test_tensors_that_were_given_another_type_are_refused_by_name(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """``Module.to`` keeps parameters and replaces their memory."""
    trained, served = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    publisher = gw.WeightPublisher(trained, tmp_path)
    subscriber = gw.WeightSubscriber(served if kind == "module" else dict(served.named_parameters()), tmp_path)
    publisher.publish(0)
    subscriber.update()
    served.to(dtype)
    held = copies(dict(served.named_parameters()))
    for step in range(2):
        for update in (subscriber.update, lambda: subscriber.update(full=True), lambda: subscriber.update("staging")):
            with pytest.raises(gw.IncompatibleError, match=r"differ from those .* 'bias' .* F32 \[4\] there"):
                update()
        assert same(dict(served.named_parameters()), held)
        publisher.publish(step + 1)
    served.float()
    assert subscriber.update(full=True) == 2
    assert same(dict(served.named_parameters()), dict(trained.named_parameters()))


def test_tensors_that_were_given_a_type_that_is_not_served_are_refused_by_name(tmp_path: Path) -> None:
    trained, served = {"a": torch.ones(5)}, {"a": torch.zeros(5)}
    gw.WeightPublisher(trained, tmp_path).publish(0)
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    served["a"].data = torch.zeros(5, dtype=torch.complex128)
    with pytest.raises(gw.IncompatibleError, match=r"'a' is torch\.complex128, .* not supported"):
        subscriber.update()
    served["a"].data = torch.zeros(5)
    assert subscriber.update() == 0
    assert same(served, trained)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    first = {"a": torch.zeros(5), "b": torch.zeros(5)}
    save_file(first, tmp_path / "w.safetensors")
    saved = SavedTensors(tmp_path / "w.safetensors")
    save_file({name: tensor + 1 for name, tensor in first.items()}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "w.safetensors")
    saved.check_unchanged()
    assert not any(saved.read(span).any() for span in saved.layout.spans(0, saved.layout.blocks))
    gw.WeightPublisher(tmp_path / "w.safetensors", tmp_path / "published").publish(0)


def test_a_checkpoint_that_is_written_to_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    trained, file = weights(), tmp_path / "w.safetensors"
    save_file(trained, file)
    publisher = gw.WeightPublisher(file, tmp_path / "published")
    publisher.publish(0)
    read, later = SavedTensors.read, copies(trained)
    nudge(later, 0)
    save_file(later, tmp_path / "later")

    def slow(saved: SavedTensors, span: Any) -> torch.Tensor:
        if saved.layout.entries[span.tensor].name == "scale":
            # In the same file, where others put a new one in its place.
            file.write_bytes((tmp_path / "later").read_bytes())
        return read(saved, span)

    with monkeypatch.context() as patched:
        patched.setattr(SavedTensors, "read", slow)
        with pytest.raises(gw.IncompatibleError, match="was written to while it was read: publish it again"):
            publisher.publish(1)
        with pytest.raises(gw.IncompatibleError, match="was written to while it was read: publish it again"):
            gw.WeightPublisher(file, tmp_path / "published", resume=True)
    publisher.publish(1)
    served = zeros(trained)
    assert gw.WeightSubscriber(served, tmp_path / "published").update() == 1
    assert same(served, later)


def test_conjugated_tensors_are_published_as_they_read(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    trained, served = {"a": number.conj(), "b": number.conj().imag}, {"a": number.clone().conj(), "b": torch.zeros(2)}
    gw.WeightPublisher(trained, tmp_path).publish(0)
    gw.WeightSubscriber(served, tmp_path).update()
    assert served["a"].tolist() == [1 - 2j, 3 + 4j]
    assert served["b"].tolist() == [-2.0, 4.0]


def test_names_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gw.IncompatibleError, match="is no text"):
        gw.WeightPublisher({"\ud800": torch.zeros(1)}, tmp_path)
    gw.WeightPublisher({"__metadata__": torch.zeros(1)}, tmp_path).publish(0)
    with pytest.raises(gw.IncompatibleError, match="__metadata__"):
        gw.WeightSubscriber(tmp_path / "w.safetensors", tmp_path).update()


def test_settings_by_which_no_manifest_could_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gw.HyperparameterError, match="write anchors more often, or keep fewer"):
        gw.WeightPublisher(weights(), tmp_path, 10**6)
