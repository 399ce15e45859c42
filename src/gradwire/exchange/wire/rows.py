"""Layouts of payloads as rows of a matrix of bytes: row r is sent to, or received from, rank r."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.wire.header import HEADER_BYTES, Header, check_rows, read_length, seal_rows
from gradwire.exchange.wire.packing import Packing

ALIGNMENT = 16
"""Every section starts and ends at a multiple of this many bytes, counted from the start of the payload."""


def padded(count: int) -> int:
    """Round a number of bytes up to a whole number of alignment units."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Rows:
    """Layout of payloads that share one header and one list of section sizes.

    Args:
        sizes: Bytes of each section, multiples of :data:`ALIGNMENT`.
        padding: Number of zeros after them, so that payloads of other sections have the same length.
        checks: Takes the results of checks of payloads on a device.
    """

    variable = False
    """True if :meth:`write` returns the bytes of each row."""

    def __init__(self, sizes: Sequence[int], padding: int = 0, checks: Checks = AT_ONCE) -> None:
        self.sizes, self.padding = tuple(sizes), padding
        self.body_bytes = sum(self.sizes) + padding
        self.row_bytes = HEADER_BYTES + self.body_bytes
        self._checks = checks

    def header(self, *, tag: int, round: int, bucket: int, chunk: int, exchange: int = 0) -> Header:
        """Return the header of these payloads."""
        return Header(tag, round, bucket, chunk, self.body_bytes, exchange)

    def sections(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """View each section of a matrix of payloads, ``[ranks, row_bytes]`` -> list of ``[ranks, size]``."""
        return list(rows[:, HEADER_BYTES : self.row_bytes - self.padding].split(self.sizes, dim=1))

    def write(
        self, rows: torch.Tensor, header: Header, bodies: Sequence[torch.Tensor], sender: int, receivers: Sequence[int]
    ) -> None:
        """Fill payloads, row i for ``receivers[i]``, with row i of each body (``[rows, size]``); all of one length."""
        for section, body in zip(self.sections(rows), bodies):
            section.copy_(body)
        if self.padding:
            rows[:, self.row_bytes - self.padding :] = 0
        seal_rows(rows, header, sender, receivers)

    def read(
        self, rows: torch.Tensor, header: Header, receiver: int, arrived: torch.Tensor | None = None, first: int = 0
    ) -> list[torch.Tensor]:
        """Check payloads, row r from rank ``first + r``, and view the sections.

        Args:
            receiver: This rank, or :data:`EVERYONE` if all ranks were sent the same.
            arrived: See :meth:`VariableRows.read`; None, since all rows have one length.

        Raises:
            PayloadError: a row is not the payload that the header describes, or changed in transit. For rows on a
                device the result is passed to ``checks`` instead.
        """
        check_rows(rows, header, receiver, first, self._checks)
        return self.sections(rows)


class VariableRows:
    """Layout of payloads that share one list of sections.

    Args:
        packings: Packing of each section.
        room: Returns a buffer by name and shape, which is kept between rounds.
    """

    variable = True

    def __init__(self, packings: Sequence[Packing], room: Callable[..., torch.Tensor]) -> None:
        self.packings, self.sizes, self._room = tuple(packings), tuple(p.size for p in packings), room
        self._table = padded(4 * len(self.packings))
        self.body_bytes = self._table + sum(padded(p.bound) for p in self.packings)
        self.row_bytes = HEADER_BYTES + self.body_bytes

    def header(self, *, tag: int, round: int, bucket: int, chunk: int, exchange: int = 0) -> Header:
        """Return the header of these payloads, with the largest length of a body."""
        return Header(tag, round, bucket, chunk, self.body_bytes, exchange)

    def write(
        self, rows: torch.Tensor, header: Header, bodies: Sequence[torch.Tensor], sender: int, receivers: Sequence[int]
    ) -> torch.Tensor:
        """Fill payloads, row i for ``receivers[i]``, from row i of each body; return the bytes of each row, int64."""
        used = []
        for r, row in enumerate(rows):
            lengths, at = [], HEADER_BYTES + self._table
            for body, packing in zip(bodies, self.packings):
                count = packing.pack(body[r, : packing.size], row[at:])
                lengths.append(count)
                row[at + count : at + padded(count)] = 0
                at += padded(count)
            table = row[HEADER_BYTES : HEADER_BYTES + self._table]
            table.zero_()
            table[: 4 * len(lengths)] = torch.from_numpy(np.array(lengths, np.uint32).view(np.uint8))
            seal_rows(row[None, :at], replace(header, body_bytes=at - HEADER_BYTES), sender, receivers[r : r + 1])
            used.append(at)
        return torch.tensor(used, dtype=torch.int64, device="cpu")

    def read(
        self, rows: torch.Tensor, header: Header, receiver: int, arrived: torch.Tensor | None = None, first: int = 0
    ) -> list[torch.Tensor]:
        """Check and decode payloads, row r from rank ``first + r``; return each section, ``[ranks, size]``.

        Args:
            receiver: This rank, or :data:`EVERYONE` if all ranks were sent the same.
            arrived: Number of bytes received in each row; 0 for this rank's own, which was not sent.

        Raises:
            PayloadError: a row has another length than announced, changed in transit, or is not a payload of these
                sizes.
        """
        out = [self._room(f"decoded {i} of {size}", len(rows), size) for i, size in enumerate(self.sizes)]
        announced = [0] * len(rows) if arrived is None else arrived.tolist()
        for sender, (row, count) in enumerate(zip(rows, announced), first):
            about, length = f"payload from {{sender}} for {header.place()}", read_length(row)
            if not self._table <= length <= self.body_bytes:
                raise PayloadError(f"{about}: a body of {length} bytes where at most {self.body_bytes} fit", sender)
            if count and count != HEADER_BYTES + length:
                raise PayloadError(f"{about}: {count} bytes came where its header says {HEADER_BYTES + length}", sender)
            row = row[: HEADER_BYTES + length]
            check_rows(row[None], replace(header, body_bytes=length), receiver, sender)
            try:
                self._read_row(row, [section[sender - first] for section in out])
            except PayloadError as error:
                raise PayloadError(f"{about}: {error}", sender) from None
        return out

    def _read_row(self, row: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        at = HEADER_BYTES + self._table
        table = row[HEADER_BYTES:at].clone().numpy().view(np.uint32).tolist()
        lengths = table[: len(self.sizes)]
        if any(table[len(self.sizes) :]):
            raise PayloadError("its table of lengths is not followed by zeros")
        for length, packing, section in zip(lengths, self.packings, out):
            if at + padded(length) > row.numel():
                raise PayloadError(f"a section of {length} bytes does not fit")
            packing.unpack(row[at : at + length], section)
            if bool(row[at + length : at + padded(length)].any()):
                raise PayloadError("a section is not followed by zeros")
            at += padded(length)
        if at != row.numel():
            raise PayloadError(f"{row.numel() - at} bytes too many")
