"""Fetching files of weights: whole, or the head and the chunks that a reader of some tensors needs."""

from __future__ import annotations

import struct

import numpy as np

from gradwire.errors import PayloadError
from gradwire.publish.container import ANCHOR, HEAD_BYTES, Octets, PatchHead, anchor_layout, read_head
from gradwire.publish.held import HeldWeights
from gradwire.publish.manifest import PublishedFile
from gradwire.publish.stores import Place

_FIRST_BYTES = 1 << 16
"""Bytes of a file that are read first: they hold the head of most patches."""

_GAP_BYTES = 1 << 16
"""Unwanted bytes between two chunks that are read rather than asked for twice."""

_MOST_BYTES = 1 << 46


def fetch(place: Place, file: PublishedFile, held: HeldWeights) -> tuple[PatchHead, Octets, int]:
    """Fetch a file that a manifest lists, or what of it changes tensors at hand.

    Returns:
        The head, the file, in which what was not fetched is zero, and the number of bytes that were fetched.

    Raises:
        PayloadError: it is not the file that the manifest lists.
        FileNotFoundError: it is not there.
    """
    if held.selected is None or not hasattr(place, "read_range"):
        data = place.read(file.name, file.nbytes)
        head = _listed(file, data)
        if held.selected is None:
            return head, data, head.nbytes
        # Of a mapped file no more is read than is looked at.
        return head, data, head.body_at + sum(head.chunks[n].nbytes for n in _wanted(head, held))
    ranged = _Ranged(place, file)
    head = _listed(file, ranged.with_tables())
    places = head.places()
    begin = end = 0
    for number in _wanted(head, held):
        if places[number].start > end + _GAP_BYTES:
            ranged.read(begin, end)
            begin = places[number].start
        end = places[number].stop
    ranged.read(begin, end)
    return head, ranged.data, ranged.fetched


def fetch_head(place: Place, file: PublishedFile) -> PatchHead:
    """Fetch the head of a file that a manifest lists.

    Raises:
        PayloadError: it is not the file that the manifest lists.
        FileNotFoundError: it is not there.
    """
    if not hasattr(place, "read_range"):
        return _listed(file, place.read(file.name, file.nbytes))
    return _listed(file, _Ranged(place, file).with_tables())


def _wanted(head: PatchHead, held: HeldWeights) -> list[int]:
    layout = anchor_layout(head) if head.kind == ANCHOR else held.layout
    if layout is None:
        raise PayloadError(f"{head.name}: these weights are of no known step; an anchor comes first")
    return held.wanted(head, layout)


def _listed(file: PublishedFile, data: Octets) -> PatchHead:
    """Return the head of a file whose head and tables are there; refuse one that the manifest does not list."""
    try:
        head = read_head(data)
    except PayloadError as error:
        raise PayloadError(f"{file.name}: {error}") from error
    if head.digest.hex() != file.digest:
        raise PayloadError(
            f"{file.name} is the {head.name} of run {head.run.hex()[:8]}, not the file that the manifest lists: "
            "it was replaced, or is of another run"
        )
    return head


class _Ranged:
    """A file of which ranges are read into an array as long as the file; the rest of it takes no memory."""

    def __init__(self, place: Place, file: PublishedFile) -> None:
        if file.nbytes > _MOST_BYTES:
            raise PayloadError(f"{file.name} has {file.nbytes} bytes: the manifest was damaged")
        self._place, self._file = place, file
        try:
            self.data: Octets = np.zeros(file.nbytes, np.uint8)
        except MemoryError as error:
            raise PayloadError(f"{file.name} has {file.nbytes} bytes, more than there is memory") from error
        self.fetched = 0

    def read(self, begin: int, end: int) -> None:
        """Read a range."""
        end = min(end, len(self.data))
        if begin >= end:
            return
        part = self._place.read_range(self._file.name, begin, end)  # type: ignore[attr-defined]
        if len(part) != end - begin:
            raise PayloadError(f"{self._file.name} was truncated: it ends before byte {end}")
        self.data[begin:end] = part
        self.fetched += len(part)

    def with_tables(self) -> Octets:
        """Read the head and the tables, and return the array, in which what was not read is zero."""
        self.read(0, _FIRST_BYTES)
        if len(self.data) >= HEAD_BYTES:
            tensors, chunks, _, table = struct.unpack_from("<4I", self.data[96:112].tobytes())
            self.read(_FIRST_BYTES, HEAD_BYTES + table + 8 * tensors + 40 * chunks)
        return self.data
