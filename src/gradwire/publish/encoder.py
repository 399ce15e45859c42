"""The encoder of one layout: what changed since the step before, or all, as files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwire.errors import IncompatibleError
from gradwire.publish.bases import CopiedBase, Run, SummedBase
from gradwire.publish.boxes import TensorPiece
from gradwire.publish.codec import (
    CHUNK_ELEMENTS,
    EncodedChunk,
    Read,
    encode_changes,
    encode_whole,
    in_parallel,
    sums_of,
    total_sums,
)
from gradwire.publish.container import ANCHOR, NO_STEP, PATCH, ChunkRow, Octets, PatchHead, chunk_row
from gradwire.publish.layout import BlockSpan, Layout
from gradwire.publish.manifest import PublishedFile
from gradwire.publish.weights import Readable

File = tuple[PublishedFile, list[Octets | bytes]]
"""A file's description, and its bytes in pieces."""


class Rounding(Protocol):
    """Encodes differences with an error, see :class:`gradwire.publish.lossy.LossyPatches`."""

    def breaks(self, layout: Layout) -> set[int]:
        """Return the tensors with which a run of blocks begins."""
        ...

    def encode(self, spans: Sequence[BlockSpan], base: Read, new: Read, run: bytes, step: int) -> EncodedChunk | None:
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
                chunk = rounding.encode(spans, old, weights.read, self.run, step)
            return [] if chunk is None else [(run, chunk)]

        found = [item for items in in_parallel(encode, self._runs, self._threads) for item in items]
        before = layout.state(self.sums)
        self.sums = total_sums(self.sums, [chunk.sums for _, chunk in found])
        return self._file(PATCH, step, base_step, before, found), sum(chunk.changed for _, chunk in found)

    def fill(self, weights: Readable) -> None:
        """Make the weights the base."""
        base = self._base

        def fill(run: Run) -> None:
            if isinstance(base, SummedBase):
                base.fill(run, weights)
            else:
                self._copy.fill(self.layout.spans(*run), weights)

        in_parallel(fill, self._runs, self._threads)

    def anchor(self, step: int, read: Read) -> File:
        """Encode the base, or weights where there is no copy of them; pieces are their memory.

        Args:
            step: Step of the weights.
            read: Returns the weights' bytes.
        """
        source = self._base.read if isinstance(self._base, CopiedBase) else read

        def encode(run: Run) -> tuple[Run, EncodedChunk]:
            return run, encode_whole(self.layout.spans(*run), source)

        found = in_parallel(encode, self._runs, self._threads)
        self.sums = total_sums([0] * len(self.layout.entries), [chunk.sums for _, chunk in found])
        return self._file(ANCHOR, step, NO_STEP, bytes(16), found)

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
        self, kind: int, step: int, base_step: int, base_state: bytes, found: Sequence[tuple[Run, EncodedChunk]]
    ) -> File:
        layout = self.layout

        def describe(item: tuple[Run, EncodedChunk]) -> ChunkRow:
            return chunk_row(*item[0], item[1].kind, item[1].pieces)

        head, first = PatchHead(
            kind, self.run, step, base_step, layout.digest, base_state, layout.state(self.sums),
            sum(chunk.announced for _, chunk in found), tuple(self.sums),
            tuple(in_parallel(describe, found, self._threads)), layout.table if kind == ANCHOR else b"",
        ).pack()  # fmt: skip
        return PublishedFile.of(head, self.part), [first, *(piece for _, chunk in found for piece in chunk.pieces)]
