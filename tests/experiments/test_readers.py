"""Readers take the original formats and refuse anything else with file, expected and found."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
import torch
from run_help import write_idx

from gradwire.tools.experiments.errors import DataError, UsageError
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.tasks.readers import read_cifar10, read_idx_images, read_idx_labels, read_libsvm


def test_idx_files_are_read_exactly(tmp_path: Path) -> None:
    body = bytes(range(24))
    for name in ("plain", "packed.gz"):
        write_idx(tmp_path / name, 2051, (2, 3, 4), body)
        images = read_idx_images(tmp_path / name)
        assert images.shape == (2, 1, 3, 4)
        assert images.flatten().tolist() == list(range(24))
    write_idx(tmp_path / "labels", 2049, (3,), bytes([0, 9, 4]))
    assert read_idx_labels(tmp_path / "labels", 3).tolist() == [0, 9, 4]


@pytest.mark.parametrize(
    ("magic", "shape", "count", "words"),
    [
        (2049, (2, 3, 4), 24, ["magic", "expected 2051", "found 2049"]),
        (2051, (2, 3, 4), 23, ["expected 40", "found 39"]),
        (2051, (2, 3, 4), 25, ["expected 40", "found 41"]),
        (2051, (-2, 3, 4), 24, ["expected images"]),
    ],
)
def test_wrong_images_are_refused(
    tmp_path: Path, magic: int, shape: tuple[int, ...], count: int, words: list[str]
) -> None:
    path = tmp_path / "images"
    write_idx(path, magic, shape, bytes(count))
    with pytest.raises(DataError) as found:
        read_idx_images(path)
    assert all(word in str(found.value) for word in [str(path), *words])


def test_wrong_labels_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    write_idx(path, 2049, (3,), bytes([0, 10, 4]))
    with pytest.raises(DataError, match="expected 0 to 9, found 10"):
        read_idx_labels(path, 3)
    with pytest.raises(DataError, match="expected 4, found 3"):
        read_idx_labels(path, 4)
    path.write_bytes(b"\x00\x00\x08")
    with pytest.raises(DataError, match="expected 8, found 3"):
        read_idx_labels(path, 3)


def test_truncated_archives_are_refused(tmp_path: Path) -> None:
    whole = {"a.gz": gzip.compress(bytes(5000)), "b.xz": lzma.compress(bytes(5000))}
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(DataError, match=f"{name} is truncated or corrupt"):
            read_idx_images(tmp_path / name)


def test_cifar10_records(tmp_path: Path) -> None:
    record = bytes([7]) + bytes(i % 251 for i in range(3072))
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(record * 10_000)
    images, labels = read_cifar10(path)
    assert images.shape == (10_000, 3, 32, 32)
    # Colour by colour, row by row, column by column.
    assert [int(images[9_999, c, y, x]) for c, y, x in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (2, 31, 31))] == [
        1,
        32,
        1024 % 251,
        3071 % 251,
    ]
    assert bool((labels == 7).all())
    path.write_bytes(record * 9_999)
    with pytest.raises(DataError, match="expected 30730000, found 30726927"):
        read_cifar10(path)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --data"):
        build("mnist").check_data()
    with pytest.raises(DataError, match="does not exist"):
        build("mnist", data=str(tmp_path / "no")).check_data()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"):
        build("mnist", data=str(tmp_path)).check_data()
    with pytest.raises(DataError, match=r"data_batch_1.bin or data_batch_1.bin.xz"):
        build("cifar10", data=str(tmp_path)).check_data()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        build("cifar10", data=str(tmp_path / "file")).check_data()
    with pytest.raises(DataError, match=r"no \.txt file"):
        build("text", data=str(tmp_path)).check_data()


def test_a_file_that_is_not_read_exactly_would_show(small_mnist: Path) -> None:
    source = build("mnist", data=str(small_mnist)).load()
    inputs, _ = source.batch(torch.arange(256), slice(0, 256), seed=0, step=0)
    again = gzip.decompress((small_mnist / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert torch.equal(inputs.flatten() * 256, torch.tensor(list(again), dtype=torch.float32))


def test_libsvm_rows_are_read_exactly(tmp_path: Path) -> None:
    text = "2 1:0.5 4:-3e-1\n1\n+1.0 2:1\n2 3:7 \n"
    for name, data in (("plain", text.encode()), ("windows", text.replace("\n", "\r\n").encode())):
        (tmp_path / name).write_bytes(data)
        rows = read_libsvm(tmp_path / name)
        assert rows.labels.tolist() == [1.0, -1.0, -1.0, 1.0]
        assert rows.features == 4
        assert rows.starts.tolist() == [0, 2, 2, 3, 4]
        expected = [[0.5, 0, 0, -0.3], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 7, 0]]
        assert rows.dense(torch.float64).tolist() == expected
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    assert read_libsvm(tmp_path / "a.gz").values.tolist() == [0.5, -0.3, 1.0, 7.0]


@pytest.mark.parametrize("pair", [("-1", "+1"), ("0", "1"), ("1", "2"), ("-2.5", "7")])
def test_the_smaller_label_is_the_negative_one(tmp_path: Path, pair: tuple[str, str]) -> None:
    path = tmp_path / "rows"
    path.write_text(f"{pair[1]} 1:1\n{pair[0]} 1:1\n")
    assert read_libsvm(path).labels.tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty file"),
        ("1\n2\n", "found 2 rows with a label alone"),
        ("1 1:1\n1 2:1\n", "expected two labels, found 1 in all 2 rows"),
        ("1 1:1\n2 1:1\n1\n3 1:1\n", "line 4: expected two labels.*found a third, 3"),
        ("1 1:1\nspam 1:1\n", "line 2: expected a label, found 'spam'"),
        ("1 1:1\n\n2 1:1\n", "line 2: expected a label, found ''"),
        ("1 1:1\n2 0:1\n", "line 2: expected indices from 1, found '0:1'"),
        ("1 1:1\n2 3:1 3:2\n", "line 2: expected an index above 3, found '3:2'"),
        ("1 1:1\n2 3:1 2:2\n", "line 2: expected an index above 3, found '2:2'"),
        ("1 -1:1\n2 1:1\n", "line 1: expected index:value, found '-1:1'"),
        ("1 1:1\n2 7\n", "line 2: expected index:value, found '7'"),
        ("1 1:one\n2 1:1\n", "line 1: expected a finite value, found '1:one'"),
        ("1 1:1\n2 1:\n", "line 2: expected a finite value, found '1:'"),
        ("1 1:nan\n2 1:1\n", "line 1: expected a finite value, found '1:nan'"),
        ("1 1:1_0\n2 1:1\n", "line 1: expected a finite value"),
        ("inf 1:1\n2 1:1\n", "line 1: expected a label, found 'inf'"),
        ("1 1:\xff\n2 1:1\n", "line 1: expected a finite value"),
    ],
)
def test_malformed_rows_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=words) as found:
        read_libsvm(path)
    assert str(path) in str(found.value)


def test_a_missing_libsvm_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --data"):
        build("logreg").check_data()
    with pytest.raises(DataError, match=r"no\.txt does not exist; expected a LIBSVM text file"):
        build("logreg", data=str(tmp_path / "no.txt")).check_data()
    with pytest.raises(DataError, match="is no file"):
        build("logreg", data=str(tmp_path)).build_model()
