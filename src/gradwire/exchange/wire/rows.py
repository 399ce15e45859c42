"""Payloads side by side: row r of a matrix of bytes goes to, or came from, rank r."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.exchange.wire.header import HEADER_BYTES, Header, check_rows, seal_rows

__all__ = ["ALIGNMENT", "Rows", "padded"]

ALIGNMENT = 16
"""Every section starts and ends at a multiple of this many bytes, counted from the start of the payload."""


def padded(count: int) -> int:
    """Round a number of bytes up to a whole number of alignment units."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Rows:
    """Layout of payloads that share one header and one list of section sizes.

    Args:
        sizes: Bytes of each section, multiples of :data:`ALIGNMENT`.
        padding: Zeros behind them, so that payloads of other sections are as long.
        checks: Told whether payloads on a device are as they were sent.
    """

    variable = False
    """Whether :meth:`write` tells the bytes of each row."""

    def __init__(self, sizes: Sequence[int], padding: int = 0, checks: Checks = AT_ONCE) -> None:
        self.sizes, self.padding = tuple(sizes), padding
        self.body_bytes = sum(self.sizes) + padding
        self.row_bytes = HEADER_BYTES + self.body_bytes
        self._checks = checks

    def header(self, *, tag: int, round: int, bucket: int, chunk: int, exchange: int = 0) -> Header:
        """Make the header of these payloads."""
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
            receiver: This rank, or :data:`EVERYONE` where all ranks were sent the same.
            arrived: As for :meth:`VariableRows.read`; None, since all rows have one length.

        Raises:
            PayloadError: a row is not the payload that the header describes, or not as it was sent. Of rows on a device
                ``checks`` are told instead.
        """
        check_rows(rows, header, receiver, first, self._checks)
        return self.sections(rows)
