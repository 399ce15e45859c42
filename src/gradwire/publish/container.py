"""The file of an anchor or patch: head, sums of tensors, table of chunks, chunks.

``docs/patch-format.md`` is normative. A head is read and checked before any memory is taken for what it announces.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gradwire.errors import PayloadError
from gradwire.publish.layout import BLOCK_ELEMENTS, DIGEST_BYTES, MAX_LAYOUT_BYTES, Layout

Octets = npt.NDArray[np.uint8]

MAGIC, VERSION = b"GWWP", 3
_BEFORE = 2
"""The version before, which is read: it lacks coded chunks."""

ANCHOR, PATCH = 0, 1
RAW, CHANGES, LOSSY, CODED = 0, 1, 2, 3
"""Kinds of chunks: bytes as they are, changes of the base, differences rounded by a method, and bytes coded without
loss."""

HEAD_BYTES, CHUNK_BYTES = 144, 40
NO_STEP = -1
_HEAD = struct.Struct("<4sHBBQ16sqq16s16s16sIIIIQ8s")
_CHUNK = struct.Struct("<IIB7sQ16s")
_MAX_TENSORS = 1 << 22
_UNKNOWN = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class ChunkRow:
    """A chunk: its run of blocks, its kind, its bytes and their BLAKE2b digest."""

    first: int
    blocks: int
    kind: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True)
class PatchHead:
    """What a file says of itself.

    Attributes:
        kind: ``ANCHOR`` or ``PATCH``.
        run: Identity of the publisher's run, 16 bytes.
        step: Step of the weights.
        base_step: Step of the weights that a patch starts from; -1 in an anchor.
        layout: Digest of the layout.
        base_state: Digest of the weights that a patch starts from; zeros in an anchor.
        state: Digest of the weights.
        changed: Number of elements that differ from the base; of an anchor, all.
        sums: Sum of words of each tensor.
        chunks: Chunks, in ascending order of their blocks.
        table: The layout in an anchor, nothing in a patch.
        nbytes: Bytes of the file.
        digest: Digest of head and tables, which have the digests of all chunks.
    """

    kind: int
    run: bytes
    step: int
    base_step: int
    layout: bytes
    base_state: bytes
    state: bytes
    changed: int
    sums: tuple[int, ...]
    chunks: tuple[ChunkRow, ...]
    table: bytes = b""
    nbytes: int = 0
    digest: bytes = field(default=_UNKNOWN)

    @property
    def name(self) -> str:
        """Describe the file in an error message."""
        if self.kind == ANCHOR:
            return f"anchor of step {self.step}"
        return f"patch from step {self.base_step} to step {self.step}"

    @property
    def body_at(self) -> int:
        """Byte at which the first chunk begins."""
        return HEAD_BYTES + len(self.table) + 8 * len(self.sums) + CHUNK_BYTES * len(self.chunks)

    def places(self) -> list[slice]:
        """Return the bytes of each chunk in the file."""
        places, at = [], self.body_at
        for chunk in self.chunks:
            places.append(slice(at, at + chunk.nbytes))
            at += chunk.nbytes
        return places

    def pack(self) -> tuple[PatchHead, bytes]:
        """Return the head with its length and digest, and the bytes before the first chunk."""
        nbytes = self.body_at + sum(chunk.nbytes for chunk in self.chunks)
        fixed = _HEAD.pack(
            MAGIC, VERSION, self.kind, 0, nbytes, self.run, self.step, self.base_step, self.layout, self.base_state,
            self.state, len(self.sums), len(self.chunks), BLOCK_ELEMENTS, len(self.table), self.changed, bytes(8),
        )  # fmt: skip
        rows = [_CHUNK.pack(c.first, c.blocks, c.kind, bytes(7), c.nbytes, c.digest) for c in self.chunks]
        tables = self.table + struct.pack(f"<{len(self.sums)}Q", *self.sums) + b"".join(rows)
        digest = digest_of(fixed, tables)
        return replace(self, nbytes=nbytes, digest=digest), fixed + digest + tables


def view_of(piece: Octets | bytes) -> memoryview:
    """View the memory of a piece of a file."""
    return memoryview(piece) if isinstance(piece, bytes) else piece.data


def digest_of(*parts: bytes | memoryview) -> bytes:
    """Return the BLAKE2b digest of parts, 16 bytes."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def chunk_row(first: int, blocks: int, kind: int, pieces: Sequence[Octets]) -> ChunkRow:
    """Return the row of a chunk that consists of pieces."""
    digest = digest_of(*(piece.data for piece in pieces))
    return ChunkRow(first, blocks, kind, sum(len(piece) for piece in pieces), digest)


def read_head(data: Octets) -> PatchHead:
    """Read and check everything before the first chunk; ``data`` is the whole file.

    Raises:
        PayloadError: it is not the file of an anchor or patch, or is damaged or truncated.
    """
    if len(data) < HEAD_BYTES:
        raise PayloadError(f"{len(data)} bytes are not a file of weights: its head has {HEAD_BYTES}")
    fixed = data[: _HEAD.size].tobytes()
    (
        magic, version, kind, zero, nbytes, run, step, base_step, layout, base_state, state, tensors, chunks, block,
        table_bytes, changed, zeros,
    ) = _HEAD.unpack(fixed)  # fmt: skip
    if magic != MAGIC:
        raise PayloadError(f"the file starts with {magic!r}: it is not an anchor or patch of weights")
    if version not in (_BEFORE, VERSION):
        raise PayloadError(
            f"the file has format version {version}, this gradwire reads {_BEFORE} and {VERSION}: update the older side"
        )
    if kind not in (ANCHOR, PATCH) or zero or any(zeros) or block != BLOCK_ELEMENTS:
        raise PayloadError(
            "the file's head is damaged: it has a kind, a block size or padding that no publisher writes"
        )
    if nbytes != len(data):
        raise PayloadError(f"the file was truncated or extended: it announces {nbytes} bytes and has {len(data)}")
    if tensors > _MAX_TENSORS or table_bytes > MAX_LAYOUT_BYTES or step < 0:
        raise PayloadError(f"the file announces {tensors} tensors and a layout of {table_bytes} bytes at step {step}")
    anchored = kind == ANCHOR
    fitting = base_step == NO_STEP and base_state == _UNKNOWN if anchored else 0 <= base_step < step and not table_bytes
    body_at = HEAD_BYTES + table_bytes + 8 * tensors + CHUNK_BYTES * chunks
    if not fitting or body_at > nbytes:
        raise PayloadError("the file's head is damaged: its steps or lengths do not fit together")
    tables = data[HEAD_BYTES:body_at].tobytes()
    found = data[_HEAD.size : HEAD_BYTES].tobytes()
    if digest_of(fixed, tables) != found:
        raise PayloadError("the file's head or tables were damaged: their digest differs")
    table, rest = tables[:table_bytes], tables[table_bytes:]
    sums = struct.unpack_from(f"<{tensors}Q", rest)
    rows = [_CHUNK.unpack_from(rest, 8 * tensors + CHUNK_BYTES * number) for number in range(chunks)]
    head = PatchHead(
        kind, run, step, base_step, layout, base_state, state, changed, sums,
        tuple(ChunkRow(first, blocks, form, size, digest) for first, blocks, form, _, size, digest in rows),
        table, nbytes, found,
    )  # fmt: skip
    end = 0
    for number, (chunk, row) in enumerate(zip(head.chunks, rows)):
        allowed = {RAW} if anchored else {RAW, CHANGES, LOSSY}
        if version == VERSION:
            allowed.add(CODED)
        if chunk.first < end or not chunk.blocks or any(row[3]) or chunk.kind not in allowed:
            raise PayloadError(f"{head.name}: chunk {number} is out of order, empty or of an unknown kind")
        if anchored and chunk.first != end:
            raise PayloadError(f"{head.name}: it leaves out the blocks before chunk {number}")
        end = chunk.first + chunk.blocks
    if body_at + sum(chunk.nbytes for chunk in head.chunks) != nbytes:
        raise PayloadError(f"{head.name}: its chunks have other lengths than the file")
    return head


def anchor_layout(head: PatchHead) -> Layout:
    """Return the layout of an anchor.

    Raises:
        PayloadError: it is not valid, or chunks do not cover it.
    """
    layout = Layout.parse(head.table, len(head.sums))
    if layout.digest != head.layout:
        raise PayloadError(f"{head.name}: its layout differs from the digest in its head")
    check_against(head, layout)
    return layout


def check_against(head: PatchHead, layout: Layout) -> None:
    """Refuse a head that does not fit a layout.

    Raises:
        PayloadError: numbers of tensors or blocks, sums or state differ.
    """
    end = max((chunk.first + chunk.blocks for chunk in head.chunks), default=0)
    if len(head.sums) != len(layout.entries) or end > layout.blocks:
        raise PayloadError(
            f"{head.name}: it has {len(head.sums)} tensors and {end} blocks, which do not fit its layout"
        )
    if head.kind == ANCHOR and end != layout.blocks:
        raise PayloadError(f"{head.name}: it ends at block {end} of {layout.blocks}")
    if layout.state(head.sums) != head.state:
        raise PayloadError(f"{head.name}: the sums of its tensors differ from the digest of its state")
