"""How the body of a section becomes the bytes that travel."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Coder

LENGTH_BYTES = 4
"""Bytes at the start of a body that tells its own length."""


class Packing(ABC):
    """A section's way from a body of ``size`` bytes to at most ``bound`` bytes on the wire, and back.

    Attributes:
        size: Bytes of the body.
        bound: Most bytes that :meth:`pack` writes.
        variable: Whether how many depends on what the body holds.
    """

    size: int
    bound: int
    variable: bool = True

    @abstractmethod
    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        """Write what travels to the start of ``out``; return how many bytes that are."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        """Write the body that :meth:`pack` was given; what an encoder left unused is unspecified.

        Raises:
            PayloadError: ``data`` is not what :meth:`pack` writes for a body of that size.
        """


class Whole(Packing):
    """The body as it is."""

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
    """The first ``plain`` bytes of the body as they are, and then a coder's bytes for the rest."""

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
    """As much of the body as its encoder used: its first four bytes say how much, themselves included."""

    def __init__(self, size: int) -> None:
        self.size = self.bound = size

    def pack(self, body: torch.Tensor, out: torch.Tensor) -> int:
        used = int(body[:LENGTH_BYTES].view(torch.int32))
        out[:used].copy_(body[:used])
        return used

    def unpack(self, data: torch.Tensor, body: torch.Tensor) -> None:
        said = int(data[:LENGTH_BYTES].clone().view(torch.int32)) if len(data) >= LENGTH_BYTES else -1
        if said != len(data) or len(data) > self.size:
            raise PayloadError(f"a section of {len(data)} bytes that says it has {said}, where {self.size} fit")
        body[: len(data)].copy_(data)


class OrAbsent(Packing):
    """As another packing has it, or no byte at all for an empty body; what is absent is unpacked as zeros."""

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
    """Return the packing of a body of which a coder, if there is one, shortens all but the first ``plain`` bytes."""
    return Whole(size) if coder is None or size <= plain else EntropyCoded(size, plain, coder)
