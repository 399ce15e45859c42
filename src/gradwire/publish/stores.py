"""Places for files of weights: a folder, a URL, a store of torch.distributed."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from gradwire.errors import BackendError, GradwireError, IncompatibleError, PayloadError
from gradwire.publish.container import Octets, view_of
from gradwire.publish.disk import partial_of, put_in_place, removed_on_error

PIECE_BYTES = 1 << 22
"""Bytes of a value in a store of torch.distributed at most, beside its head."""

_ONE_CALL_BYTES = 1 << 26
"""Bytes up to which a file at a URL is read by a single call. A manifest has no more."""

_INLINE, _STORE_HEAD = b"--------", 16


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
        partial = partial_of(self.path / name)
        with removed_on_error(partial):
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for piece in pieces:
                    view = view_of(piece).cast("B")
                    while view:
                        view = view[os.write(handle, view) :]
            finally:
                os.close(handle)
            put_in_place(partial, self.path / name)

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

    File systems have exceptions of their own, such as botocore's EndpointConnectionError. They are raised as OSError.

    Raises:
        BackendError: fsspec, or the package that the URL's file system needs, is not installed.
        OSError: the file system cannot be reached.
    """

    def __init__(self, url: str) -> None:
        with _calls_to(url):
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
        with _calls_to(self._url):
            self._system.makedirs(self._root, exist_ok=True)
            stream = self._system.open(self._path(name), "wb")
        try:
            # Pieces may be encoded here, and raise errors of their own.
            for piece in pieces:
                with _calls_to(self._url):
                    stream.write(view_of(piece).cast("B"))
        finally:
            with _calls_to(self._url):
                stream.close()

    def read(self, name: str, most_bytes: int) -> Octets:
        path, what = self._path(name), f"{self._url}/{name}"
        with _calls_to(self._url):
            self._system.invalidate_cache()
            if most_bytes <= _ONE_CALL_BYTES:
                # The file may be replaced between two calls, and then has another size than it had at the first.
                data = self._system.cat_file(path, start=0, end=most_bytes + 1)
                if len(data) <= most_bytes:
                    return np.frombuffer(bytearray(data), np.uint8)
            size = int(self._system.info(path)["size"])
        _check_size(what, size, most_bytes)
        out = np.empty(size, np.uint8)
        with _calls_to(self._url), self._system.open(path, "rb") as stream:
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
        with _calls_to(self._url):
            return np.frombuffer(self._system.cat_file(self._path(name), start=begin, end=end), np.uint8)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _calls_to(self._url):
            self._system.rm_file(self._path(name))

    def names(self) -> list[str]:
        with _calls_to(self._url):
            self._system.invalidate_cache()
            if not self._system.exists(self._root):
                return []
            return sorted(str(path).rpartition("/")[2] for path in self._system.ls(self._root, detail=False))


@contextlib.contextmanager
def _calls_to(url: str) -> Iterator[None]:
    """Raise exceptions of a URL's file system as OSError, with the original one as their cause."""
    try:
        yield
    except (OSError, GradwireError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


class StorePlace:
    """A key-value store of torch.distributed: a TCPStore, FileStore, HashStore or PrefixStore.

    A file of up to 4 MiB, such as a manifest, is one value, which is replaced at once. A longer one is cut into values
    of 4 MiB under keys of their own; a last key, which names them, makes it visible.
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
        if len(whole) <= PIECE_BYTES:
            self._store.set(self._key(name), struct.pack("<Q", len(whole)) + _INLINE + whole)
        else:
            mark = secrets.token_hex(4)
            for number, begin in enumerate(range(0, len(whole), PIECE_BYTES)):
                self._store.set(self._key(name, mark, number), whole[begin : begin + PIECE_BYTES])
            self._store.set(self._key(name), struct.pack("<Q", len(whole)) + mark.encode())
        self._drop(name, before)

    def _get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        if not self._store.check([key]):
            return None
        try:
            return bytes(self._store.get(key))
        except RuntimeError:
            # Between the two calls it may have been removed: the store then waits for it until its timeout.
            if self._store.check([key]):
                raise
            return None

    def _head(self, name: str) -> bytes | None:
        """Return the size of a file, the mark of its keys, and a short file's bytes."""
        value = self._get(self._key(name))
        # What is removed stays as an empty value where a store cannot delete keys.
        return None if value is None or len(value) < _STORE_HEAD else value

    def _drop(self, name: str, head: bytes | None) -> None:
        """Remove the values of a file that was removed or replaced."""
        if head is not None and head[8:_STORE_HEAD] != _INLINE:
            for number in range(-(-struct.unpack_from("<Q", head)[0] // PIECE_BYTES)):
                self._store.delete_key(self._key(name, head[8:].decode("ascii", "replace"), number))

    def read(self, name: str, most_bytes: int) -> Octets:
        head = self._found(name)
        size = struct.unpack_from("<Q", head)[0]
        _check_size(f"{name} in the store", size, most_bytes)
        return self._part(name, head, 0, size)

    def read_range(self, name: str, begin: int, end: int) -> Octets:
        """Return the bytes ``begin .. end`` of a file, or fewer if it ends before."""
        head = self._found(name)
        return self._part(name, head, begin, min(end, struct.unpack_from("<Q", head)[0]))

    def _found(self, name: str) -> bytes:
        head = self._head(name)
        if head is None:
            raise FileNotFoundError(f"the store has no {name}")
        return head

    def _part(self, name: str, head: bytes, begin: int, end: int) -> Octets:
        """Return bytes of a file."""
        size = struct.unpack_from("<Q", head)[0]
        if head[8:_STORE_HEAD] == _INLINE:
            whole = np.frombuffer(bytearray(head[_STORE_HEAD:]), np.uint8)
            if len(whole) != size:
                raise PayloadError(f"{name} in the store has {len(whole)} bytes: it was damaged")
            return whole[begin:end]
        first, last = begin // PIECE_BYTES, -(-end // PIECE_BYTES)
        low, high = first * PIECE_BYTES, min(last * PIECE_BYTES, size)
        out, at = np.empty(max(0, high - low), np.uint8), 0
        for number in range(first, last):
            key = self._key(name, head[8:].decode("ascii", "replace"), number)
            value = self._get(key)
            if value is None:
                raise FileNotFoundError(f"the store has no {key}")
            if len(value) != min(PIECE_BYTES, high - low - at):
                raise PayloadError(f"{key} in the store has {len(value)} bytes: it was damaged")
            out[at : at + len(value)] = np.frombuffer(value, np.uint8)
            at += len(value)
        return out[begin - low : end - low]

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
