"""Payloads whose sections are entropy-coded, and so differ in length by sender and receiver.

Layout, little endian, after the header (whose length field holds what really follows)::

    bytes           meaning
    4 a section     length of each section as it is sent; zeros up to a multiple of 16
    per section     its plain bytes, then its coded bytes; zeros up to a multiple of 16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Coder
from gradwire.wire.header import HEADER_BYTES, Header, check_rows, read_length, seal_rows
from gradwire.wire.rows import padded

__all__ = ["CodedRows"]


class CodedRows:
    """Layout of payloads that share one list of section sizes, before coding.

    Args:
        sizes: Bytes of each section before coding.
        plain: Bytes at the start of each section that are sent as they are.
        coder: Of the rest.
        room: Gives a buffer, kept from round to round, by name and shape.
    """

    def __init__(
        self, sizes: Sequence[int], plain: Sequence[int], coder: Coder, room: Callable[..., torch.Tensor]
    ) -> None:
        self.sizes, self.plain, self.coder, self._room = tuple(sizes), tuple(plain), coder, room
        self._table = padded(4 * len(self.sizes))
        most = [p + padded(coder.bound(size - p)) if size > p else padded(p) for size, p in zip(self.sizes, self.plain)]
        self.body_bytes = self._table + sum(most)
        self.row_bytes = HEADER_BYTES + self.body_bytes

    def header(self, *, tag: int, round: int, bucket: int, chunk: int, exchange: int = 0) -> Header:
        """Make the header of these payloads, with the most that may follow as length."""
        return Header(tag, round, bucket, chunk, self.body_bytes, exchange)

    def write(
        self, rows: torch.Tensor, header: Header, bodies: Sequence[torch.Tensor], sender: int, receivers: Sequence[int]
    ) -> torch.Tensor:
        """Fill payloads, row i for ``receivers[i]``, from row i of each body; return the bytes of each row, int64."""
        used = []
        for r, row in enumerate(rows):
            lengths, at = [], HEADER_BYTES + self._table
            for body, size, plain in zip(bodies, self.sizes, self.plain):
                row[at : at + plain].copy_(body[r, :plain])
                count = self.coder.encode(body[r, plain:size].contiguous(), row[at + plain :]) if size > plain else 0
                lengths.append(plain + count)
                row[at + plain + count : at + padded(plain + count)] = 0
                at += padded(plain + count)
            table = row[HEADER_BYTES : HEADER_BYTES + self._table]
            table.zero_()
            table[: 4 * len(lengths)] = torch.tensor(lengths, dtype=torch.int32).view(torch.uint8)
            seal_rows(row[None, :at], replace(header, body_bytes=at - HEADER_BYTES), sender, receivers[r : r + 1])
            used.append(at)
        return torch.tensor(used, dtype=torch.int64)

    def read(
        self, rows: torch.Tensor, header: Header, receiver: int, arrived: torch.Tensor | None = None, first: int = 0
    ) -> list[torch.Tensor]:
        """Check and decode payloads, row r from rank ``first + r``; return each section, ``[ranks, size]``.

        Args:
            receiver: This rank, or :data:`EVERYONE` where all ranks were sent the same.
            arrived: Bytes of each row that came, 0 for this rank's own, which did not travel.

        Raises:
            PayloadError: a row is not as long as was announced, not as it was sent, or not a payload that these sizes
                can make.
        """
        out = [self._room(f"decoded {i} of {size}", len(rows), size) for i, size in enumerate(self.sizes)]
        announced = [0] * len(rows) if arrived is None else arrived.tolist()
        for sender, (row, count) in enumerate(zip(rows, announced), first):
            about, length = f"payload from rank {sender} for {header.place()}", read_length(row)
            if not self._table <= length <= self.body_bytes:
                raise PayloadError(f"{about}: a body of {length} bytes where at most {self.body_bytes} fit")
            if count and count != HEADER_BYTES + length:
                raise PayloadError(f"{about}: {count} bytes came where its header says {HEADER_BYTES + length}")
            row = row[: HEADER_BYTES + length]
            check_rows(row[None], replace(header, body_bytes=length), receiver, sender)
            self._read_row(about, row, [section[sender - first] for section in out])
        return out

    def _read_row(self, about: str, row: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        at = HEADER_BYTES + self._table
        table = row[HEADER_BYTES:at].clone().view(torch.int32).tolist()
        lengths = table[: len(self.sizes)]
        if any(table[len(self.sizes) :]):
            raise PayloadError(f"{about}: its table of lengths is not followed by zeros")
        for length, size, plain, section in zip(lengths, self.sizes, self.plain, out):
            if length < plain or at + padded(length) > row.numel():
                raise PayloadError(f"{about}: a section of {length} bytes does not fit")
            if size == plain != length:
                raise PayloadError(f"{about}: a section of {length} bytes where {plain} are expected")
            section[:plain].copy_(row[at : at + plain])
            if size > plain:
                self.coder.decode(row[at + plain : at + length], section[plain:])
            if bool(row[at + length : at + padded(length)].any()):
                raise PayloadError(f"{about}: a section is not followed by zeros")
            at += padded(length)
        if at != row.numel():
            raise PayloadError(f"{about}: {row.numel() - at} bytes too many")
