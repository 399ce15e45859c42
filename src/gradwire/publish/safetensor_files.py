"""Files in the format of safetensors: a length, a header in JSON, and the bytes of all tensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import IncompatibleError
from gradwire.publish.layout import BY_NAME, Entry, Layout

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorPlace:
    """Where the bytes of a tensor lie."""

    file: Path
    offset: int


def read_places(file: Path) -> dict[Entry, TensorPlace]:
    """Read the header of a file: the tensors, and where their bytes lie.

    Raises:
        IncompatibleError: it is not a complete safetensors file, or has a type that is not known here.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise IncompatibleError(f"{file} is not a safetensors file, or not complete: its header is cut off")
        text = stream.read(length)
    try:
        header = json.loads(text)
        rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
        found = {
            Entry(name, BY_NAME[row["dtype"]], tuple(map(int, row["shape"]))): tuple(map(int, row["data_offsets"]))
            for name, row in rows
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompatibleError(f"{file} is not a safetensors file of known types: {error!r}") from error
    for entry, (begin, end) in found.items():
        if end - begin != entry.nbytes or begin < 0 or 8 + length + end > size:
            raise IncompatibleError(
                f"{file} is not complete: {entry} has bytes {begin} to {end}, the file {size} in all"
            )
    return {entry: TensorPlace(file, 8 + length + begin) for entry, (begin, _) in found.items()}


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files that a path names: itself, or all in a folder.

    Raises:
        IncompatibleError: there is none, or an index names one that is not there.
    """
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise IncompatibleError(f"{path} is neither a safetensors file nor a folder with some")
    for index in path.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text()).get("weight_map", {}).values())
        missing = wanted - {file.name for file in files}
        if missing:
            raise IncompatibleError(f"{path} is not complete: {index.name} names {min(missing)}, which is not there")
    return files


def header_of(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with a layout, and the place of each tensor in the file."""
    rows: dict[str, object] = {"__metadata__": dict(metadata)}
    at, offsets = 0, []
    # In the order of their widths, so that every tensor is aligned to its elements.
    for number in sorted(range(len(layout.entries)), key=lambda i: -layout.entries[i].kind.width):
        entry = layout.entries[number]
        rows[entry.name] = {
            "dtype": entry.kind.name, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]
        }  # fmt: skip
        offsets.append((number, at))
        at += entry.nbytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, [len(start) + offset for _, offset in sorted(offsets)]


def sync(path: Path) -> None:
    """Have the operating system write a file or folder to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
