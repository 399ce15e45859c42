"""A safetensors file that follows a publisher, replaced at once by a new one."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from gradwire.errors import IncompatibleError
from gradwire.publish.container import Octets
from gradwire.publish.disk import open_on_room, partial_of, put_in_place, remove_partials
from gradwire.publish.layout import BlockSpan, Layout
from gradwire.publish.safetensor_files import header_of, read_places

PIECE_BYTES = 1 << 24
"""Bytes that are taken over from the old file at a time."""


class FollowingFile:
    """A safetensors file that follows a publisher.

    Each update is written into a new file, which then takes the place of the old one: who has opened or mapped the old
    file keeps it whole. What an update reads or changes is taken over from the old file just before, and the rest at
    its end: the old file is read once, and the new one is written once.

    Args:
        path: The file, or a folder, in which it is ``model.safetensors``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = Path(path)
        self.path = given if given.suffix == ".safetensors" else given / "model.safetensors"
        remove_partials(self.path)
        # A service that is replaced may still write the same file while its successor begins.
        self._partial = partial_of(self.path)
        self._old: BinaryIO | None = None
        self._mapped: Octets | None = None
        self._writing: BinaryIO | None = None
        self._new: Octets | None = None
        self._places: list[int] = []
        self._layout: Layout | None = None
        self._offsets: list[int] = []
        self._lacking: list[dict[int, threading.Lock]] = []
        self._load()

    @property
    def layout(self) -> Layout | None:
        return self._layout

    def _load(self) -> None:
        """Map the file, if it is there."""
        self._layout = self._mapped = None
        self._close()
        if not self.path.exists():
            return
        places = read_places(self.path)
        self._layout = Layout(places)
        self._offsets = [places[entry].offset for entry in self._layout.entries]
        self._old = self.path.open("rb")
        self._mapped = np.memmap(self._old, np.uint8, "c")  # changes of the map stay private to it

    def _close(self) -> None:
        for stream in (self._old, self._writing):
            if stream is not None:
                stream.close()
        self._old = self._writing = None
        self._lacking = []

    def read(self, span: BlockSpan) -> torch.Tensor:
        if self._new is not None:
            return self.target(span)
        if self._mapped is None:
            raise IncompatibleError(f"{self.path} is not there")
        return _part(self._mapped, self._offsets[span.tensor], span)

    @property
    def hidden(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        """Whether an update has begun."""
        return self._new is not None

    def open(self, layout: Layout, step: int, *, whole: bool = False) -> None:
        header, places = header_of(layout, _metadata(step))
        if self._new is None or self._layout is None or self._layout.digest != layout.digest:
            self._begin(layout, len(header) + layout.nbytes, whole)
            self._places = places
        if self._new is not None:
            self._new[: len(header)] = np.frombuffer(header, np.uint8)

    def _begin(self, layout: Layout, size: int, whole: bool) -> None:
        same = self._layout is not None and self._layout.digest == layout.digest
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writing = open_on_room(self._partial, size)
        self._new = np.memmap(self._writing, np.uint8, "r+")
        if self._mapped is not None and same and not whole:
            pieces = [range(-(-entry.nbytes // PIECE_BYTES)) for entry in layout.entries]
            self._lacking = [{piece: threading.Lock() for piece in of_one} for of_one in pieces]
        else:
            self._lacking = [{} for _ in layout.entries]
        self._layout = layout

    def target(self, span: BlockSpan) -> torch.Tensor:
        if self._new is None:
            raise IncompatibleError(f"{self.path} is not open for an update")
        octets = span.octets
        self._take_over(span.tensor, range(octets.start // PIECE_BYTES, -(-octets.stop // PIECE_BYTES)))
        return _part(self._new, self._places[span.tensor], span)

    def _take_over(self, tensor: int, pieces: range) -> None:
        """Copy those pieces of a tensor from the old file that have not been, from any thread."""
        lacking = self._lacking[tensor]
        for piece in pieces:
            lock = lacking.get(piece)
            if lock is None:
                continue
            with lock:
                if piece in lacking:
                    self._copy(tensor, piece * PIECE_BYTES)
                    del lacking[piece]

    def _copy(self, tensor: int, begin: int) -> None:
        if self._layout is None or self._old is None or self._writing is None:
            raise IncompatibleError(f"{self.path} is not open for an update")
        count = min(PIECE_BYTES, self._layout.entries[tensor].nbytes - begin)
        source, target = self._offsets[tensor] + begin, self._places[tensor] + begin
        old, new = self._old.fileno(), self._writing.fileno()
        # Within the kernel: a write to the map would stop at every page of it for the first time.
        while count and (got := _copy_range(old, new, count, source, target)):
            count, source, target = count - got, source + got, target + got
        if count:
            raise IncompatibleError(f"{self.path} was cut short while it was read")

    def abandon(self) -> None:
        self._new = None
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
        self._load()

    def commit(self) -> None:
        if self._new is None:
            return
        for tensor, lacking in enumerate(self._lacking):
            for piece in sorted(lacking):
                self._take_over(tensor, range(piece, piece + 1))
        if isinstance(self._new, np.memmap):
            self._new.flush()
        put_in_place(self._partial, self.path)
        self._new = None
        self._load()


def _copy_range(old: int, new: int, count: int, source: int, target: int) -> int:
    """Copy bytes from one open file to another, as many as the system does at once; return their number."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(old, new, count, source, target)
        except OSError:
            pass  # on some file systems
    return os.pwrite(new, os.pread(old, count, source), target)


def _metadata(step: int) -> dict[str, str]:
    """Return what a file says of itself; its length does not depend on the step."""
    return {"format": "pt", "step": f"{step:020d}"}


def _part(mapped: Octets, offset: int, span: BlockSpan) -> torch.Tensor:
    part = span.octets
    return torch.from_numpy(mapped[offset + part.start : offset + part.stop])
