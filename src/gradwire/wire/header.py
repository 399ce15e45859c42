"""The sixteen bytes before every payload, and the check of them.

Layout, little endian::

    offset  bytes  meaning
    0       2      magic, 0x47 0x57 ("GW")
    2       1      wire version, WIRE_VERSION
    3       1      tag of the method that wrote the body
    4       4      round mod 2^32
    8       2      bucket mod 2^16
    10      2      chunk mod 2^16
    12      4      bytes of the body that follows

A receiver knows every field beforehand, so a header that differs in any bit is an error, named by field: bytes of
another bucket, round, method or version are never decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import PayloadError

__all__ = ["HEADER_BYTES", "WIRE_VERSION", "Header", "check_rows", "read_length"]

WIRE_VERSION = 1
HEADER_BYTES = 16
MAGIC = b"GW"
_STRUCT = struct.Struct("<2sBBIHHI")


@dataclass(frozen=True)
class Header:
    """What a header says beside magic and version."""

    tag: int
    round: int
    bucket: int
    chunk: int
    body_bytes: int

    def to_bytes(self) -> bytes:
        """Write the sixteen bytes."""
        return _STRUCT.pack(MAGIC, WIRE_VERSION, *self.fields())

    def fields(self) -> tuple[int, ...]:
        """Return tag, round, bucket, chunk and length as they are written."""
        return self.tag, self.round & 0xFFFFFFFF, self.bucket & 0xFFFF, self.chunk & 0xFFFF, self.body_bytes

    def write(self, rows: torch.Tensor) -> None:
        """Write the sixteen bytes at the start of each row."""
        # By numpy: this happens several times a bucket, and costs a tenth of the same in tensor operations.
        rows.numpy()[:, :HEADER_BYTES] = np.frombuffer(self.to_bytes(), np.uint8)


def read_length(row: torch.Tensor) -> int:
    """Return the length that a payload's header states, unchecked."""
    return int.from_bytes(bytes(row[HEADER_BYTES - 4 : HEADER_BYTES].tolist()), "little")


def check_rows(rows: torch.Tensor, expected: Header, first: int = 0) -> None:
    """Check the header of each row (uint8 ``[ranks, bytes]``), row r from rank ``first + r``.

    Raises:
        PayloadError: naming the sender and the first field that differs.
    """
    size = HEADER_BYTES + expected.body_bytes
    if rows.dim() != 2 or rows.shape[1] != size:
        raise PayloadError(f"payloads of {size} bytes were expected, {tuple(rows.shape)} arrived")
    if rows.numpy()[:, :HEADER_BYTES].tobytes() == expected.to_bytes() * len(rows):
        return
    for sender, row in enumerate(rows, first):
        _explain(sender, bytes(row[:HEADER_BYTES].tolist()), expected)


def _explain(sender: int, head: bytes, expected: Header) -> None:
    magic, version, tag, round_, bucket, chunk, body_bytes = _STRUCT.unpack(head)
    if magic != MAGIC:
        raise PayloadError(f"payload from rank {sender}: not a gradwire payload (it starts with {magic!r})")
    found = (version, tag, round_, bucket, chunk, body_bytes)
    wanted = (WIRE_VERSION, *expected.fields())
    names = ("wire version", "method tag", "round", "bucket", "chunk", "body length in bytes")
    for name, have, want in zip(names, found, wanted):
        if have != want:
            raise PayloadError(f"payload from rank {sender}: {name} is {have}, expected {want}")
