"""The frame around a coder's body: modes, check, errors. One class serves every coder and backend."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from gradwire.kernels.entropy.base import (
    CODED,
    HEADER_BYTES,
    REFUSALS,
    RUN,
    STORED,
    Bytes,
    Frame,
    bytes_of,
    open_frame,
    refusal,
)
from gradwire.kernels.entropy.variants import Variants

__all__ = ["Body", "SectionCoder"]


class Body(Protocol):
    """What a backend supplies for one coder."""

    coder: str
    backend: str

    @property
    def variants(self) -> Variants | None:
        """Which variant of each part runs; None in a backend that has one of each."""
        ...

    def check(self, head: bytes, body: Bytes) -> int:
        """Compute the check of 16 bytes of header and a body."""
        ...

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        """Write the coded body of ``symbols``, not all equal, into ``room``, as long as they are.

        Returns the bytes written, or -1 if ``room`` does not suffice.
        """
        ...

    def decode(self, body: Bytes, out: Bytes) -> int:
        """Invert :meth:`encode`; return 0, or the key in ``REFUSALS`` of what is wrong with ``body``."""
        ...


class SectionCoder:
    """See :class:`gradwire.kernels.entropy.base.Coder`."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.name, self.backend, self.variants = body.coder, body.backend, body.variants

    def bound(self, symbols: int) -> int:
        return HEADER_BYTES + symbols

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        source = bytes_of("symbols", symbols)
        target = bytes_of("out", out, self.bound(len(source)))
        room = target[HEADER_BYTES : HEADER_BYTES + len(source)]
        if _constant(source):
            mode, size = RUN, 1
            room[0] = source[0]
        else:
            mode, size = CODED, self._body.encode(source, room) if len(source) else -1
            if not 0 <= size < len(source):
                mode, size = STORED, len(source)
                room[:] = source
        head = Frame(self.name, mode, len(source), size).pack()
        check = self._body.check(head, room[:size])
        target[:HEADER_BYTES] = np.frombuffer(head + check.to_bytes(8, "little"), np.uint8)
        return HEADER_BYTES + size

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        source, target = bytes_of("data", data), bytes_of("out", out)
        frame = open_frame(self.name, source, len(target))
        body = source[HEADER_BYTES:]
        found = int.from_bytes(source[16:HEADER_BYTES].tobytes(), "little")
        if self._body.check(source[:16].tobytes(), body) != found:
            raise refusal(self.name, "its check differs")
        if frame.mode == STORED:
            target[:] = body
        elif frame.mode == RUN:
            target[:] = body[0]
        else:
            status = self._body.decode(body, target)
            if status:
                raise refusal(self.name, REFUSALS[status])

    def warm_up(self) -> float:
        """Compile every driver, or load it from Numba's cache; return the seconds that took."""
        began = time.perf_counter()
        symbols = (torch.arange(1000) ** 2 % 7).to(torch.uint8)
        coded, out = torch.empty(self.bound(1000), dtype=torch.uint8), torch.empty_like(symbols)
        self.decode(coded[: self.encode(symbols, coded)], out)
        return time.perf_counter() - began


def _constant(symbols: Bytes) -> bool:
    """Return whether there are symbols and all are equal; the first few decide for most."""
    return len(symbols) > 0 and all(bool((part == symbols[0]).all()) for part in (symbols[:256], symbols))
