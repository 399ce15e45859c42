"""What an entropy coder offers, the frame that all coders share, and the checks made before memory is touched."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels.entropy.variants import Variants

__all__ = [
    "CODED",
    "CODERS",
    "CODER_IDS",
    "HEADER_BYTES",
    "RUN",
    "STORED",
    "Bytes",
    "Coder",
    "Frame",
    "bytes_of",
    "entropy_bits",
    "open_frame",
    "refusal",
]

Bytes = npt.NDArray[np.uint8]

CODER_IDS = {"rans": 1, "huffman": 2}
CODERS = tuple(CODER_IDS)

HEADER_BYTES = 24
"""Bytes of the frame: coder, mode, symbols, bytes of the body, check."""

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
        """Which variant of each part runs; None in a backend that has one of each."""
        ...

    def bound(self, symbols: int) -> int:
        """Return the most bytes that :meth:`encode` may need, header, table and check included: ``24 + symbols``."""
        ...

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        """Code ``symbols`` (uint8 ``[n]``) into ``out`` (uint8, at least ``bound(n)``); return the bytes written.

        What lies in ``out`` behind them is unspecified, up to ``bound(n)``.

        Raises:
            HyperparameterError: a tensor is not a contiguous vector of uint8, or ``out`` is too short.
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
        """Compile everything that may be called later; return the seconds it took."""
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
    """Return a tensor's memory as an array; refuse one that is no contiguous vector of bytes on the CPU."""
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
    """The header of a coded section, its check aside.

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
    """Make the error of a section that cannot be decoded."""
    return PayloadError(
        f"{coder} section refused: {reason}. The bytes were damaged on the way or are of another round, method or "
        "version: check that all ranks run the same gradwire and the same method"
    )


def open_frame(coder: str, data: Bytes, symbols: int) -> Frame:
    """Read and judge a header, all but its check.

    Raises:
        PayloadError: a field is not what it must be for ``symbols`` symbols in ``len(data)`` bytes.
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
