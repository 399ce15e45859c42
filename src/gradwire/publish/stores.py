"""Places for files of weights: a folder, a URL, a store of torch.distributed."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from gradwire.errors import BackendError, IncompatibleError, PayloadError
from gradwire.publish.container import Octets, view_of
from gradwire.publish.safetensor_files import sync

PIECE_BYTES = 1 << 22
"""Bytes of a value in a store of torch.distributed at most."""


class Place(Protocol):
    """A place that keeps files by name. A file is whole or not there, and is not changed but by replacing it.

    A place may have a method ``read_range(name, begin, end)``, which returns some bytes of a file. Readers that hold
    shards then read no more than they need; without it they read files whole.
    """

    def write(self, name: str, pieces: Sequence[Octets | bytes]) -> None:
        """Write a file that consists of pieces, or replace it."""
        ...

    def read(self, name: str, most_bytes: int) -> Octets:
        """Return a file.

        Raises:
            FileNotFoundError: there is none.
            PayloadError: it has more than ``most_bytes``.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file; do nothing if there is none."""
        ...

    def names(self) -> list[str]:
        """List the files, if the place can list them."""
        ...


class FolderPlace:
    """A local folder.

    A file is written under another name, synchronised with the disk and renamed, so that readers, and whoever starts
    after a crash, find the old file or the new one. Files are mapped, not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, pieces: Sequence[Octets | bytes]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{name}.partial"
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for piece in pieces:
                view = view_of(piece).cast("B")
                while view:
                    view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(partial, self.path / name)
        sync(self.path)

    def read(self, name: str, most_bytes: int) -> Octets:
        file = self.path / name
        size = file.stat().st_size
        _check_size(str(file), size, most_bytes)
        # Changes of this map stay private to it.
        return np.memmap(file, np.uint8, "c") if size else np.zeros(0, np.uint8)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_file()) if self.path.exists() else []


class UrlPlace:
    """A folder of any file system that fsspec knows: s3://, gs://, abfs://, sftp://, memory://, ...

    Object stores put a file at once. Elsewhere a reader may see a part of a file that is being written: the manifest
    carries a digest, so that a part of it is refused, and it names no other file before that is written.

    Raises:
        BackendError: fsspec, or the package that the URL's file system needs, is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            # Imported here, since importing it takes time that others need not spend.
            from fsspec.core import url_to_fs

            self._system, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BackendError(
                f"{url} cannot be opened ({error}): pip install fsspec and the package it names"
            ) from error
        self._url = url

    def __str__(self) -> str:
        return self._url

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def write(self, name: str, pieces: Sequence[Octets | bytes]) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        with self._system.open(self._path(name), "wb") as stream:
            for piece in pieces:
                stream.write(view_of(piece).cast("B"))

    def read(self, name: str, most_bytes: int) -> Octets:
        self._system.invalidate_cache()
        size = int(self._system.info(self._path(name))["size"])
        _check_size(f"{self._url}/{name}", size, most_bytes)
        out = np.empty(size, np.uint8)
        with self._system.open(self._path(name), "rb") as stream:
            view, got = out.data, 0
            while got < size:
                part = stream.read(min(PIECE_BYTES, size - got))
                if not part:
                    break
                view[got : got + len(part)] = part
                got += len(part)
        return out[:got]

    def read_range(self, name: str, begin: int, end: int) -> Octets:
        """Return the bytes ``begin .. end`` of a file, or fewer if it ends before."""
        return np.frombuffer(self._system.cat_file(self._path(name), start=begin, end=end), np.uint8)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        if not self._system.exists(self._root):
            return []
        return sorted(str(path).rpartition("/")[2] for path in self._system.ls(self._root, detail=False))


class StorePlace:
    """A key-value store of torch.distributed: a TCPStore, FileStore, HashStore or PrefixStore.

    A file is cut into values of 4 MiB under keys of their own; a last key, which names them, makes it visible.
    """

    def __init__(self, store: Any, prefix: str = "gradwire-weights") -> None:
        self._store, self._prefix = store, prefix

    def __str__(self) -> str:
        return type(self._store).__name__

    def _key(self, name: str, *more: object) -> str:
        return "/".join((self._prefix, name, *map(str, more)))

    def write(self, name: str, pieces: Sequence[Octets | bytes]) -> None:
        before = self._head(name)
        whole = b"".join(bytes(view_of(piece)) for piece in pieces)
        mark = secrets.token_hex(4)
        for number, begin in enumerate(range(0, len(whole), PIECE_BYTES)):
            self._store.set(self._key(name, mark, number), whole[begin : begin + PIECE_BYTES])
        self._store.set(self._key(name), struct.pack("<Q", len(whole)) + mark.encode())
        self._drop(name, before)

    def _head(self, name: str) -> tuple[int, str] | None:
        if not self._store.check([self._key(name)]):
            return None
        value = self._store.get(self._key(name))
        if len(value) != 16:
            # What is removed stays as an empty value where a store cannot delete keys.
            return None
        return struct.unpack("<Q", value[:8])[0], value[8:].decode("ascii", "replace")

    def _drop(self, name: str, head: tuple[int, str] | None) -> None:
        if head is not None:
            size, mark = head
            for number in range(-(-size // PIECE_BYTES)):
                self._store.delete_key(self._key(name, mark, number))

    def read(self, name: str, most_bytes: int) -> Octets:
        size, mark = self._found(name)
        _check_size(f"{name} in the store", size, most_bytes)
        return self._part(name, size, mark, 0, -(-size // PIECE_BYTES))

    def read_range(self, name: str, begin: int, end: int) -> Octets:
        """Return the bytes ``begin .. end`` of a file, or fewer if it ends before."""
        size, mark = self._found(name)
        end = min(end, size)
        first = begin // PIECE_BYTES
        part = self._part(name, size, mark, first, -(-end // PIECE_BYTES))
        return part[begin - first * PIECE_BYTES : end - first * PIECE_BYTES]

    def _found(self, name: str) -> tuple[int, str]:
        head = self._head(name)
        if head is None:
            raise FileNotFoundError(f"the store has no {name}")
        return head

    def _part(self, name: str, size: int, mark: str, first: int, last: int) -> Octets:
        """Return values of a file, joined."""
        begin, end = first * PIECE_BYTES, min(last * PIECE_BYTES, size)
        out, at = np.empty(max(0, end - begin), np.uint8), 0
        for number in range(first, last):
            key = self._key(name, mark, number)
            if not self._store.check([key]):
                raise FileNotFoundError(f"the store has no {key}")
            part = np.frombuffer(self._store.get(key), np.uint8)
            if len(part) != min(PIECE_BYTES, end - begin - at):
                raise PayloadError(f"{key} in the store has {len(part)} bytes: it was damaged")
            out[at : at + len(part)] = part
            at += len(part)
        return out

    def remove(self, name: str) -> None:
        head = self._head(name)
        if head is not None:
            self._store.delete_key(self._key(name))
            self._drop(name, head)

    def names(self) -> list[str]:
        return []


def _check_size(what: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise PayloadError(f"{what} has {size} bytes, more than the {most_bytes} expected: it was damaged or replaced")


def open_place(where: object) -> Place:
    """Return the place that ``where`` names.

    Args:
        where: A folder, a URL, a store of torch.distributed, or an object with the methods of :class:`Place`.

    Raises:
        IncompatibleError: it is none of these.
        BackendError: the URL needs a package that is not installed.
    """
    if isinstance(where, os.PathLike):
        return FolderPlace(where)
    if isinstance(where, str):
        scheme, separator, rest = where.partition("://")
        if not separator or scheme in ("file", "local"):
            return FolderPlace(rest if separator else where)
        return UrlPlace(where)
    if all(hasattr(where, name) for name in ("write", "read", "remove", "names")):
        return cast(Place, where)
    if all(hasattr(where, name) for name in ("set", "get", "check", "delete_key")):
        return StorePlace(where)
    raise IncompatibleError(
        f"where is a {type(where).__name__}: pass a folder, a URL such as s3://bucket/run, a store of "
        "torch.distributed, or a process group"
    )
