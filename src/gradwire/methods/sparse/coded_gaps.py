"""Ascending positions as symbols for an entropy coder, and bits beside them."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import PayloadError
from gradwire.kernels import Coder

__all__ = ["decode_gaps", "encode_gaps", "gaps_of", "symbols_of"]

HEAD = struct.Struct("<I")
"""Bytes of the coded symbols."""

PLAIN = 3
"""Bits of a gap that its symbol tells: all of a gap below 8, of a larger one the first."""

MOST_SYMBOL = 4 + 4 * (31 - PLAIN) + 3
"""The symbol of gaps of 31 bits that begin with three ones."""

Integers = npt.NDArray[np.int64]


def symbols_of(gaps: Integers) -> tuple[npt.NDArray[np.uint8], Integers]:
    """Return a symbol for each gap, and how many of its lowest bits the symbol does not tell.

    A gap below 8 is its own symbol. A larger one of n bits has n - 3 bits left, and the symbol ``4 (n - 3) + 4`` plus
    the number that its second and third bit are: four symbols for each length.

    Example:
        >>> symbols, left = symbols_of(np.array([0, 7, 8, 9, 10, 1000]))
        >>> symbols.tolist(), left.tolist()
        ([0, 7, 8, 8, 9, 35], [0, 0, 1, 1, 1, 7])
    """
    length = np.frexp(gaps.astype(np.float64))[1].astype(np.int64)
    left = np.maximum(length - PLAIN, 0)
    return np.where(left == 0, gaps, 4 + 4 * left + ((gaps >> left) & 3)).astype(np.uint8), left


def gaps_of(index: torch.Tensor) -> Integers:
    """Return the number of positions that are left out before each of ``index``."""
    before = torch.cat([torch.tensor([-1]), index.long()])[: len(index)]
    gaps: Integers = (index.long() - before - 1).numpy()
    return gaps


def encode_gaps(index: torch.Tensor, coder: Coder) -> torch.Tensor:
    """Return the bytes of ascending positions (int32): the coded symbols of their gaps, then the bits that are left.

    The gap before a position is the number of positions left out there, as in :mod:`gradwire.kernels.indices`. Bits are
    packed from the lowest of each byte up, those of a gap from its lowest.
    """
    gaps = gaps_of(index)
    symbols, left = symbols_of(gaps)
    out = torch.empty(HEAD.size + coder.bound(len(symbols)), dtype=torch.uint8)
    used = coder.encode(torch.from_numpy(symbols), out[HEAD.size :])
    out[: HEAD.size] = torch.frombuffer(bytearray(HEAD.pack(used)), dtype=torch.uint8)
    owner, place = _bits(left)
    packed = np.packbits((gaps[owner] >> place & 1).astype(np.uint8), bitorder="little")
    return torch.cat([out[: HEAD.size + used], torch.from_numpy(packed)])


def decode_gaps(data: torch.Tensor, coder: Coder, count: int, numel: int) -> torch.Tensor:
    """Return the ``count`` positions (int32) that :func:`encode_gaps` has written.

    Raises:
        PayloadError: ``data`` is not what it writes for any ``count`` positions below ``numel``.
    """
    used = HEAD.unpack(data[: HEAD.size].numpy().tobytes())[0] if len(data) >= HEAD.size else len(data)
    if HEAD.size + used > len(data):
        raise PayloadError(f"coded positions of {len(data)} bytes whose symbols are said to take {used}")
    coded = torch.empty(count, dtype=torch.uint8)
    coder.decode(data[HEAD.size : HEAD.size + used], coded)
    symbols = coded.numpy().astype(np.int64)
    if np.any(symbols > MOST_SYMBOL):
        raise PayloadError("coded positions with symbols that no gap has")
    left = np.where(symbols < 1 << PLAIN, 0, symbols // 4 - 1)
    owner, place = _bits(left)
    bits = np.unpackbits(data[HEAD.size + used :].numpy(), bitorder="little")
    if len(bits) // 8 != -(-len(owner) // 8) or bits[len(owner) :].any():
        raise PayloadError(f"coded positions whose gaps take {len(owner)} bits beside their symbols, not {len(bits)}")
    gaps = np.where(left == 0, symbols, (4 + symbols % 4) << left)
    np.add.at(gaps, owner, bits[: len(owner)].astype(np.int64) << place)
    index = np.cumsum(gaps + 1) - 1
    if count and index[-1] >= numel:
        raise PayloadError(f"coded positions that go on to {index[-1]} of {numel}")
    return torch.from_numpy(index.astype(np.int32))


def _bits(left: Integers) -> tuple[Integers, Integers]:
    """Return of each bit beside the symbols whose it is, and its place there."""
    owner = np.repeat(np.arange(len(left)), left)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(left) - left, left)
