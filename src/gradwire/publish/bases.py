"""What a publisher remembers of the weights that it published last."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from gradwire.errors import HyperparameterError
from gradwire.publish.chunks import EncodedChunk, codec_kernels
from gradwire.publish.container import RAW
from gradwire.publish.disk import open_on_room
from gradwire.publish.layout import BlockSpan, Layout
from gradwire.publish.weights import Readable
from gradwire.publish.whole import encode_whole

Run = tuple[int, int]
"""First block of a run of blocks, and their number."""


class CopiedBase:
    """A copy of the weights, in memory or in a mapped file.

    Args:
        layout: Layout of the weights.
        file: File that holds the copy; None: memory.
    """

    def __init__(self, layout: Layout, file: Path | None) -> None:
        starts, at = [], 0
        for entry in layout.entries:
            starts.append(at)
            at += -(-entry.nbytes // 64) * 64
        if file is None:
            # NumPy asks for large pages, which are compared faster.
            self._octets = torch.from_numpy(np.empty(at, np.uint8))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open_on_room(file, max(at, 1)) as stream:
                self._octets = torch.from_numpy(np.memmap(stream, np.uint8, "r+"))
        self._starts = starts

    def read(self, span: BlockSpan) -> torch.Tensor:
        """Return the bytes of a span; what is written to them becomes the base."""
        start, part = self._starts[span.tensor], span.octets
        return self._octets[start + part.start : start + part.stop]

    def fill(self, spans: Iterable[BlockSpan], weights: Readable) -> None:
        """Copy spans of weights."""
        for span in spans:
            self.read(span).copy_(weights.read(span))


class SummedBase:
    """The sum of words of each block: 8 bytes for 2^17 elements. Blocks that changed are sent whole.

    Args:
        layout: Layout of the weights.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums = np.zeros(layout.blocks, np.uint64)

    def _blocks(self, run: Run) -> Iterable[tuple[int, BlockSpan]]:
        for block in range(run[0], run[0] + run[1]):
            yield block, self._layout.spans(block, 1)[0]

    def fill(self, run: Run, weights: Readable) -> None:
        """Sum up a run of blocks."""
        kernels = codec_kernels()
        for block, span in self._blocks(run):
            self._sums[block] = kernels.word_sum(weights.read(span), span.first_word)

    def changed(self, run: Run, weights: Readable) -> list[tuple[Run, EncodedChunk]]:
        """Return the blocks of a run that changed, neighbours together, and remember their sums."""
        kernels, groups = codec_kernels(), list[tuple[Run, list[torch.Tensor], dict[int, int]]]()
        for block, span in self._blocks(run):
            octets = weights.read(span)
            total, before = kernels.word_sum(octets, span.first_word), int(self._sums[block])
            if total == before:
                continue
            self._sums[block] = total
            if not groups or sum(groups[-1][0]) != block:
                groups.append(((block, 0), [], {}))
            (first, count), parts, sums = groups.pop()
            sums[span.tensor] = (sums.get(span.tensor, 0) + total - before) % 2**64
            groups.append(((first, count + 1), [*parts, octets], sums))
        return [(where, self._chunk(where, parts, sums)) for where, parts, sums in groups]

    def _chunk(self, run: Run, parts: list[torch.Tensor], sums: dict[int, int]) -> EncodedChunk:
        """Encode the bytes of a run of blocks, as they were read, one part a block."""
        left = iter(parts)

        def joined(span: BlockSpan) -> torch.Tensor:
            blocks = [next(left) for _ in range(span.blocks)]
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

        chunk = encode_whole(self._layout.spans(*run), joined)
        if chunk.kind == RAW:
            # A patch may wait for the next step to be written, and the pieces may be the weights' own memory.
            chunk.pieces = [piece.copy() for piece in chunk.pieces]
        chunk.sums = sums
        return chunk


def open_base(base: str | os.PathLike[str], layout: Layout) -> CopiedBase | SummedBase:
    """Return the base that a publisher asks for by "memory", "sums" or a path.

    Raises:
        HyperparameterError: it is a word that is neither.
    """
    if base == "memory":
        return CopiedBase(layout, None)
    if base == "sums":
        return SummedBase(layout)
    if isinstance(base, str) and os.sep not in base and "." not in base:
        raise HyperparameterError(f'base={base!r}: it is "memory", "sums" or the path of a file, such as ./{base}')
    return CopiedBase(layout, Path(base))
