"""State as pieces: a sealed table of what there is, and the bytes of its tensors, each piece under a keyed digest.

Two members with equal state have equal pieces, so that a newcomer can take each piece from any of them, and keeps those
that it has already.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.drivers.tables import MOST_BYTES, decode, encode
from gradwire.kernels.pieces import PIECE_BYTES, Octets
from gradwire.kernels.pieces import decode as decode_piece
from gradwire.kernels.pieces import encode as encode_piece
from gradwire.link.membership.transfer import MOST_TENSORS, flattened, restored, room

SUBJECT = "pieces of state"
SEAL_BYTES, DIGEST_BYTES = 32, 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class StatePiece:
    """A run of bytes of one tensor.

    Attributes:
        tensor: Number of the tensor.
        begin, stop: Its bytes in the tensor.
        own: True if each member has a version of its own.
        digest: Digest of the bytes; empty on the side that has not computed it.
    """

    tensor: int
    begin: int
    stop: int
    own: bool = False
    digest: bytes = b""


@dataclass
class Snapshot:
    """State of a member.

    Attributes:
        value: Plain values, which name tensors by their numbers.
        tensors: The tensors, contiguous and in main memory.
        own: Numbers of tensors of which each member has a version of its own.
    """

    value: Any
    tensors: list[torch.Tensor]
    own: frozenset[int] = frozenset()
    pieces: list[StatePiece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._octets: list[Octets] = [x.reshape(-1).view(torch.uint8).numpy() for x in self.tensors]
        if not self.pieces:
            self.pieces = [
                StatePiece(number, begin, min(begin + PIECE_BYTES, len(octets)), number in self.own)
                for number, octets in enumerate(self._octets)
                for begin in range(0, len(octets), PIECE_BYTES)
            ]

    @classmethod
    def of(cls, state: Mapping[str, Any], own: Collection[str] = (), *, copied: bool) -> Snapshot:
        """Make one of some parts of state.

        Args:
            state: Parts of numbers, strings, tensors, lists, tuples and dicts, by name.
            own: Names of the parts of which each member has a version of its own.
            copied: True to copy tensors, so that they may change.

        Raises:
            IncompatibleError: the state holds something else.
        """
        tensors: list[torch.Tensor] = []
        value, of_own = {}, set[int]()
        for name, part in state.items():
            before = len(tensors)
            value[name] = flattened(part, tensors)
            if name in own:
                of_own.update(range(before, len(tensors)))
        kept = [x.cpu().contiguous() for x in tensors]
        if copied:
            kept = [x.clone() if x.data_ptr() == given.data_ptr() else x for x, given in zip(kept, tensors)]
        return cls(value, kept, frozenset(of_own))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(len, self._octets))

    def state(self) -> dict[str, Any]:
        """Return the parts by name."""
        return dict(restored(self.value, self.tensors))

    def octets(self, piece: StatePiece) -> Octets:
        """Return the bytes of a piece."""
        return self._octets[piece.tensor][piece.begin : piece.stop]

    def coded(self, piece: StatePiece) -> bytes:
        """Return a piece for the wire."""
        dtype = self.tensors[piece.tensor].dtype
        return encode_piece(self.octets(piece), *_form(dtype))

    def put(self, piece: StatePiece, coded: bytes, key: bytes) -> None:
        """Write a piece that came over the wire.

        Raises:
            PayloadError: it is not the piece whose digest is known.
        """
        dtype = self.tensors[piece.tensor].dtype
        found = decode_piece(coded, piece.stop - piece.begin, *_form(dtype))
        if not hmac.compare_digest(digest_of(key, found), piece.digest):
            raise PayloadError(
                f"bytes {piece.begin} to {piece.stop} of tensor {piece.tensor} are not the ones expected"
            )
        self.octets(piece)[:] = found

    def keep(self, piece: StatePiece, octets: Octets) -> None:
        """Write a piece that is there already."""
        self.octets(piece)[:] = octets

    def digests(self, key: bytes) -> dict[bytes, Octets]:
        """Return the bytes of all pieces by their digests."""
        return {digest_of(key, octets): octets for octets in map(self.octets, self.pieces)}

    # ------------------------------------------------------------------ on the wire

    def table(self, key: bytes) -> bytes:
        """Return what there is, with the digests of all pieces, and a seal."""
        digests: list[list[bytes]] = [[] for _ in self.tensors]
        for piece in self.pieces:
            digests[piece.tensor].append(digest_of(key, self.octets(piece)))
        rows = [[str(x.dtype), list(x.shape), n in self.own, digests[n]] for n, x in enumerate(self.tensors)]
        message = encode([self.value, rows], SUBJECT, 0)
        return hmac.digest(key, message, "sha256") + message

    @classmethod
    def from_table(cls, sealed: bytes, key: bytes) -> Snapshot:
        """Return room for the state of a table.

        Raises:
            PayloadError: it was not made under the key, or has another form.
        """
        seal, message = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, hmac.digest(key, message, "sha256")):
            raise PayloadError("a table of state does not verify under the secret")
        try:
            table: Any = decode(message, SUBJECT, 0)
            value, rows = table
            if len(rows) > MOST_TENSORS:
                raise ValueError(f"{len(rows)} tensors")
            tensors = [room(dtype, shape) for dtype, shape, _, _ in rows]
            own = frozenset(number for number, row in enumerate(rows) if row[2] is True)
            made = cls(value, tensors, own)
            digests = iter([digest for row in rows for digest in row[3]])
            made.pieces = [StatePiece(p.tensor, p.begin, p.stop, p.own, next(digests)) for p in made.pieces]
            wanted = all(isinstance(p.digest, bytes) and len(p.digest) == DIGEST_BYTES for p in made.pieces)
            if not wanted or next(digests, None) is not None:
                raise ValueError("digests")
            restored(value, tensors)
        except (ValueError, TypeError, KeyError, IndexError, StopIteration) as error:
            raise PayloadError(f"a table of state has not the expected form: {str(error)[:200]}") from None
        return made

    def packed(self, key: bytes) -> bytes:
        """Return table and pieces in one message."""
        parts = [self.table(key), *map(self.coded, self.pieces)]
        return b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @classmethod
    def unpacked(cls, message: bytes, key: bytes) -> Snapshot:
        """Return the state of a message of :meth:`packed`.

        Raises:
            PayloadError: it is not one.
        """
        parts = _split(message)
        made = cls.from_table(next(parts, b""), key)
        for piece in made.pieces:
            made.put(piece, next(parts, b""), key)
        if next(parts, None) is not None:
            raise PayloadError("a message of state has further parts")
        return made


def _split(message: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(message):
        if at + _LENGTH.size > len(message):
            raise PayloadError("a message of state ends early")
        (size,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        yield message[at : at + size]
        at += size


def digest_of(key: bytes, octets: Octets) -> bytes:
    """Return the digest of bytes under a key."""
    return hashlib.blake2b(np.ascontiguousarray(octets).data, key=key, digest_size=DIGEST_BYTES).digest()


def _form(dtype: torch.dtype) -> tuple[int, bool]:
    return dtype.itemsize, dtype.is_floating_point


MOST_TABLE_BYTES = MOST_BYTES + SEAL_BYTES
"""Largest number of bytes of a table."""
