"""Packings, which convert the body of a section to the bytes that are sent, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Coder

LENGTH_BYTES = 4
"""Number of bytes of the length at the start of a body of type :class:`Measured`."""


class Packing(ABC):
    """Converts the body of a section, of ``size`` bytes, to at most ``bound`` bytes to send, and back.

    Attributes:
        size: Number of bytes of the body.
        bound: Largest number of bytes that :meth:`pack` writes.
        variable: True if that number depends on the values in the body.
    """

    size: int
    bound: int
    variable: bool = True

    @abstractmethod
    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        """Write the bytes to send to the start of ``out``; return their number."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        """Write the body that :meth:`pack` received; bytes that the encoder left unused are unspecified.

        Raises:
            PayloadError: ``data`` is not an output of :meth:`pack` for a body of this size.
        """


class Whole(Packing):
    """Sends the body unchanged."""

    variable = False

    def __init__(self, size: int) -> None:
        self.size = self.bound = size

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        out[: self.size].copy_(body)
        return self.size

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        if len(data) != self.size:
            raise PayloadError(f"a section of {len(data)} bytes where {self.size} are expected")
        body.copy_(data)


class EntropyCoded(Packing):
    """Sends the first ``plain`` bytes of the body unchanged, then a coder's bytes for the rest."""

    def __init__(self, size: int, plain: int, coder: Coder) -> None:
        self.size, self.plain, self.coder = size, plain, coder
        self.bound = plain + coder.bound(size - plain)

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        out[: self.plain].copy_(body[: self.plain])
        return self.plain + self.coder.encode(body[self.plain :].contiguous(), out[self.plain :])

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        if len(data) < self.plain:
            raise PayloadError(f"a section of {len(data)} bytes where at least {self.plain} are expected")
        body[: self.plain].copy_(data[: self.plain])
        self.coder.decode(data[self.plain :], body[self.plain :])


class Measured(Packing):
    """Sends the part of the body that its encoder used: its first four bytes are the length, including themselves."""

    def __init__(self, size: int) -> None:
        self.size = self.bound = size

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        used = _length_of(body)
        out[:used].copy_(body[:used])
        return used

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        said = _length_of(data) if len(data) >= LENGTH_BYTES else -1
        if said != len(data) or len(data) > self.size:
            raise PayloadError(f"a section of {len(data)} bytes that says it has {said}, where {self.size} fit")
        body[: len(data)].copy_(data)


def _length_of(body: torch.Tensor) -> int:
    return int.from_bytes(bytes(body[:LENGTH_BYTES].tolist()), "little")


class OrAbsent(Packing):
    """Sends the bytes of another packing, or no byte for an empty body, which is unpacked as zeros."""

    def __init__(self, inner: Packing) -> None:
        self._inner, self.size, self.bound = inner, inner.size, inner.bound

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        return self._inner.pack(body, out) if body.numel() else 0

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        if len(data):
            self._inner.unpack(data, body)
        else:
            body.zero_()


def packing(size: int, plain: int, coder: Coder | None) -> Packing:
    """Return the packing of a body, in which a coder, if there is one, shortens all but the first ``plain`` bytes."""
    return Whole(size) if coder is None or size <= plain else EntropyCoded(size, plain, coder)
