"""The header of 32 bytes before every payload, and the check of header and body.

Layout, little endian::

    offset  bytes  meaning
    0       2      magic, 0x47 0x57 ("GW")
    2       1      wire version, WIRE_VERSION
    3       1      tag of the method that wrote the body
    4       4      round mod 2^32
    8       2      bucket mod 2^16
    10      2      chunk mod 2^16
    12      4      bytes of the body that follows
    16      2      rank of the sender mod 2^16
    18      2      rank of the receiver mod 2^16, or 0xFFFF: all ranks
    20      2      number of the exchange within the chunk
    22      2      zero
    24      8      checksum of bytes 0 to 23 and of the body

A receiver knows the first 24 bytes beforehand: a header that differs in any bit is an error, which names the field. The
checksum detects a changed body. So bytes of another sender, bucket, round, method or version, or bytes that changed in
transit, are never decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.kernels.checksum import checksums, device_checksums

WIRE_VERSION = 3
HEADER_BYTES = 32
EVERYONE = 0xFFFF
"""Receiver in the header of a payload that is sent to all ranks."""

MOST_BODY_BYTES = 2**32 - 1 - HEADER_BYTES
"""Largest length of a body: with the header, it has 32 bits where it is announced."""

MAGIC = b"GW"
_STRUCT = struct.Struct("<2sBBIHHIHHHH")
_ROUND_AT, _LENGTH_AT, _SENDER_AT, _RECEIVER_AT = 4, 12, 16, 18
_CHECKSUM_AT = _STRUCT.size


@dataclass(frozen=True)
class Header:
    """The header fields that the payloads of one exchange have in common.

    Attributes:
        tag: Tag of the method.
        round: Number of synchronised backward passes before this one.
        bucket: Index of the bucket in its step.
        chunk: Index of the chunk in its bucket.
        body_bytes: Number of bytes of the body.
        exchange: Number of the exchange within the chunk.
    """

    tag: int
    round: int
    bucket: int
    chunk: int
    body_bytes: int
    exchange: int = 0

    def to_bytes(self, sender: int, receiver: int = EVERYONE) -> bytes:
        """Return the 24 bytes before the checksum.

        Raises:
            IncompatibleError: the body is longer than its length field can say.
        """
        if self.body_bytes > MOST_BODY_BYTES:
            raise IncompatibleError(
                f"a payload for {self.place()} has {self.body_bytes} bytes, and {MOST_BODY_BYTES} at most can be sent "
                "at once: use smaller buckets (bucket_cap_mb), or a method that sends less of a parameter"
            )
        return _STRUCT.pack(MAGIC, WIRE_VERSION, *self.fields(sender, receiver), 0)

    def fields(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Return the values of the fields after the version, as they are written."""
        return (
            self.tag,
            self.round & 0xFFFFFFFF,
            self.bucket & 0xFFFF,
            self.chunk & 0xFFFF,
            self.body_bytes,
            sender & 0xFFFF,
            receiver & 0xFFFF,
            self.exchange,
        )

    def place(self) -> str:
        """Describe the exchange, for messages."""
        return f"bucket {self.bucket}, chunk {self.chunk}, round {self.round}"


def seal_rows(rows: torch.Tensor, header: Header, sender: int, receivers: Sequence[int]) -> None:
    """Seal rows (uint8 ``[len(receivers), bytes]``) that have bodies: write the header and checksum of each.

    Rows on a device get their checksums there, without reading them back.
    """
    heads = _heads([header.to_bytes(sender, receiver) for receiver in receivers])
    if rows.device.type != "cpu":
        words = _on_device(heads, rows.device)
        rows[:, :_CHECKSUM_AT] = words.view(torch.uint8)
        found = device_checksums(words, rows[:, HEADER_BYTES:])
        rows[:, _CHECKSUM_AT:HEADER_BYTES] = found[:, None].view(torch.uint8)
        return
    octets = rows.numpy()
    octets[:, :_CHECKSUM_AT] = heads.view(np.uint8)
    octets[:, _CHECKSUM_AT:HEADER_BYTES] = checksums(heads, octets[:, HEADER_BYTES:])[:, None].view(np.uint8)


def check_rows(rows: torch.Tensor, expected: Header, receiver: int, first: int = 0, checks: Checks = AT_ONCE) -> None:
    """Check the header and the body of each row (uint8 ``[ranks, bytes]``), row r from rank ``first + r``.

    Rows on a device are checked there, and the result is passed to ``checks``: decoders that run before it is known
    must be safe with any bytes.

    Raises:
        PayloadError: a row differs; the message names the sender, the bucket, the chunk and the round, and the first
            field that differs.
    """
    size = HEADER_BYTES + expected.body_bytes
    if rows.dim() != 2 or rows.shape[1] != size:
        raise PayloadError(
            f"payloads of {size} bytes were expected for {expected.place()}, {tuple(rows.shape)} arrived"
        )
    heads = _heads([expected.to_bytes(first + r, receiver) for r in range(len(rows))])
    if rows.device.type != "cpu":
        checks.require(_agree_on_device(rows, heads), lambda: _difference(rows, expected, receiver, first))
        return
    octets = rows.numpy()
    if not np.array_equal(octets[:, :_CHECKSUM_AT], heads.view(np.uint8)):
        for sender, row in enumerate(octets, first):
            _explain(sender, receiver, row[:_CHECKSUM_AT].tobytes(), expected)
    found = np.ascontiguousarray(octets[:, _CHECKSUM_AT:HEADER_BYTES]).view(np.uint64)[:, 0]
    differs = np.flatnonzero(found != checksums(heads, octets[:, HEADER_BYTES:]))
    if len(differs):
        raise PayloadError(
            f"payload from {{sender}} for {expected.place()}: its checksum differs, so that bytes changed on the way",
            first + int(differs[0]),
        )


def pretend_senders(rows: torch.Tensor, first: int = 0, receiver: int | None = None, round: int | None = None) -> None:
    """Rewrite payloads of one rank as if row r came from rank ``first + r``, for simulated replies.

    Payloads for a single rank are then for ``receiver``, and all are of ``round``, if these are given. Rows that are
    not payloads do not change.
    """
    for sender, row in enumerate(rows.view(torch.uint8).numpy(), first):
        if row[: len(MAGIC)].tobytes() != MAGIC or len(row) < HEADER_BYTES:
            continue
        payload = row[: HEADER_BYTES + int.from_bytes(row[_LENGTH_AT : _LENGTH_AT + 4].tobytes(), "little")]
        payload[_SENDER_AT : _SENDER_AT + 2] = np.frombuffer(sender.to_bytes(2, "little"), np.uint8)
        alone = payload[_RECEIVER_AT : _RECEIVER_AT + 2].tobytes() != EVERYONE.to_bytes(2, "little")
        if receiver is not None and alone:
            payload[_RECEIVER_AT : _RECEIVER_AT + 2] = np.frombuffer(receiver.to_bytes(2, "little"), np.uint8)
        if round is not None:
            payload[_ROUND_AT : _ROUND_AT + 4] = np.frombuffer((round & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8)
        head = np.frombuffer(payload[:_CHECKSUM_AT].tobytes(), np.uint64)[None]
        payload[_CHECKSUM_AT:HEADER_BYTES] = checksums(head, payload[None, HEADER_BYTES:]).view(np.uint8)


def read_length(row: torch.Tensor) -> int:
    """Return the length in a payload's header, unchecked."""
    return int.from_bytes(bytes(row[_LENGTH_AT : _LENGTH_AT + 4].tolist()), "little")


def _heads(heads: Sequence[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.frombuffer(b"".join(heads), np.uint64).reshape(len(heads), _CHECKSUM_AT // 8)


def _on_device(heads: np.ndarray[tuple[int, int], np.dtype[np.uint64]], device: torch.device) -> torch.Tensor:
    # Copy from page-locked memory: a copy from other memory may wait for the device.
    return torch.from_numpy(heads.view(np.int64).copy()).pin_memory().to(device, non_blocking=True)


def _agree_on_device(rows: torch.Tensor, heads: np.ndarray[tuple[int, int], np.dtype[np.uint64]]) -> torch.Tensor:
    """Return a flag on the device: True if all rows have these heads and the checksums of their bodies."""
    words = _on_device(heads, rows.device)
    found = device_checksums(words, rows[:, HEADER_BYTES:])
    due = torch.cat([words, found[:, None]], 1).view(torch.uint8)
    return (rows[:, :HEADER_BYTES] == due).all()


def _difference(rows: torch.Tensor, expected: Header, receiver: int, first: int) -> PayloadError:
    """Return the error for rows on a device after their check failed there."""
    try:
        check_rows(rows.cpu(), expected, receiver, first)
    except PayloadError as error:
        return error
    return PayloadError(f"payloads for {expected.place()}: a header or a checksum differed on {rows.device}")


def _explain(sender: int, receiver: int, head: bytes, expected: Header) -> None:
    magic, version, *found, zero = _STRUCT.unpack(head)
    about = f"payload from {{sender}} for {expected.place()}"
    if magic != MAGIC:
        raise PayloadError(f"{about}: not a gradwire payload (it starts with {magic!r})", sender)
    names = (
        "wire version", "method tag", "round", "bucket", "chunk", "body length in bytes", "sender", "receiver",
        "exchange", "reserved field",
    )  # fmt: skip
    wanted = (WIRE_VERSION, *expected.fields(sender, receiver), 0)
    for name, have, want in zip(names, (version, *found, zero), wanted):
        if have != want:
            raise PayloadError(f"{about}: {name} is {have}, expected {want}", sender)
