"""Chunks with what changed since the step before: positions, and signed distances in units in the last place."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Kernels
from gradwire.kernels.entropy.base import CODER_IDS
from gradwire.kernels.patches.formats import CHECK, ROW, WRITE, WRITE_CHECKED
from gradwire.publish.chunks import EncodedChunk, Read, add_sum, codec_kernels
from gradwire.publish.container import CHANGES, Octets
from gradwire.publish.layout import BLOCK_ELEMENTS, BlockSpan
from gradwire.publish.whole import encode_whole

_CHANGES = struct.Struct("<IIIIQ")
_CODERS = {number: name for name, number in CODER_IDS.items()}
_SPARSE = 1 << 16
"""Changes up to which both entropy coders are tried."""


def encode_changes(spans: Sequence[BlockSpan], old: Read, new: Read, *, advance: bool = False) -> EncodedChunk | None:
    """Encode how spans differ from their base, or their bytes if these are fewer; None if nothing differs.

    Args:
        spans: Spans of the chunk.
        old: Returns the base of a span.
        new: Returns the bytes of a span.
        advance: Write the new bytes over the base.
    """
    kernels = codec_kernels()
    blocks, elements = sum(span.blocks for span in spans), sum(span.elements for span in spans)
    nbytes = sum(span.elements * span.kind.width for span in spans)
    # Only what is written takes memory: the operating system gives a page when it is used first.
    rows = torch.empty(blocks, ROW, dtype=torch.int64, device="cpu")
    symbols = torch.empty(elements, dtype=torch.uint8, device="cpu")
    positions = torch.empty(elements // 8 + blocks + 8, dtype=torch.uint8, device="cpu")
    extra = torch.empty(nbytes + 32, dtype=torch.uint8, device="cpu")
    cursor, sums, at = torch.zeros(5, dtype=torch.int64, device="cpu"), dict[int, int](), 0
    kept = list[torch.Tensor]()
    for span in spans:
        fresh = new(span)
        cursor[3] = 0
        kernels.find_changes(
            old(span), fresh, span.kind.width, span.kind.floating, BLOCK_ELEMENTS, span.first_word,
            rows[at : at + span.blocks], positions, symbols, extra, cursor, advance,
        )  # fmt: skip
        at += span.blocks
        add_sum(sums, span.tensor, int(cursor[3]))
        # Others may write to the weights meanwhile: the base has what was compared.
        kept.append(old(span) if advance else fresh)
    changed, position_bytes, extra_bits = cursor.tolist()[:3]
    if not changed:
        return None
    coded = _smallest(kernels, symbols[:changed])
    table = _pack_rows(rows)
    head = _CHANGES.pack(changed, len(table), position_bytes, len(coded), extra_bits)
    first = np.frombuffer(bytearray(head + table), np.uint8)
    pieces = [first, positions.numpy()[:position_bytes], coded, extra.numpy()[: -(-extra_bits // 8)]]
    size = sum(map(len, pieces))
    if 2 * size >= nbytes:
        # So many changes that all bytes, coded, may be shorter.
        whole = encode_whole(spans, dict(zip(spans, kept)).__getitem__)
        if sum(map(len, whole.pieces)) <= size:
            return EncodedChunk(whole.kind, [piece.copy() for piece in whole.pieces], elements, changed, sums)
    # The arrays have room for any changes: what is kept until it is sent is copied out of them.
    return EncodedChunk(CHANGES, [piece.copy() for piece in pieces], elements, changed, sums)


def _smallest(kernels: Kernels, symbols: torch.Tensor) -> Octets:
    """Return the entropy-coded section of symbols: rANS, and Huffman if its smaller tables may pay."""
    best: Octets | None = None
    for name in CODER_IDS if symbols.numel() <= _SPARSE else ("rans",):
        coder = kernels.coder(name)
        out = torch.empty(coder.bound(symbols.numel()), dtype=torch.uint8, device="cpu")
        size = coder.encode(symbols, out)
        if best is None or size < len(best):
            best = out.numpy()[:size]
    if best is None:
        raise PayloadError("no entropy coder is known")
    return best


_ROW_BYTES = 5
_ROW_BITS = (7, 18, 15)
"""Bytes of a row of a block, and the bits of its form, of its changes and of the bytes of its positions."""


def _pack_rows(rows: torch.Tensor) -> bytes:
    """Write the rows of blocks, 5 bytes each."""
    form, changes, size = rows.numpy().astype("<u8").T
    words = form | changes << np.uint64(_ROW_BITS[0]) | size << np.uint64(sum(_ROW_BITS[:2]))
    return bytes(words.view(np.uint8).reshape(-1, 8)[:, :_ROW_BYTES].tobytes())


def _unpack_rows(data: Octets, blocks: int) -> torch.Tensor:
    if len(data) != _ROW_BYTES * blocks:
        raise PayloadError(f"the rows of its {blocks} blocks have {len(data)} bytes, and not {_ROW_BYTES * blocks}")
    octets = np.zeros((blocks, 8), np.uint8)
    octets[:, :_ROW_BYTES] = data.reshape(blocks, _ROW_BYTES)
    words, rows, at = octets.view("<u8")[:, 0].astype(np.int64), np.empty((blocks, ROW), np.int64), 0
    for column, bits in enumerate(_ROW_BITS):
        rows[:, column] = words >> at & (1 << bits) - 1
        at += bits
    return torch.from_numpy(rows)


class ChangedChunk:
    """A chunk of changes, read and checked as far as that is possible without its base.

    Args:
        spans: Spans of the chunk.
        body: Bytes of the chunk, whose digest has been compared.

    Attributes:
        changed: Number of elements that differ from the base.
        light: Whether this object takes little memory beside its spans and body, so that it can be kept.

    Raises:
        PayloadError: the bytes are not those of such a chunk.
    """

    def __init__(self, spans: Sequence[BlockSpan], body: Octets) -> None:
        self._spans = spans
        elements = sum(span.elements for span in spans)
        if len(body) < _CHANGES.size:
            raise PayloadError("it ends within its head")
        self.changed, *sizes = _CHANGES.unpack(body[: _CHANGES.size].tobytes())
        sizes[3] = -(-sizes[3] // 8)
        ends = [_CHANGES.size + sum(sizes[: i + 1]) for i in range(4)]
        if ends[-1] != len(body) or not 0 < self.changed <= elements:
            raise PayloadError(f"it announces {self.changed} changes in {ends[-1]} bytes, and has {len(body)}")
        table, positions, coded, extra = (body[a:b] for a, b in zip([_CHANGES.size, *ends], ends))
        self._rows = _unpack_rows(table, sum(span.blocks for span in spans))
        if int(self._rows[:, 1].sum()) != self.changed:
            raise PayloadError("the changes of its blocks are more or fewer than it announces")
        self._symbols = torch.empty(self.changed, dtype=torch.uint8, device="cpu")
        self.light = 8 * self.changed <= elements
        if not len(coded) or int(coded[0]) not in _CODERS:
            raise PayloadError("its symbols are coded by an unknown coder")
        codec_kernels().coder(_CODERS[int(coded[0])]).decode(torch.from_numpy(coded), self._symbols)
        self._positions, self._extra = torch.from_numpy(positions), torch.from_numpy(extra)
        self._bits = _CHANGES.unpack(body[: _CHANGES.size].tobytes())[4]

    def check(self, base: Read) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return by tensor the sum of words of the base, and what the chunk adds to it; write nothing.

        Raises:
            PayloadError: the changes are not those of such a base.
        """
        before, change = dict[int, int](), dict[int, int]()
        for span, cursor in self._walk(base, CHECK):
            add_sum(change, span.tensor, int(cursor[3]))
            add_sum(before, span.tensor, int(cursor[4]))
        return before, change

    def replace(self, target: Read) -> Mapping[int, int]:
        """Write the chunk into the bytes of its spans, without a :meth:`check` before.

        Returns:
            What the chunk adds to the sum of words of each tensor, by number of the tensor.

        Raises:
            PayloadError: the changes do not fit these bytes, some of which may have been overwritten.
        """
        change = dict[int, int]()
        for span, cursor in self._walk(target, WRITE_CHECKED):
            add_sum(change, span.tensor, int(cursor[3]))
        return change

    def write(self, target: Read) -> None:
        """Write the chunk into the bytes of its spans, which have been checked."""
        self._walk(target, WRITE)

    def _walk(self, base: Read, mode: int) -> list[tuple[BlockSpan, torch.Tensor]]:
        kernels, cursor, at = codec_kernels(), torch.zeros(5, dtype=torch.int64, device="cpu"), 0
        found = []
        for span in self._spans:
            cursor[3:] = 0
            kernels.apply_changes(
                base(span), span.kind.width, span.kind.floating, BLOCK_ELEMENTS, span.first_word,
                self._rows[at : at + span.blocks], self._positions, self._symbols, self._extra, cursor, mode,
            )  # fmt: skip
            at += span.blocks
            found.append((span, cursor.clone()))
        used = cursor.tolist()[:3]
        if used != [self.changed, len(self._positions), self._bits]:
            raise PayloadError("it has bytes that its changes do not use")
        return found
