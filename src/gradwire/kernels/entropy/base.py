"""Entropy coders: their interface, the variants of their parts, and the checked sections that they share."""

from __future__ import annotations

import struct
import time
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError, PayloadError

SCALAR = "scalar"
PARTS = ("check", "encode", "decode")

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "rans": {
        "check": ("simd", SCALAR),
        "encode": ("simd", SCALAR),
        "decode": ("simd", "simd-widened", "simd-picked", SCALAR),
    },
    "huffman": {"check": ("simd", SCALAR), "encode": (SCALAR,), "decode": (SCALAR,)},
}
"""Variants by coder and part, explicit vectors first. All variants of a part give the same bytes.

``rans_simd.py`` describes the forms of the rANS decoder.
"""


@dataclass(frozen=True)
class Variants:
    """One variant of each part of a coder, by name.

    Example:
        >>> Variants("scalar", "scalar", "scalar").vectors
        False
    """

    check: str
    encode: str
    decode: str

    @property
    def vectors(self) -> bool:
        """True if any part runs in explicit vectors."""
        return any(variant != SCALAR for variant in astuple(self))


Bytes = npt.NDArray[np.uint8]

CODER_IDS = {"rans": 1, "huffman": 2}
CODERS = tuple(CODER_IDS)

HEADER_BYTES = 24
"""Bytes of a section's header: coder, mode, symbols, bytes of the body, check."""

STORED, RUN, CODED = 0, 1, 2

MAX_SYMBOLS = 2**31 - 1

_FIELDS = struct.Struct("<BBHIII")

REFUSALS = {
    1: "the body is shorter than its own tables",
    2: "the table of the code is not one that an encoder writes",
    3: "the lengths in the body do not fit together",
    4: "the coded symbols end before or after the body does",
}


class Coder(Protocol):
    """A static order-0 entropy coder of bytes. All backends write the same bytes; ``reference`` defines them."""

    name: str
    backend: str

    @property
    def variants(self) -> Variants | None:
        """The variants of parts in use; None in a backend that has one variant of each."""
        ...

    def bound(self, symbols: int) -> int:
        """Return the largest number of bytes that :meth:`encode` may need, with header and table: ``24 + symbols``."""
        ...

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        """Code ``symbols`` (uint8 ``[n]``) into ``out`` (uint8, at least ``bound(n)``); return the bytes written.

        The bytes of ``out`` after them are unspecified, up to ``bound(n)``.

        Raises:
            HyperparameterError: a tensor is not a contiguous vector of uint8 on the CPU, ``out`` is too short, or there
                are more than :data:`MAX_SYMBOLS` symbols.
        """
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Invert :meth:`encode`: all of ``data`` (uint8) into all of ``out`` (uint8).

        Raises:
            PayloadError: the bytes are not what an encoder wrote for that many symbols; ``out`` is then unspecified.
            HyperparameterError: a tensor is not a contiguous vector of uint8.
        """
        ...

    def warm_up(self) -> float:
        """Compile all functions of the coder; return the seconds it took."""
        ...


def entropy_bits(symbols: torch.Tensor) -> float:
    """Return the empirical order-0 entropy of bytes, in bits for all of them: ``sum over s of c_s log2(n / c_s)``.

    Example:
        >>> entropy_bits(torch.tensor([0, 0, 1, 1], dtype=torch.uint8))
        4.0
    """
    counts = np.bincount(bytes_of("symbols", symbols), minlength=256)
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum()) if len(counts) else 0.0


def bytes_of(name: str, tensor: torch.Tensor, at_least: int = 0) -> Bytes:
    """Return a tensor's memory as an array; refuse a tensor that is no contiguous vector of bytes on the CPU."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise HyperparameterError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: a contiguous vector of "
            "torch.uint8 on the CPU is needed"
        )
    if tensor.numel() < at_least:
        raise HyperparameterError(f"{name} has {tensor.numel()} bytes, at least {at_least} are needed")
    if max(tensor.numel(), at_least - HEADER_BYTES) > MAX_SYMBOLS + HEADER_BYTES:
        raise HyperparameterError(f"{name} has {tensor.numel()} bytes: cut it, a section has at most {MAX_SYMBOLS}")
    array: Bytes = tensor.detach().numpy()
    return array


@dataclass(frozen=True)
class Frame:
    """The header of a coded section, without its check.

    Example:
        >>> Frame("rans", 2, 1000, 500).pack().hex()
        '01020000e8030000f401000000000000'
    """

    coder: str
    mode: int
    symbols: int
    body_bytes: int

    def pack(self) -> bytes:
        """Return the first 16 bytes of the header."""
        return _FIELDS.pack(CODER_IDS[self.coder], self.mode, 0, self.symbols, self.body_bytes, 0)


def refusal(coder: str, reason: str) -> PayloadError:
    """Return the error for a section that cannot be decoded."""
    return PayloadError(
        f"{coder} section refused: {reason}. The bytes were damaged on the way or are of another round, method or "
        "version: check that all ranks run the same gradwire and the same method"
    )


def open_frame(coder: str, data: Bytes, symbols: int) -> Frame:
    """Read and verify a header, except its check.

    Raises:
        PayloadError: a field does not match ``symbols`` symbols in ``len(data)`` bytes.
    """
    if len(data) < HEADER_BYTES:
        raise refusal(coder, f"{len(data)} bytes are fewer than its header's {HEADER_BYTES}")
    kind, mode, zero, found, body, also_zero = _FIELDS.unpack(data[: _FIELDS.size].tobytes())
    if kind != CODER_IDS[coder] or mode > CODED or zero or also_zero:
        raise refusal(coder, f"its header starts with {data[:4].tobytes().hex()}, which no such encoder writes")
    if found != symbols:
        raise refusal(coder, f"it holds {found} symbols where {symbols} are expected")
    if body != len(data) - HEADER_BYTES:
        raise refusal(coder, f"it announces {body} bytes and has {len(data) - HEADER_BYTES}")
    fitting = {STORED: body == symbols, RUN: body == 1 and symbols > 0, CODED: body < symbols}
    if not fitting[mode]:
        raise refusal(coder, f"{body} bytes of body do not fit mode {mode} and {symbols} symbols")
    return Frame(coder, mode, symbols, body)


class Body(Protocol):
    """The part of a coder that a backend implements: bodies of sections, and their check."""

    coder: str
    backend: str

    @property
    def variants(self) -> Variants | None:
        """The variants of parts in use; None in a backend that has one variant of each."""
        ...

    def check(self, head: bytes, body: Bytes) -> int:
        """Compute the check of 16 bytes of header and a body."""
        ...

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        """Write the coded body of ``symbols``, which are not all equal, into ``room``, which has their length.

        Returns the number of bytes written, or -1 if ``room`` is too short.
        """
        ...

    def decode(self, body: Bytes, out: Bytes) -> int:
        """Invert :meth:`encode`; return 0, or the key in ``REFUSALS`` of the fault of ``body``."""
        ...


class SectionCoder:
    """A :class:`Coder` of checked sections: adds header, check, and modes of incompressible and equal symbols."""

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
        return self._frame(mode, len(source), size, target)

    def store(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        """Write a section that :meth:`decode` reads, with ``symbols`` as they are: for symbols that hardly shrink.

        Arguments, result and errors are those of :meth:`encode`; the bytes written are ``bound(n)``.
        """
        source = bytes_of("symbols", symbols)
        target = bytes_of("out", out, self.bound(len(source)))
        target[HEADER_BYTES : HEADER_BYTES + len(source)] = source
        return self._frame(STORED, len(source), len(source), target)

    def _frame(self, mode: int, symbols: int, size: int, target: Bytes) -> int:
        """Write the header before a body of ``size`` bytes that is in its place; return the bytes of both."""
        head = Frame(self.name, mode, symbols, size).pack()
        check = self._body.check(head, target[HEADER_BYTES : HEADER_BYTES + size])
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
        """Compile all functions, or load them from Numba's cache; return the seconds it took."""
        began = time.perf_counter()
        symbols = (torch.arange(1000, device="cpu") ** 2 % 7).to(torch.uint8)
        coded, out = torch.empty(self.bound(1000), dtype=torch.uint8, device="cpu"), torch.empty_like(symbols)
        self.decode(coded[: self.encode(symbols, coded)], out)
        return time.perf_counter() - began


def _constant(symbols: Bytes) -> bool:
    """Return whether there are symbols and all are equal; the first 256, checked first, usually decide."""
    return len(symbols) > 0 and all(bool((part == symbols[0]).all()) for part in (symbols[:256], symbols))
