"""The layout of weights: names, types and shapes of tensors, and their blocks."""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from gradwire.errors import IncompatibleError, PayloadError

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block: 256 KiB of bfloat16, which stay in the second-level cache from one pass to the next."""

DIGEST_BYTES = 16

MAX_LAYOUT_BYTES = 1 << 28
_MAX_DIMENSIONS, _MAX_NAME_BYTES, _MAX_BYTES = 64, 4096, 1 << 56


@dataclass(frozen=True)
class ElementType:
    """A type of tensor elements.

    Attributes:
        code: Number of the type in files.
        name: Name of the type in safetensors files.
        width: Bytes of a number.
        floating: Whether a number is a sign and a magnitude.
        numbers: Numbers of an element: a complex element has two.
        dtype: Name of the type in PyTorch.
    """

    code: int
    name: str
    width: int
    floating: bool
    dtype: str
    numbers: int = 1


TYPES = (
    ElementType(1, "BOOL", 1, False, "bool"),
    ElementType(2, "U8", 1, False, "uint8"),
    ElementType(3, "I8", 1, False, "int8"),
    ElementType(4, "U16", 2, False, "uint16"),
    ElementType(5, "I16", 2, False, "int16"),
    ElementType(6, "U32", 4, False, "uint32"),
    ElementType(7, "I32", 4, False, "int32"),
    ElementType(8, "U64", 8, False, "uint64"),
    ElementType(9, "I64", 8, False, "int64"),
    ElementType(10, "F8_E4M3", 1, True, "float8_e4m3fn"),
    ElementType(11, "F8_E5M2", 1, True, "float8_e5m2"),
    ElementType(12, "F8_E4M3FNUZ", 1, True, "float8_e4m3fnuz"),
    ElementType(13, "F8_E5M2FNUZ", 1, True, "float8_e5m2fnuz"),
    ElementType(14, "F8_E8M0", 1, False, "float8_e8m0fnu"),
    ElementType(15, "F16", 2, True, "float16"),
    ElementType(16, "BF16", 2, True, "bfloat16"),
    ElementType(17, "F32", 4, True, "float32"),
    ElementType(18, "F64", 8, True, "float64"),
    ElementType(19, "C64", 4, True, "complex64", 2),
)
_BY_CODE = {kind.code: kind for kind in TYPES}
BY_NAME = {kind.name: kind for kind in TYPES}
BY_DTYPE = {getattr(torch, kind.dtype): kind for kind in TYPES if hasattr(torch, kind.dtype)}


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, type and shape."""

    name: str
    kind: ElementType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers of the tensor; a complex element counts as two."""
        return math.prod(self.shape) * self.kind.numbers

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.kind.width

    @property
    def blocks(self) -> int:
        """Blocks that the tensor is cut into."""
        return -(-self.elements // BLOCK_ELEMENTS)

    def __str__(self) -> str:
        return f"{self.name!r} {self.kind.name} {list(self.shape)}"


@dataclass(frozen=True)
class BlockSpan:
    """A run of whole blocks of one tensor.

    Attributes:
        tensor: Index of the tensor in its layout.
        begin: First element.
        stop: The element behind the last.
        kind: Type of the elements.
    """

    tensor: int
    begin: int
    stop: int
    kind: ElementType

    @property
    def octets(self) -> slice:
        """The span's bytes in the tensor."""
        return slice(self.begin * self.kind.width, self.stop * self.kind.width)

    @property
    def first_word(self) -> int:
        """Number of the span's first word of 8 bytes within the tensor."""
        return self.begin * self.kind.width // 8

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-(self.stop - self.begin) // BLOCK_ELEMENTS)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.begin


class Layout:
    """The tensors of a model, in ascending order of their names' UTF-8 bytes.

    Blocks are numbered through all tensors: each tensor is cut into blocks of 2^17 elements from its element 0, and
    its last block may be partial.

    Raises:
        IncompatibleError: two tensors have one name, or a name is too long.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry.name.encode()))
        names = [entry.name for entry in self.entries]
        for first, second in pairwise(names):
            if first == second:
                raise IncompatibleError(f"two tensors have the name {first!r}: give each tensor a name of its own")
        for entry in self.entries:
            if len(entry.name.encode()) > _MAX_NAME_BYTES or len(entry.shape) > _MAX_DIMENSIONS:
                raise IncompatibleError(
                    f"{entry}: names have at most {_MAX_NAME_BYTES} bytes, shapes {_MAX_DIMENSIONS}"
                )
        self.first_block = (0, *accumulate(entry.blocks for entry in self.entries))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.first_block[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(entry.elements for entry in self.entries)

    def spans(self, first: int, count: int) -> list[BlockSpan]:
        """Return the spans of the blocks ``first .. first + count``, in order."""
        found, end = [], first + count
        for tensor in range(bisect_right(self.first_block, first) - 1, len(self.entries)):
            entry, low, high = self.entries[tensor], self.first_block[tensor], self.first_block[tensor + 1]
            if low >= end:
                break
            begin, stop = max(first, low) - low, min(end, high) - low
            if begin < stop:
                last = min(stop * BLOCK_ELEMENTS, entry.elements)
                found.append(BlockSpan(tensor, begin * BLOCK_ELEMENTS, last, entry.kind))
        return found

    def chunks(self, most_elements: int, breaks: Container[int] = ()) -> list[tuple[int, int]]:
        """Cut all blocks into runs of at most ``most_elements`` elements; return the first block and number of each.

        Args:
            most_elements: Elements of a run at most.
            breaks: Tensors with which a run begins.
        """
        runs, first, held = list[tuple[int, int]](), 0, 0
        for tensor, entry in enumerate(self.entries):
            for block in range(entry.blocks):
                size = min(BLOCK_ELEMENTS, entry.elements - block * BLOCK_ELEMENTS)
                number = self.first_block[tensor] + block
                if held and (held + size > most_elements or (tensor in breaks and not block)):
                    runs.append((first, number - first))
                    first, held = number, 0
                held += size
        if held:
            runs.append((first, self.blocks - first))
        return runs

    @cached_property
    def table(self) -> bytes:
        """The layout as bytes: for each tensor its name, type and shape."""
        rows = []
        for entry in self.entries:
            name = entry.name.encode()
            shape = struct.pack(f"<{len(entry.shape)}Q", *entry.shape)
            rows.append(struct.pack("<HBB", len(name), entry.kind.code, len(entry.shape)) + name + shape)
        return b"".join(rows)

    @cached_property
    def digest(self) -> bytes:
        """BLAKE2b digest of the table, 16 bytes."""
        return hashlib.blake2b(self.table, digest_size=DIGEST_BYTES).digest()

    def state(self, sums: Sequence[int]) -> bytes:
        """Return the digest of weights with this layout, given the sum of words of each tensor."""
        octets = struct.pack(f"<{len(self.entries)}Q", *sums)
        return hashlib.blake2b(self.digest + octets, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def parse(cls, table: bytes, tensors: int) -> Layout:
        """Read a table.

        Raises:
            PayloadError: it is not the table of so many tensors.
        """
        entries, at = [], 0
        for number in range(tensors):
            if at + 4 > len(table):
                raise PayloadError(f"the layout ends before tensor {number} of {tensors}")
            length, code, dimensions = struct.unpack_from("<HBB", table, at)
            at += 4
            if code not in _BY_CODE or length > _MAX_NAME_BYTES or dimensions > _MAX_DIMENSIONS:
                raise PayloadError(
                    f"the layout's tensor {number} has type {code}, {dimensions} dimensions: not a layout"
                )
            if at + length + 8 * dimensions > len(table):
                raise PayloadError(f"the layout ends within tensor {number} of {tensors}")
            try:
                name = table[at : at + length].decode()
            except UnicodeDecodeError as error:
                raise PayloadError(f"the name of the layout's tensor {number} is not UTF-8") from error
            shape = struct.unpack_from(f"<{dimensions}Q", table, at + length)
            at += length + 8 * dimensions
            entries.append(Entry(name, _BY_CODE[code], shape))
            if math.prod(shape) > _MAX_BYTES:
                raise PayloadError(f"the layout's tensor {number} has the shape {list(shape)}: not a layout")
        if at != len(table):
            raise PayloadError(f"the layout has {len(table) - at} bytes behind its last tensor")
        try:
            layout = cls(entries)
        except IncompatibleError as error:
            raise PayloadError(f"the layout is refused: {error}") from error
        if layout.table != table:
            raise PayloadError("the layout's tensors are not in the order of their names")
        return layout

    def difference(self, other: Layout, here: str = "here", there: str = "there") -> str:
        """Say where another layout differs first, with words for the places of both."""
        own, others = ({entry.name: entry for entry in layout.entries} for layout in (self, other))
        for name in sorted({*own, *others}):
            if own.get(name) != others.get(name):
                absent = f"no {name!r}"
                return f"{own.get(name, absent)} {here}, {others.get(name, absent)} {there}"
        return "nothing"
