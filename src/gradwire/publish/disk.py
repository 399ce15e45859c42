"""Files on a disk: written whole under another name, on room that is there, and put in their place at once."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

_PARTIAL = ".partial"


def sync(path: Path) -> None:
    """Have the operating system write a file or folder to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_on_room(path: Path, nbytes: int) -> BinaryIO:
    """Open a file anew, with a length and room on its disk; if there is not enough, no file is left.

    Who has opened or mapped a file of this name keeps that one.

    A file that has a length without room is written through a map until the disk is full; the kernel then ends the
    process by a signal.

    Raises:
        OSError: there is not enough room for this file, which it names.
    """
    # Not cut short: that would end a process that has mapped it by a signal. A link stays one.
    with contextlib.suppress(OSError):
        os.unlink(os.path.realpath(path))
    stream = path.open("w+b")
    # A file that is open keeps its room, also without a name.
    with removed_on_error(path), contextlib.ExitStack() as opened:
        _reserve(opened.enter_context(stream), nbytes)
        opened.pop_all()
    return stream


def _reserve(stream: BinaryIO, nbytes: int) -> None:
    os.ftruncate(stream.fileno(), nbytes)
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(stream.fileno(), 0, nbytes)
        except OSError as error:
            # Some file systems cannot, and take the length alone.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise OSError(error.errno, error.strerror, stream.name) from error


def partial_of(path: Path) -> Path:
    """Return another name in a file's folder, which no other process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def is_partial(name: str) -> bool:
    """Return whether a name is one that :func:`partial_of` returned."""
    return name.startswith(".") and name.endswith(_PARTIAL)


def remove_partials(path: Path) -> None:
    """Remove what processes that were killed have left of a file; who still writes it has to begin anew."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError):
        for entry in path.parent.iterdir():
            if entry.name.startswith(prefix) and is_partial(entry.name):
                entry.unlink(missing_ok=True)


def put_in_place(partial: Path, path: Path) -> None:
    """Put a file that was written under another name in its place, to stay there after a crash."""
    sync(partial)
    os.replace(partial, path)
    try:
        sync(path.parent)
    except OSError as error:
        # Some file systems, such as mounted buckets and network shares, cannot do so for folders.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


class OpenFiles:
    """Files that are read bit by bit, whole as they were when they were opened, whatever takes their places meanwhile.

    Raises:
        OSError: a file cannot be opened.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.handles: dict[Path, int] = {}
        weakref.finalize(self, _close, self.handles)
        for path in paths:
            self.handles[path] = os.open(path, os.O_RDONLY)
        self._written = {path: written(handle) for path, handle in self.handles.items()}

    def read(self, path: Path, offset: int, count: int) -> np.ndarray:
        """Return bytes of a file, or fewer if it ends before; from any thread."""
        out, got = np.empty(count, np.uint8), 0
        while got < count:
            read = os.preadv(self.handles[path], [out.data[got:]], offset + got)
            if not read:
                break
            got += read
        return out[:got]

    def rewritten(self) -> Path | None:
        """Return a file that has been written to since it was opened; None if there is none."""
        return next((path for path, before in self._written.items() if written(self.handles[path]) != before), None)


def written(file: Path | int) -> tuple[int, int, int]:
    """Return what differs after a file has been written to, or replaced."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _close(handles: dict[Path, int]) -> None:
    for handle in handles.values():
        os.close(handle)


@contextlib.contextmanager
def removed_on_error(partial: Path) -> Iterator[None]:
    """Remove a partial file if the body raises: what it takes up may be the room that is missing.

    An error of the operating system that names no file gets the name of this one.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = os.fspath(partial)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
