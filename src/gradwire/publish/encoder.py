"""The encoder of one layout: what changed since the step before, or all, as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import numpy as np

from gradwire.errors import ExchangeError, IncompatibleError
from gradwire.publish.bases import CopiedBase, Run, SummedBase
from gradwire.publish.boxes import TensorPiece
from gradwire.publish.changes import encode_changes
from gradwire.publish.chunks import CHUNK_ELEMENTS, EncodedChunk, Read, in_parallel, sums_of, total_sums
from gradwire.publish.container import ANCHOR, CODED, LOSSY, NO_STEP, PATCH, ChunkRow, Octets, PatchHead, chunk_row
from gradwire.publish.layout import BlockSpan, Layout
from gradwire.publish.manifest import PublishedFile
from gradwire.publish.weights import Readable
from gradwire.publish.whole import encode_whole

KEPT_BYTES = 1 << 30
"""Bytes of weights up to which a coded anchor is kept until it is written. Chunks of longer ones are encoded twice: for
their digests, which the head of the file has, and when they are written."""


class FilePieces(Sequence[Octets | bytes]):
    """The bytes of a file in pieces, of which some are made when they are asked for.

    Args:
        pieces: Pieces, and functions that return one.
    """

    def __init__(self, pieces: Sequence[Octets | bytes | Callable[[], Octets]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, place: int) -> Octets | bytes: ...
    @overload
    def __getitem__(self, place: slice) -> FilePieces: ...
    def __getitem__(self, place: int | slice) -> Octets | bytes | FilePieces:
        if isinstance(place, slice):
            return FilePieces(self._pieces[place])
        piece = self._pieces[place]
        return piece() if callable(piece) else piece


File = tuple[PublishedFile, Sequence[Octets | bytes]]
"""A file's description, and its bytes in pieces."""

Chunk = tuple[Run, EncodedChunk, ChunkRow]
"""A run of blocks, what it is encoded as, and its row in the file's table."""


def _described(run: Run, chunk: EncodedChunk) -> Chunk:
    return run, chunk, chunk_row(*run, chunk.kind, chunk.pieces)


class Rounding(Protocol):
    """Encodes differences with an error, see :class:`gradwire.publish.lossy.LossyPatches`."""

    def breaks(self, layout: Layout) -> set[int]:
        """Return the tensors with which a run of blocks begins."""
        ...

    def reset(self) -> None:
        """Begin anew at weights that readers have without what came before."""
        ...

    def encode(
        self, layout: Layout, spans: Sequence[BlockSpan], base: Read, new: Read, run: bytes, step: int
    ) -> EncodedChunk | None:
        """Encode spans and write to the base what readers then hold."""
        ...


class StepEncoder:
    """Encodes steps of weights of one layout as patches and anchors.

    Args:
        layout: Layout of the weights.
        base: What is remembered of the step before; None for an encoder of anchors alone.
        run: Identity of the publisher's run, 16 bytes.
        threads: Threads that share the work.
        part: Number of the part that the layout is of; None: weights that are not sharded.
        rounding: Encodes the patches that need not be exact; None: all are exact.

    Attributes:
        run: Identity of the run.
        part: Number of the part.
        sums: Sum of words of each tensor, as readers hold it.
    """

    def __init__(
        self,
        layout: Layout,
        base: CopiedBase | SummedBase | None,
        run: bytes,
        threads: int,
        part: int | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.layout, self.run = layout, run
        self.sums: list[int] = []
        self._base, self._threads, self.part, self._rounding = base, threads, part, rounding
        breaks = rounding.breaks(layout) if rounding is not None else set[int]()
        if part is not None:
            # Readers fetch the chunks of the strips that they hold.
            groups = [TensorPiece.parse(entry.name).group for entry in layout.entries]
            breaks |= {number for number in range(1, len(groups)) if groups[number] != groups[number - 1]}
        self._runs = layout.chunks(CHUNK_ELEMENTS, breaks)

    @property
    def state(self) -> str:
        """Digest of the weights that readers hold, in hexadecimal digits."""
        return self.layout.state(self.sums).hex()

    def patch(self, step: int, base_step: int, weights: Readable, *, exact: bool = True) -> tuple[File, int]:
        """Encode what differs from the base, and make that the base which readers then hold.

        Returns:
            The file, and the number of changed elements.
        """
        layout, base, rounding = self.layout, self._base, self._rounding

        def encode(run: Run) -> list[tuple[Run, EncodedChunk]]:
            if isinstance(base, SummedBase):
                return base.changed(run, weights)
            spans, old = layout.spans(*run), self._copy.read
            if rounding is None or exact:
                chunk = encode_changes(spans, old, weights.read, advance=True)
            else:
                chunk = rounding.encode(layout, spans, old, weights.read, self.run, step)
            return [] if chunk is None else [(run, chunk)]

        encoded = [item for items in in_parallel(encode, self._runs, self._threads) for item in items]
        if rounding is not None and all(chunk.kind != LOSSY for _, chunk in encoded):
            # Readers can begin after any patch that is exact, and only its bytes tell them that it is.
            rounding.reset()
        found = in_parallel(lambda item: _described(*item), encoded, self._threads)
        before = layout.state(self.sums)
        self.sums = total_sums(self.sums, [chunk.sums for _, chunk, _ in found])
        pieces = [piece for _, chunk, _ in found for piece in chunk.pieces]
        return self._file(PATCH, step, base_step, before, found, pieces), sum(chunk.changed for _, chunk, _ in found)

    def fill(self, weights: Readable) -> None:
        """Make the weights the base."""
        base = self._base
        if self._rounding is not None:
            self._rounding.reset()

        def fill(run: Run) -> None:
            if isinstance(base, SummedBase):
                base.fill(run, weights)
            else:
                self._copy.fill(self.layout.spans(*run), weights)

        in_parallel(fill, self._runs, self._threads)

    def anchor(self, step: int, read: Read) -> File:
        """Encode the base, or weights where there is no copy of them.

        What is raw is the base's own memory. Of more weights than :data:`KEPT_BYTES`, all else is encoded a second
        time when it is written, so that it takes a chunk's memory a thread.

        Args:
            step: Step of the weights.
            read: Returns the weights' bytes, until the file has been written.
        """
        copied = isinstance(self._base, CopiedBase)
        source, large = self._copy.read if copied else read, self.layout.nbytes > KEPT_BYTES

        def encode(run: Run) -> tuple[Chunk, list[Octets | Callable[[], Octets]]]:
            found = _described(run, encode_whole(self.layout.spans(*run), source))
            _, chunk, row = found
            pieces: list[Octets | Callable[[], Octets]] = list(chunk.pieces)
            if large and (chunk.kind == CODED or not copied):
                chunk.pieces = []
                pieces = [lambda: self._again(row, source)]
            return found, pieces

        encoded = in_parallel(encode, self._runs, self._threads)
        found = [chunk for chunk, _ in encoded]
        self.sums = total_sums([0] * len(self.layout.entries), [chunk.sums for _, chunk, _ in found])
        pieces = [piece for _, parts in encoded for piece in parts]
        return self._file(ANCHOR, step, NO_STEP, bytes(16), found, pieces)

    def _again(self, row: ChunkRow, read: Read) -> Octets:
        """Return the bytes of a chunk that has been encoded before.

        Raises:
            ExchangeError: they are more or fewer by now.
        """
        chunk = encode_whole(self.layout.spans(row.first, row.blocks), read)
        octets = chunk.pieces[0] if len(chunk.pieces) == 1 else np.concatenate(chunk.pieces)
        if (chunk.kind, len(octets)) != (row.kind, row.nbytes):
            raise ExchangeError("the weights were changed while they were published: wait until publish has returned")
        return octets

    def resume(self, weights: Readable) -> str:
        """Make the weights the base, and return the digest of their state in hexadecimal digits."""
        self.fill(weights)
        self.sums = sums_of(self.layout, weights.read, self._threads)
        return self.state

    @property
    def _copy(self) -> CopiedBase:
        if not isinstance(self._base, CopiedBase):
            raise IncompatibleError("this encoder has no copy of the weights to compare with")
        return self._base

    def _file(
        self,
        kind: int,
        step: int,
        base_step: int,
        base_state: bytes,
        found: Sequence[Chunk],
        pieces: Sequence[Octets | Callable[[], Octets]],
    ) -> File:
        layout = self.layout
        head, first = PatchHead(
            kind, self.run, step, base_step, layout.digest, base_state, layout.state(self.sums),
            sum(chunk.announced for _, chunk, _ in found), tuple(self.sums), tuple(row for *_, row in found),
            layout.table if kind == ANCHOR else b"",
        ).pack()  # fmt: skip
        return PublishedFile.of(head, self.part), FilePieces([first, *pieces])
