"""Chunks with all bytes of their blocks: as they are, or coded without loss where that takes fewer bytes.

Weights of trained and of fresh models are numbers whose exponents take few values: bfloat16 takes about 10.6 of its 16
bits. Each tensor of a chunk is cut into pieces of a mebibyte, coded each by itself, so that they stay in the caches
while they are decoded, straight into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.kernels.pieces import PIECE_BYTES, bound, decode_into, encode_into
from gradwire.publish.chunks import EncodedChunk, Read, add_sum, codec_kernels
from gradwire.publish.container import CODED, RAW, Octets
from gradwire.publish.layout import BlockSpan

_LENGTH = np.dtype("<u4")


def _pieces_of(span: BlockSpan) -> int:
    return -(-span.elements * span.kind.width // PIECE_BYTES)


def encode_whole(spans: Sequence[BlockSpan], new: Read) -> EncodedChunk:
    """Encode the bytes of spans.

    Args:
        spans: Spans of the chunk.
        new: Returns the bytes of a span.

    Returns:
        A chunk of kind ``CODED``, or ``RAW`` if that is not longer, whose pieces are then the memory that ``new``
        returned.
    """
    elements = sum(span.elements for span in spans)
    kernels, octets, sums = codec_kernels(), [new(span) for span in spans], dict[int, int]()
    for span, part in zip(spans, octets):
        add_sum(sums, span.tensor, kernels.word_sum(part, span.first_word))
    coded = _encode(spans, [part.numpy() for part in octets])
    kind, pieces = (RAW, [part.numpy() for part in octets]) if coded is None else (CODED, [coded])
    return EncodedChunk(kind, pieces, elements, elements, sums)


def _encode(spans: Sequence[BlockSpan], octets: Sequence[Octets]) -> Octets | None:
    """Return the coded bytes of spans; None if they are not fewer."""
    nbytes = sum(map(len, octets))
    lengths = np.zeros(sum(map(_pieces_of, spans)), _LENGTH)
    # Only what is written takes memory: the operating system gives a page when it is used first.
    room = lengths.nbytes + nbytes + len(lengths) + bound(PIECE_BYTES, 8)
    out, at, number = np.empty(room, np.uint8), lengths.nbytes, 0
    for span, part in zip(spans, octets):
        for begin in range(0, len(part), PIECE_BYTES):
            piece = part[begin : begin + PIECE_BYTES]
            lengths[number] = encode_into(piece, span.kind.width, span.kind.floating, out[at:])
            at += int(lengths[number])
            number += 1
    out[: lengths.nbytes] = lengths.view(np.uint8)
    return out[:at].copy() if at < nbytes else None


class WholeChunk:
    """A chunk with all bytes of its blocks.

    Args:
        kind: ``RAW`` or ``CODED``.
        spans: Spans of the chunk.
        body: Bytes of the chunk, whose digest has been compared.

    Attributes:
        changed: Number of elements of its blocks.
        light: Whether this object takes little memory beside its spans and body.

    Raises:
        PayloadError: the bytes are not those of such a chunk.
    """

    light = True

    def __init__(self, kind: int, spans: Sequence[BlockSpan], body: Octets) -> None:
        self._coded, self._spans, self._body = kind == CODED, spans, body
        self.changed = sum(span.elements for span in spans)
        self._lengths: list[int] = []
        if not self._coded:
            expected = sum(span.elements * span.kind.width for span in spans)
            if len(body) != expected:
                raise PayloadError(f"it has {len(body)} bytes where its blocks have {expected}")
            return
        index = _LENGTH.itemsize * sum(map(_pieces_of, spans))
        if len(body) < index:
            raise PayloadError(f"it ends within the lengths of its pieces, which take {index} bytes")
        self._lengths = body[:index].copy().view(_LENGTH).tolist()
        if index + sum(self._lengths) != len(body):
            raise PayloadError(f"its pieces have {sum(self._lengths)} bytes, and it has room for {len(body) - index}")

    def _parts(self) -> Iterator[tuple[BlockSpan, int, int, Octets]]:
        """Yield the spans, and of each piece its first byte in the span, its bytes, and what it is made of."""
        at, number = _LENGTH.itemsize * len(self._lengths), 0
        for span in self._spans:
            size = span.elements * span.kind.width
            for begin in range(0, size, PIECE_BYTES if self._coded else max(size, 1)):
                nbytes = min(PIECE_BYTES, size - begin) if self._coded else size
                length = self._lengths[number] if self._coded else nbytes
                yield span, begin, nbytes, self._body[at : at + length]
                at, number = at + length, number + 1

    def _open(self, span: BlockSpan, data: Octets, out: Octets) -> None:
        """Write the bytes of a piece."""
        if self._coded:
            decode_into(data, out, span.kind.width, span.kind.floating)
        else:
            out[:] = data

    def sums(self) -> Mapping[int, int]:
        """Return by tensor the sum of words of the chunk.

        Raises:
            PayloadError: the bytes cannot be decoded.
        """
        kernels, found, room = codec_kernels(), dict[int, int](), np.empty(PIECE_BYTES, np.uint8)
        for span, begin, nbytes, data in self._parts():
            octets = data
            if self._coded:
                octets = room[:nbytes]
                self._open(span, data, octets)
            add_sum(found, span.tensor, kernels.word_sum(torch.from_numpy(octets), span.first_word + begin // 8))
        return found

    def check(self, base: Read) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return by tensor the sum of words of the base, and what the chunk adds to it; write nothing.

        Raises:
            PayloadError: the bytes cannot be decoded.
        """
        kernels, before, change = codec_kernels(), dict[int, int](), dict(self.sums())
        for span in self._spans:
            held = kernels.word_sum(base(span), span.first_word)
            add_sum(before, span.tensor, held)
            add_sum(change, span.tensor, -held)
        return before, change

    def replace(self, target: Read) -> Mapping[int, int]:
        """Write the chunk into the bytes of its spans; return by tensor what it adds to the sum of words.

        Raises:
            PayloadError: the bytes cannot be decoded; a part of them has been written.
        """
        kernels, change = codec_kernels(), dict[int, int]()
        for span in self._spans:
            add_sum(change, span.tensor, -kernels.word_sum(target(span), span.first_word))
        for tensor, value in self.fill(target).items():
            add_sum(change, tensor, value)
        return change

    def fill(self, target: Read) -> Mapping[int, int]:
        """Write the chunk into the bytes of its spans; return by tensor the sum of words of what was written.

        Raises:
            PayloadError: the bytes cannot be decoded; a part of them has been written.
        """
        kernels, found = codec_kernels(), dict[int, int]()
        for span, begin, out, data in self._targets(target):
            self._open(span, data, out.numpy())
            add_sum(found, span.tensor, kernels.word_sum(out, span.first_word + begin // 8))
        return found

    def write(self, target: Read) -> None:
        """Write the chunk into the bytes of its spans, which have been checked."""
        for span, _, out, data in self._targets(target):
            self._open(span, data, out.numpy())

    def _targets(self, target: Read) -> Iterator[tuple[BlockSpan, int, torch.Tensor, Octets]]:
        """Yield the spans, and of each piece its first byte in the span, the memory to write to, and its bytes."""
        latest, octets = None, torch.empty(0, dtype=torch.uint8, device="cpu")
        for span, begin, nbytes, data in self._parts():
            if span is not latest:
                latest, octets = span, target(span)
            yield span, begin, octets[begin : begin + nbytes], data
