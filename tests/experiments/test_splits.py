"""What is held out is not trained on, and every file's images and labels go where they belong."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.tools.experiments.tasks import Source, build, readers


def evaluated(source: Source) -> tuple[Tensor, Tensor]:
    """Return all that a source is evaluated on."""
    inputs, targets = zip(*source.evaluation(0, 1))
    return torch.cat(inputs), torch.cat(targets)


def trained(source: Source) -> tuple[Tensor, Tensor]:
    """Return all training samples, in their order, as a step sees them."""
    return source.batch(torch.arange(source.samples), slice(0, source.samples), seed=0, step=0)


def test_digits_are_each_in_one_of_the_two_sets() -> None:
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    source = build("digits").load()
    parts = [trained(source), evaluated(source)]
    inputs, labels = (torch.cat(column) for column in zip(*parts))
    pixels = ((inputs + 0.5) * 16).flatten(1).to(torch.int64)
    found = sorted(zip(pixels.tolist(), labels.tolist()))
    everything = zip(bunch.data.astype(int).tolist(), bunch.target.tolist())
    assert found == sorted(everything), "no image is in both sets, none is lost, and each keeps its label"
    assert len(parts[0][1]) == 1437


def test_the_texts_tail_is_held_out(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    data = bytes(torch.randint(0, 256, (7000,), dtype=torch.uint8, generator=draw).tolist())
    (tmp_path / "a.txt").write_bytes(data)
    source = build("text", data=str(tmp_path)).load()
    inputs, targets = trained(source)
    # Windows of 65 bytes start at every place of the first nine tenths.
    assert source.samples == 6300 - 64
    assert bytes(inputs[:, 0].tolist()) == data[: 6300 - 64]
    assert bytes(targets[-1].tolist()) == data[6300 - 64 : 6300]
    inputs, targets = evaluated(source)
    assert bytes(inputs.flatten().tolist()) == data[6300 : 6300 + 10 * 64]
    assert bytes(targets.flatten().tolist()) == data[6301 : 6301 + 10 * 64]


def test_mnist_trains_on_the_training_files_and_is_evaluated_on_the_test_files(small_mnist: Path) -> None:
    source = build("mnist", data=str(small_mnist)).load()
    read = {
        "train": lambda path: gzip.decompress(path.with_name(path.name + ".gz").read_bytes()),
        "t10k": Path.read_bytes,
    }
    for part, (inputs, labels) in {"train": trained(source), "t10k": evaluated(source)}.items():
        images = read[part](small_mnist / f"{part}-images-idx3-ubyte")
        assert bytes((inputs * 256).to(torch.uint8).flatten().tolist()) == images[16:]
        assert bytes(labels.tolist()) == read[part](small_mnist / f"{part}-labels-idx1-ubyte")[8:]


def test_cifar10_trains_on_batches_1_to_4_and_is_evaluated_on_the_fifth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CIFAR_IMAGES", 3)
    for number in range(1, 6):
        # Image i of batch n has label n + i and the pixels 20 n + i.
        data = b"".join(bytes([number + i]) + bytes([20 * number + i]) * 3072 for i in range(3))
        packed = number % 2 == 0
        path = tmp_path / f"data_batch_{number}.bin{'.xz' if packed else ''}"
        path.write_bytes(lzma.compress(data) if packed else data)
    source = build("cifar10", data=str(tmp_path)).load()
    assert source.samples == 12
    _, labels = trained(source)
    assert labels.tolist() == [number + i for number in range(1, 5) for i in range(3)]
    inputs, labels = evaluated(source)
    assert labels.tolist() == [5, 6, 7]
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (torch.tensor([100.0, 101.0, 102.0])[:, None] / 255 - mean) / deviation
    # Two roundings of numbers below 4.
    torch.testing.assert_close(inputs[:, :, 0, 0], expected, rtol=0, atol=4 * 2.0**-22)
    assert bool((inputs == inputs[:, :, :1, :1]).all())


def test_logreg_is_evaluated_on_its_own_rows_as_it_says(small_libsvm: Path) -> None:
    """The loss is the objective, so that here the two sets are one."""
    task = build("logreg", data=str(small_libsvm), split="random")
    source = task.load()
    rows = readers.read_libsvm(small_libsvm)
    everything = sorted(zip(rows.dense(torch.float32).tolist(), rows.labels.tolist()))
    for inputs, labels in (trained(source), evaluated(source)):
        assert sorted(zip(inputs.tolist(), labels.tolist())) == everything
    assert "training rows" in task.evaluated_on
