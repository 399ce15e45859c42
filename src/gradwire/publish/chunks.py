"""Chunks: runs of blocks of all tensors, each coded by itself, so that threads can share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch

from gradwire.kernels import Kernels, get_kernels
from gradwire.kernels.entropy.base import CODER_IDS
from gradwire.publish.container import CODED, RAW, Octets
from gradwire.publish.layout import BlockSpan, Layout

CHUNK_ELEMENTS = 1 << 25
"""Elements of a chunk, at most: its entropy-coded section takes 0.6 KB beside the symbols."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Read = Callable[[BlockSpan], torch.Tensor]
"""Returns the bytes of a span, uint8, contiguous and in CPU memory."""


@cache
def codec_kernels() -> Kernels:
    """Return the kernels that chunks are coded by, compiled."""
    kernels = get_kernels("auto")
    kernels.warm_up(("patches", "indices", "planes", *CODER_IDS))
    return kernels


@dataclass
class EncodedChunk:
    """An encoded chunk.

    Attributes:
        kind: Kind of the chunk.
        pieces: Its bytes, in parts.
        elements: Number of elements of its blocks.
        changed: Number of elements that differ from the base, as far as that is known, else of all.
        sums: By tensor, the sum of words that the chunk adds to the tensor's: for changes, the difference.
    """

    kind: int
    pieces: list[Octets]
    elements: int
    changed: int
    sums: dict[int, int] = field(default_factory=dict)

    @property
    def announced(self) -> int:
        """Number of elements that the file says the chunk changes."""
        return self.elements if self.kind in (RAW, CODED) else self.changed


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """Return the results of ``work`` on each item, in order, computed by some threads.

    On a GPU they work on the caller's streams, so that they read what the caller's step has written.
    """
    if threads < 2 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), "gradwire-publish", _work_on, (_streams(),)) as pool:
        return list(pool.map(work, items))


def _streams() -> list[torch.cuda.Stream]:
    """Return this thread's current streams of GPUs, without the default ones, on which every thread begins."""
    if not torch.cuda.is_initialized():
        return []
    devices = range(torch.cuda.device_count())
    pairs = [(torch.cuda.current_stream(number), torch.cuda.default_stream(number)) for number in devices]
    return [current for current, default in pairs if current != default]


def _work_on(streams: Iterable[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.set_stream(stream)


def add_sum(sums: dict[int, int], tensor: int, value: int) -> None:
    """Add to the sum of words of a tensor."""
    sums[tensor] = (sums.get(tensor, 0) + value) % 2**64


def total_sums(start: Sequence[int], parts: Iterable[Mapping[int, int]]) -> list[int]:
    """Return the sums of tensors after parts, by tensor, have been added to them."""
    total = list(start)
    for part in parts:
        for tensor, value in part.items():
            total[tensor] = (total[tensor] + value) % 2**64
    return total


def sums_of(layout: Layout, read: Read, threads: int, runs: Sequence[tuple[int, int]] | None = None) -> list[int]:
    """Return the sums of words of all tensors, or of runs of blocks of them."""

    def part(run: tuple[int, int]) -> dict[int, int]:
        kernels, found = codec_kernels(), dict[int, int]()
        for span in layout.spans(*run):
            add_sum(found, span.tensor, kernels.word_sum(read(span), span.first_word))
        return found

    chosen = layout.chunks(CHUNK_ELEMENTS) if runs is None else runs
    return total_sums([0] * len(layout.entries), in_parallel(part, chosen, threads))
