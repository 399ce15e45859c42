"""Readers of the original file formats: MNIST's idx files, CIFAR-10's binary records, LIBSVM's text.

The readers of binary files check magic number and size first, so that a truncated download does not become a smaller
data set. Errors name the file, what was expected and what was found; the reader of text also names the line.
"""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire.tools.experiments.errors import DataError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
CLASSES = 10
CIFAR_IMAGES, CIFAR_RECORD_BYTES = 10_000, 3073


def existing_folder(folder: Path, expected: str) -> Path:
    """Return the folder if it exists; raises DataError that says what it should hold."""
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"--data {folder} {state}; expected a folder with {expected}")
    return folder


def find_file(folder: Path, name: str, endings: tuple[str, ...]) -> Path:
    """Find ``name`` with the first ending that exists; raises DataError that names all of them."""
    for ending in endings:
        if (path := folder / (name + ending)).is_file():
            return path
    wanted = " or ".join(name + ending for ending in endings)
    raise DataError(f"{folder} holds no {wanted}")


def read_bytes(path: Path) -> bytes:
    """Read a file, unpacking .gz and .xz; raises DataError if it cannot be read or unpacked."""
    try:
        packed = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(packed)
        return lzma.decompress(packed) if path.suffix == ".xz" else packed
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        found = path.stat().st_size
        raise DataError(f"{path} is truncated or corrupt ({found} bytes packed): {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _expect(path: Path, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise DataError(f"{path}: {what}: expected {expected}, found {found}")


def _tensor(data: bytes, offset: int) -> Tensor:
    return torch.frombuffer(bytearray(data[offset:]), dtype=torch.uint8)


def read_idx_images(path: Path) -> Tensor:
    """Read an idx file of images as uint8 ``[count, 1, height, width]``; raises DataError."""
    data = read_bytes(path)
    if len(data) < 16:
        raise DataError(f"{path}: bytes of header: expected 16, found {len(data)}")
    magic, count, height, width = struct.unpack(">4i", data[:16])
    _expect(path, "magic number of an idx image file", IMAGES_MAGIC, magic)
    if min(count, height, width) < 1:
        raise DataError(f"{path}: expected images, found {count} of {height} x {width} pixels")
    _expect(path, f"bytes for {count} images of {height} x {width}", 16 + count * height * width, len(data))
    return _tensor(data, 16).view(count, 1, height, width)


def read_idx_labels(path: Path, images: int) -> Tensor:
    """Read an idx file of labels for so many images as int64; raises DataError."""
    data = read_bytes(path)
    if len(data) < 8:
        raise DataError(f"{path}: bytes of header: expected 8, found {len(data)}")
    magic, count = struct.unpack(">2i", data[:8])
    _expect(path, "magic number of an idx label file", LABELS_MAGIC, magic)
    _expect(path, "labels, one an image", images, count)
    _expect(path, f"bytes for {count} labels", 8 + count, len(data))
    return _labels(path, _tensor(data, 8))


def read_cifar10(path: Path) -> tuple[Tensor, Tensor]:
    """Read one batch of CIFAR-10: uint8 ``[10000, 3, 32, 32]`` and int64 labels; raises DataError."""
    data = read_bytes(path)
    what = f"bytes for {CIFAR_IMAGES} records of {CIFAR_RECORD_BYTES}"
    _expect(path, what, CIFAR_IMAGES * CIFAR_RECORD_BYTES, len(data))
    records = _tensor(data, 0).view(CIFAR_IMAGES, CIFAR_RECORD_BYTES)
    return records[:, 1:].reshape(CIFAR_IMAGES, 3, 32, 32), _labels(path, records[:, 0])


def _labels(path: Path, labels: Tensor) -> Tensor:
    if (highest := int(labels.max())) >= CLASSES:
        raise DataError(f"{path}: labels: expected 0 to {CLASSES - 1}, found {highest}")
    return labels.to(torch.int64)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Labelled sparse rows.

    Attributes:
        labels: -1 or +1, float64 ``[rows]``.
        starts: Row i holds entries ``starts[i] .. starts[i + 1]``; int64 ``[rows + 1]``.
        columns: Column of each entry, counted from 0; int64 ``[entries]``.
        values: float64 ``[entries]``.
        features: Number of columns.
    """

    labels: Tensor
    starts: Tensor
    columns: Tensor
    values: Tensor
    features: int

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the rows as ``[rows, features]``."""
        rows = torch.arange(self.labels.numel()).repeat_interleave(self.starts.diff())
        matrix = torch.zeros(self.labels.numel(), self.features, dtype=dtype)
        matrix[rows, self.columns] = self.values.to(dtype)
        return matrix


def read_libsvm(path: Path) -> SparseRows:
    """Read rows ``label index:value ...`` of two classes, indices from 1 and ascending, plain or .gz or .xz.

    The smaller label becomes -1, the larger +1. A row may be a label without entries. The largest index is the number
    of features.

    Raises:
        DataError: the file cannot be read, or a row is malformed; the message names file and line.
    """
    labels: list[float] = []
    starts, columns, values = [0], list[int](), list[float]()
    for number, line in enumerate(read_bytes(path).decode("ascii", "replace").splitlines(), 1):
        label, *entries = line.split() or [""]
        labels.append(_finite(path, number, "a label", label))
        last = 0
        for entry in entries:
            index, colon, value = entry.partition(":")
            if not colon or not (index.isascii() and index.isdecimal()):
                raise DataError(f"{path}, line {number}: expected index:value, found {entry!r}")
            if int(index) <= last:
                after = f"an index above {last}" if last else "indices from 1"
                raise DataError(f"{path}, line {number}: expected {after}, found {entry!r}")
            last = int(index)
            columns.append(last - 1)
            values.append(_finite(path, number, "a finite value", value, entry))
        starts.append(len(columns))
    if not labels:
        raise DataError(f"{path}: expected rows of label index:value ..., found an empty file")
    if not columns:
        raise DataError(f"{path}: expected features, found {len(labels)} rows with a label alone")
    return SparseRows(
        _signs(path, labels),
        torch.tensor(starts),
        torch.tensor(columns),
        torch.tensor(values, dtype=torch.float64),
        max(columns) + 1,
    )


def _finite(path: Path, line: int, what: str, word: str, found: str | None = None) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    # Python reads 1_0 as ten; no other program does.
    if not math.isfinite(number) or "_" in word:
        raise DataError(f"{path}, line {line}: expected {what}, found {found or word!r}")
    return number


def _signs(path: Path, labels: list[float]) -> Tensor:
    known = sorted(set(labels))
    if len(known) > 2:
        one, other = list(dict.fromkeys(labels))[:2]
        line, third = next((i, label) for i, label in enumerate(labels, 1) if label not in (one, other))
        raise DataError(f"{path}, line {line}: expected two labels ({one:g} and {other:g}), found a third, {third:g}")
    if len(known) < 2:
        raise DataError(f"{path}: expected two labels, found {known[0]:g} in all {len(labels)} rows")
    return torch.where(torch.tensor(labels, dtype=torch.float64) == known[1], 1.0, -1.0).to(torch.float64)
