"""Files in the format of safetensors: a length, a header in JSON, and the bytes of all tensors."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import IncompatibleError
from gradwire.publish.layout import BY_NAME, Entry, Layout

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<shards>\d+)(?P<rest>.*)\.safetensors")
"""Name of a file of a checkpoint in several files, such as model-00001-of-00004.safetensors."""


@dataclass(frozen=True)
class TensorPlace:
    """Where the bytes of a tensor lie."""

    file: Path
    offset: int


def read_places(file: Path, handle: int | None = None) -> dict[Entry, TensorPlace]:
    """Read the header of a file: the tensors, and where their bytes lie.

    Args:
        file: The file.
        handle: The file, opened and not read yet; None: open it.

    Raises:
        IncompatibleError: it is not a complete safetensors file, has a type that is not known here, or cannot be read.
    """
    try:
        with open(file if handle is None else handle, "rb", closefd=handle is None) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise IncompatibleError(f"{file} is not a safetensors file, or not complete: its header is cut off")
            text = stream.read(length)
    except OSError as error:
        raise IncompatibleError(f"{file} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text)
        rows = [(name, row) for name, row in header.items() if name != _METADATA]
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


def read_all_places(files: Mapping[Path, int]) -> dict[Entry, TensorPlace]:
    """Read the headers of opened files that are one model.

    Raises:
        IncompatibleError: a file is not complete or cannot be read, or two files have a tensor of the same name.
    """
    places: dict[Entry, TensorPlace] = {}
    owners: dict[str, Path] = {}
    for file, handle in files.items():
        for entry, place in read_places(file, handle).items():
            other = owners.setdefault(entry.name, file)
            if other != file:
                raise IncompatibleError(
                    f"{other} and {file.name} both have a tensor {entry.name!r}: pass the file that is the model, or "
                    "keep the other one in another folder"
                )
            places[entry] = place
    return places


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files that a path names.

    These are the file itself, or, of a folder, the files that its index names, or all if it has no index.

    Raises:
        IncompatibleError: there is none, one of several shards is not there, or an index cannot be read.
    """
    if path.is_file():
        return [path]
    found = {file.name: file for file in path.glob("*.safetensors")}
    if not found:
        raise IncompatibleError(f"{path} is neither a safetensors file nor a folder with some")
    indexed = set[str]()
    for index in sorted(path.glob("*.safetensors.index.json")):
        wanted = _indexed(index)
        missing = wanted - found.keys()
        if missing:
            raise IncompatibleError(f"{path} is not complete: {index.name} names {min(missing)}, which is not there")
        indexed |= wanted
    if not indexed:
        _check_shards(path, found)
    return [found[name] for name in sorted(indexed or found)]


def _indexed(index: Path) -> set[str]:
    """Return the names of the files that an index names."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompatibleError(f"{index} is not a complete index of safetensors files: {error!r}") from error
    return {str(name) for name in names}


def _check_shards(path: Path, names: Iterable[str]) -> None:
    """Refuse a folder that lacks a shard: shards are written one after the other, and their index is written last."""
    shards: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        shards.setdefault((match["stem"], match["shards"], match["rest"]), set()).add(int(match["number"]))
    for (stem, count, rest), numbers in shards.items():
        # Some writers count shards from 0.
        first = 0 if 0 in numbers else 1
        missing = next((number for number in range(first, first + int(count)) if number not in numbers), None)
        if missing is not None:
            name = f"{stem}-{missing:0{len(count)}d}-of-{count}{rest}.safetensors"
            raise IncompatibleError(f"{path} is not complete: {name} is not there")


def header_of(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with a layout, and the place of each tensor in the file.

    Raises:
        IncompatibleError: a tensor has the name of the file's metadata.
    """
    rows: dict[str, object] = {_METADATA: dict(metadata)}
    at, offsets = 0, []
    # In the order of their widths, so that every tensor is aligned to its elements.
    for number in sorted(range(len(layout.entries)), key=lambda i: -layout.entries[i].kind.width):
        entry = layout.entries[number]
        if entry.name == _METADATA:
            raise IncompatibleError(f"a tensor called {_METADATA!r} cannot be in a safetensors file")
        rows[entry.name] = {
            "dtype": entry.kind.name, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]
        }  # fmt: skip
        offsets.append((number, at))
        at += entry.nbytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start, [len(start) + offset for _, offset in sorted(offsets)]
