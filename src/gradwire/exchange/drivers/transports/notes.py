"""The note beside each message of a transport: the length of a row that may be shorter, and a digest under a key.

A checksum detects accidents: whoever can change a message can compute the checksum of the changed one. Where the ranks
share a key, a note also has a digest under that key (BLAKE2b), which only they can compute. It covers the bytes of the
message, its sender and receiver, its tag, and its number among the messages of that tag. So a message that somebody
else sent, that was altered, or that is sent again, to another rank or in another place, is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import Counter

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.tables import announce, announced
from gradwire.exchange.drivers.traffic import LENGTH_BYTES

KEYED_BYTES = 16
"""Bytes of a digest under a key: a forger is right once in 2^128 times."""

TO_ALL = 0xFFFFFFFF
"""Receiver of a message to all ranks."""

_BODY_BYTES = 32
_PLACE, _LENGTH = struct.Struct("<IIQQ"), struct.Struct("<II")


class Notes:
    """Writes and reads the notes of one rank's messages.

    Args:
        rank: This rank.
        key: Key that the ranks of these connections share, of at most 64 bytes, and that no other connections have;
            empty: notes have no digest.
    """

    def __init__(self, rank: int, key: bytes = b"") -> None:
        self._rank, self._key = rank, key
        self.keyed_bytes = KEYED_BYTES if key else 0
        self._sent: Counter[tuple[int, int]] = Counter()
        self._came: Counter[tuple[int, int]] = Counter()
        self._body: tuple[tuple[int, int], bytes] | None = None

    def size(self, varies: bool) -> int:
        """Return the bytes of a note beside a row of which the length varies or not; 0: there is none."""
        return LENGTH_BYTES * varies + self.keyed_bytes

    def begin(self, lengths: torch.Tensor | None, count: int) -> torch.Tensor:
        """Return notes for some rows (uint8 ``[count, bytes]``) without their digests.

        Args:
            lengths: Length of each row; None if they do not vary.
        """
        notes = torch.empty((count, self.size(lengths is not None)), dtype=torch.uint8, device="cpu")
        if lengths is not None:
            notes[:, :LENGTH_BYTES] = announce(lengths)
        self._body = None
        return notes

    def seal(self, note: torch.Tensor, row: torch.Tensor, to: int, tag: int) -> torch.Tensor:
        """Write the digest of a row into its note, if there is a key, and return the note.

        Rows of one :meth:`begin` that are the same memory are read once.
        """
        if self._key:
            place = (row.data_ptr(), row.numel())
            if self._body is None or self._body[0] != place:
                self._body = place, self._digest_of(row)
            self._sent[to, tag] += 1
            found = self._keyed(self._body[1], self._rank, to, tag, self._sent[to, tag])
            note[-KEYED_BYTES:] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
        return note

    def length(self, note: torch.Tensor, most: int, sender: int) -> int:
        """Return the length that a note announces.

        Raises:
            PayloadError: it changed on the way, or is larger than ``most``.
        """
        length, complement = _LENGTH.unpack(note[:LENGTH_BYTES].numpy().tobytes())
        if length ^ complement != 0xFFFFFFFF or length > most:
            announced(note[None, :LENGTH_BYTES], -1, most, first=sender)  # raises
        return int(length)

    def check(self, note: torch.Tensor, row: torch.Tensor, sender: int, tag: int, to: int | None = None) -> None:
        """Check the digest of a row that came, if there is a key.

        Args:
            to: The receiver in the digest; this rank if None.

        Raises:
            PayloadError: somebody else sent it, or it is another message than the sender's next.
        """
        if not self._key:
            return
        to = self._rank if to is None else to
        # A message to all has a number of its own for each sender, as one to this rank alone.
        self._came[sender, tag] += 1
        due = self._keyed(self._digest_of(row), sender, to, tag, self._came[sender, tag])
        if not hmac.compare_digest(note[-KEYED_BYTES:].numpy().tobytes(), due):
            raise PayloadError(
                "message from {sender}: its digest under the secret differs, so that it was altered on the way, sent "
                "before, or sent by somebody who does not know the secret",
                sender,
            )

    def _digest_of(self, row: torch.Tensor) -> bytes:
        octets = row.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return hashlib.blake2b(octets.data, key=self._key, digest_size=_BODY_BYTES, person=b"message body").digest()

    def _keyed(self, body: bytes, sender: int, to: int, tag: int, number: int) -> bytes:
        said = _PLACE.pack(sender, to, tag, number) + body
        return hashlib.blake2b(said, key=self._key, digest_size=KEYED_BYTES, person=b"message").digest()
