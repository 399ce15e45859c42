"""What ranks tell each other of failures, and the bytes in which they do.

A connection carries frames. A frame is one byte, :data:`BEAT`, which says nothing but that the sender lives, or a
notice: the byte 1, the length of what follows in two bytes, big-endian, and a JSON list ``[kind, link, ranks, text]``.

Whatever a peer sends is data: every field is checked, lengths are bounded, and what cannot be read is a
:class:`~gradwire.errors.PayloadError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from gradwire.errors import PayloadError

__all__ = ["BEAT", "BECAUSE", "CLOSED", "ENDED", "FAILED", "Inbox", "Notice"]

BEAT = b"\x00"
_NOTICE = 1
_HEAD = struct.Struct(">BH")
MOST_BYTES = 8192
MOST_TEXT, MOST_RANKS, MOST_LINK = 1000, 64, 64

FAILED = "failed"
"""Something failed on the sender itself, in an exchange of the link or anywhere else; ``text`` says where and what."""

BECAUSE = "because"
"""The sender cannot go on with the link, or at all, because of ``ranks``; ``text`` says what became of them."""

CLOSED = "closed"
"""The sender has closed the link."""

ENDED = "ended"
"""The sender's process ends in good order; ``text`` says how."""

KINDS = {FAILED, BECAUSE, CLOSED, ENDED}


@dataclass(frozen=True)
class Notice:
    """One thing that a rank tells all others.

    Attributes:
        kind: :data:`FAILED`, :data:`BECAUSE`, :data:`CLOSED` or :data:`ENDED`.
        link: Token of the link that it is about; empty for the whole process.
        ranks: Global ranks that are the cause, of :data:`BECAUSE`.
        text: For people.
    """

    kind: str
    link: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""

    def frame(self) -> bytes:
        """Return the bytes of the notice; a long text is cut."""
        value = [self.kind, self.link[:MOST_LINK], list(self.ranks[:MOST_RANKS]), readable(self.text)]
        body = json.dumps(value, ensure_ascii=False).encode()
        return _HEAD.pack(_NOTICE, len(body)) + body

    @staticmethod
    def read(body: bytes) -> Notice:
        """Read what follows the length of a notice.

        Raises:
            PayloadError: it is none.
        """
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise PayloadError("a notice is not JSON") from None
        if not isinstance(value, list) or len(value) != 4:
            raise PayloadError("a notice is not a list of four values")
        kind, link, ranks, text = value
        if not (isinstance(kind, str) and isinstance(link, str) and isinstance(text, str) and isinstance(ranks, list)):
            raise PayloadError("a value of a notice has the wrong type")
        if kind not in KINDS or len(link) > MOST_LINK or len(ranks) > MOST_RANKS:
            raise PayloadError("a value of a notice is out of its range")
        if not all(type(rank) is int and 0 <= rank < 1 << 31 for rank in ranks):
            raise PayloadError("a rank in a notice is not a whole number")
        return Notice(kind, link, tuple(ranks), readable(text))


def readable(text: str) -> str:
    """Return a text cut to what a notice may hold, on one line, without what would control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


class Inbox:
    """Bytes of one connection, of which whole frames are taken."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Notice]:
        """Take bytes, and return the notices that are whole by now.

        Raises:
            PayloadError: they are none; nothing more can be read from the connection then.
        """
        self._bytes += received
        found, at = [], 0
        while at < len(self._bytes):
            if self._bytes[at] == BEAT[0]:
                at += 1
                continue
            if len(self._bytes) - at < _HEAD.size:
                break
            kind, size = _HEAD.unpack_from(self._bytes, at)
            if kind != _NOTICE or size > MOST_BYTES:
                raise PayloadError(f"a frame of kind {kind} and {size} bytes is no notice")
            if len(self._bytes) - at < _HEAD.size + size:
                break
            at += _HEAD.size
            found.append(Notice.read(bytes(self._bytes[at : at + size])))
            at += size
        del self._bytes[:at]
        return found
