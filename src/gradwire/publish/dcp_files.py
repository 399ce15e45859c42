"""Folders of torch.distributed.checkpoint, to publish.

Their metadata is a pickle, which is read as data; tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.publish.boxes import TensorBox, covers
from gradwire.publish.disk import written
from gradwire.publish.inert_pickles import Built, read_pickle
from gradwire.publish.layout import BY_DTYPE, BlockSpan, Entry, Layout

METADATA = ".metadata"
_KEPT = 8
"""Chunks of tensors that are kept in memory, since several spans of a tensor are read one after the other."""


def is_dcp(path: Path) -> bool:
    """Return whether a folder is a complete checkpoint of torch.distributed.checkpoint: its metadata comes last."""
    return (path / METADATA).is_file()


@dataclass(frozen=True)
class _Stored:
    """Where a chunk of a tensor lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a checkpoint, and the boxes of its chunks."""

    dtype: str
    whole: tuple[int, ...]
    boxes: list[TensorBox]


def _size(found: Any) -> tuple[int, ...]:
    """Return a size as metadata has it."""
    numbers = found.arguments[0] if isinstance(found, Built) and found.name == "Size" else found
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{numbers} is no size")
    return tuple(numbers)


def _read_metadata(path: Path) -> tuple[dict[str, _Tensor], dict[tuple[str, tuple[int, ...]], _Stored]]:
    """Return the tensors of a checkpoint by name, and by name and first index of a chunk where it lies.

    Raises:
        IncompatibleError: it is not such metadata.
    """
    tensors, stored = {}, {}
    try:
        found = read_pickle((path / METADATA).read_bytes())
        if not isinstance(found, Built) or found.name != "Metadata":
            raise ValueError("it is not that of torch.distributed.checkpoint")
        for name, row in found.get("state_dict_metadata").items():
            if row.name != "TensorStorageMetadata":
                continue
            whole, boxes = _size(row.get("size")), []
            for chunk in row.get("chunks"):
                start, size = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
                boxes.append(TensorBox(start, tuple(a + n for a, n in zip(start, size, strict=True)), whole))
            tensors[str(name)] = _Tensor(row.get("properties").state[0].name.rpartition(".")[2], whole, boxes)
        for index, place in found.get("storage_data").items():
            if place.get("transform_descriptors"):
                raise ValueError("its files are transformed, compressed for example, which is not supported")
            where = _Stored(str(place.get("relative_path")), int(place.get("offset")), int(place.get("length")))
            stored[str(index.get("fqn")), _size(index.get("offset") or ())] = where
    except (PayloadError, ValueError, TypeError, AttributeError, LookupError, OSError) as error:
        raise IncompatibleError(f"{path / METADATA} cannot be read as metadata of a checkpoint: {error}") from error
    return tensors, stored


class DistributedCheckpoint:
    """The tensors of a folder of torch.distributed.checkpoint, whole, whatever the sharding that it was written in.

    Only tensors whose names begin with ``prefix`` are published: optimizers' states are left out.

    Args:
        path: The folder.
        prefix: Beginning of the names to publish, such as "model."; it is cut off. None: "model." if some names begin
            so, else all.

    Raises:
        IncompatibleError: the folder is not complete, or has tensors of types without a code.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str | None = None) -> None:
        self.path = Path(path)
        tensors, stored = _read_metadata(self.path)
        if prefix is None:
            prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
        self._chunks: dict[str, list[tuple[TensorBox, _Stored]]] = {}
        entries = []
        for full, tensor in tensors.items():
            if not full.startswith(prefix):
                continue
            name, kind = full[len(prefix) :], BY_DTYPE.get(getattr(torch, tensor.dtype, None))
            if kind is None:
                raise IncompatibleError(f"{full!r} of {self.path} is {tensor.dtype}: not supported")
            places = ((box, stored.get((full, box.start)) or stored.get((full, ()))) for box in tensor.boxes)
            self._chunks[name] = [(box, place) for box, place in places if place is not None and box.elements]
            if not covers(TensorBox.of_all(tensor.whole), [box for box, _ in self._chunks[name]]):
                raise IncompatibleError(f"the shards of {full!r} in {self.path} do not have each element once")
            entries.append(Entry(name, kind, tensor.whole))
        if not entries:
            raise IncompatibleError(f"{self.path} has no tensors whose names begin with {prefix!r}")
        self.layout = Layout(entries)
        files = {METADATA, *(place.file for chunks in self._chunks.values() for _, place in chunks)}
        self._before = {file: self._written(file) for file in files}
        self._kept: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def _written(self, file: str) -> tuple[int, ...] | None:
        # A file that is missing is named when it is read.
        with contextlib.suppress(OSError):
            return written(self.path / file)
        return None

    def check_unchanged(self) -> None:
        for file, before in self._before.items():
            if self._written(file) != before:
                raise IncompatibleError(f"{self.path / file} was written to while it was read: publish it again")

    def read(self, span: BlockSpan) -> torch.Tensor:
        entry, kind = self.layout.entries[span.tensor], span.kind
        out = torch.empty(span.elements * kind.width, dtype=torch.uint8, device="cpu")
        whole = TensorBox.of_all(entry.shape)
        begin, stop = span.begin // kind.numbers, span.stop // kind.numbers
        element = kind.width * kind.numbers
        for number, (box, place) in enumerate(self._chunks[entry.name]):
            at = box.contiguous_at(whole)
            if at is not None:
                first, last = max(begin, at), min(stop, at + box.elements)
                if first < last:
                    octets = self._chunk(entry, number, box, place).reshape(-1)
                    out[(first - begin) * element : (last - begin) * element] = octets[
                        (first - at) * element : (last - at) * element
                    ]
            elif len(entry.shape) > 1:
                self._strided(out, entry, begin, stop, box, self._chunk(entry, number, box, place), element)
        return out

    def _strided(
        self, out: torch.Tensor, entry: Entry, begin: int, stop: int, box: TensorBox, octets: torch.Tensor, element: int
    ) -> None:
        """Write a chunk whose rows are parts of the tensor's to the bytes of the elements ``begin .. stop``."""
        row = entry.elements // entry.kind.numbers // entry.shape[0]
        low, high = max(box.start[0], begin // row), min(box.stop[0], -(-stop // row))
        if low >= high:
            return
        rows = torch.zeros(high - low, *entry.shape[1:], element, dtype=torch.uint8, device="cpu")
        mask = torch.zeros(high - low, *entry.shape[1:], dtype=torch.bool, device="cpu")
        inner = tuple(slice(a, b) for a, b in zip(box.start[1:], box.stop[1:]))
        rows[(slice(None), *inner)] = octets.reshape(*box.shape, element)[low - box.start[0] : high - box.start[0]]
        mask[(slice(None), *inner)] = True
        first, last = max(begin, low * row), min(stop, high * row)
        target = out[(first - begin) * element : (last - begin) * element].reshape(-1, element)
        chosen = mask.reshape(-1)[first - low * row : last - low * row]
        target[chosen] = rows.reshape(-1, element)[first - low * row : last - low * row][chosen]

    def _chunk(self, entry: Entry, number: int, box: TensorBox, place: _Stored) -> torch.Tensor:
        """Return the bytes of a chunk."""
        key = (entry.name, number)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        file = (self.path / place.file).resolve()
        if self.path.resolve() not in file.parents:
            raise IncompatibleError(f"{self.path} keeps {entry.name!r} in {place.file}, outside of it: not supported")
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                data = stream.read(place.length)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            right = tensor.dtype == getattr(torch, entry.kind.dtype) and tuple(tensor.shape) == box.shape
        except Exception as error:
            raise IncompatibleError(f"{file} is not complete, or was damaged: {str(error)[:300]}") from error
        if not right:
            raise IncompatibleError(f"{file} has another tensor than {entry} at byte {place.offset}: it was replaced")
        octets: torch.Tensor = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with self._lock:
            self._kept[key] = octets
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return octets
