"""A lossless code of numbers: bytes of a tensor in pieces, each coded by itself.

Parameters, momenta and gradients are floating-point numbers of which the exponents take few values, and the lowest
bits of the mantissas are noise. A piece is written in one of three forms, whichever fits:

- *few words*: its distinct words, if there are at most 255, and the number of each element's word. So gradients of
  ternary and quantised methods, and zeros, take few bits.
- *planes*: the first bytes of all elements, then the second bytes, and so on, each plane by itself under the entropy
  coder rANS, which leaves as they are those that it cannot shorten. The sign is moved behind the mantissa first, so
  that the highest byte of a float32 or bfloat16 is its exponent.
- *plain*: as it is.

``docs/wire-format.md`` states the bytes. Weights that are published and state for newcomers are coded so.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import GradwireError, PayloadError
from gradwire.kernels.backends import get_kernels
from gradwire.kernels.entropy.base import HEADER_BYTES, SectionCoder, entropy_bits

Octets = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 20
"""Bytes of a piece, at most: a multiple of the bytes of any element."""

PLAIN, PLANES, WORDS = 0, 1, 2
"""First byte of a coded piece."""

CODER = "rans"
FAMILIES = ("planes", CODER)
"""What a piece is coded by."""

MOST_WORDS = 255
_SAMPLES = (1 << 9, 1 << 12)
_LENGTH = struct.Struct("<I")
_SECTION_BYTES = _LENGTH.size + HEADER_BYTES

_ROWS, _ROW = 16, 256
_NOISE_BITS = 7.75
"""Bits of a byte, by the entropy of a sample, from which on a plane is stored as it is.

Coding what hardly shrinks, such as mantissas, would take as long as coding the exponents, on both sides.
"""


def warm_up() -> None:
    """Compile what the code needs, or load it from the disk."""
    get_kernels("auto").warm_up(FAMILIES)


def bound(size: int, width: int) -> int:
    """Return the bytes that a piece of ``size`` bytes takes while it is encoded; it ends with ``size + 1`` at most."""
    return 1 + size + max(width * _SECTION_BYTES, 1 + MOST_WORDS * width + _SECTION_BYTES)


def encode(octets: Octets, width: int, floating: bool) -> bytes:
    """Return a piece in a short form.

    Args:
        octets: Bytes of whole elements, at most :data:`PIECE_BYTES`.
        width: Bytes of an element: 1, 2, 4 or 8.
        floating: True if an element's highest bit is a sign.
    """
    out = np.empty(bound(len(octets), width), np.uint8)
    return out[: encode_into(octets, width, floating, out)].tobytes()


def encode_into(octets: Octets, width: int, floating: bool, out: Octets) -> int:
    """Write a piece in a short form, and return the number of its bytes, at most ``len(octets) + 1``.

    Args:
        octets, width, floating: As for :func:`encode`.
        out: Takes the piece; it has room for :func:`bound` bytes.
    """
    words = octets.view(f"<u{width}")
    found = _few_words(words)
    if found is not None:
        distinct, symbols = found
        out[0], out[1] = WORDS, len(distinct)
        end = 2 + distinct.nbytes
        out[2:end] = distinct.view(np.uint8)
        end = _put(symbols, out, end, noise=False)
    else:
        planes = torch.empty(width, len(words), dtype=torch.uint8, device="cpu")
        get_kernels("auto").split_planes(torch.from_numpy(octets), width, floating, planes)
        out[0], end = PLANES, 1
        for plane in planes.numpy():
            end = _put(plane, out, end, noise=_is_noise(plane))
    if end > len(octets):
        out[0], end = PLAIN, 1 + len(octets)
        out[1:end] = octets
    return end


def decode(data: bytes, size: int, width: int, floating: bool) -> Octets:
    """Return the bytes of a piece.

    Args:
        data: What :func:`encode` returned.
        size: Bytes of the piece.
        width, floating: As for :func:`encode`.

    Raises:
        PayloadError: it is not such a piece.
    """
    out = np.empty(size, np.uint8)
    # Compiled code takes arrays that may be written to.
    decode_into(np.frombuffer(bytearray(data), np.uint8), out, width, floating)
    return out


def decode_into(data: Octets, out: Octets, width: int, floating: bool) -> None:
    """Write the bytes of a piece.

    Args:
        data: The coded piece.
        out: Takes the piece, all of whose bytes are written.
        width, floating: As for :func:`encode`.

    Raises:
        PayloadError: it is not such a piece; some of ``out`` may have been written.
    """
    try:
        whole = _decode(data, out, width, floating)
    except (GradwireError, ValueError, IndexError, struct.error) as error:
        raise PayloadError(f"a coded piece cannot be decoded: {str(error)[:200]}") from None
    if not whole:
        raise PayloadError("a coded piece has another length")


def _decode(data: Octets, out: Octets, width: int, floating: bool) -> bool:
    """Write the bytes of a piece; return whether the lengths fit together."""
    form, count = int(data[0]), len(out) // width
    if form == PLAIN:
        if len(data) != 1 + len(out):
            return False
        out[:] = data[1:]
        return True
    if form == WORDS:
        number = int(data[1])
        at = 2 + number * width
        words = data[2:at].copy().view(f"<u{width}")
        symbols = np.empty(count, np.uint8)
        end = _get(data, at, symbols)
        if end != len(data) or len(words) != number or (count and int(symbols.max()) >= number):
            return False
        out[:] = words[symbols].view(np.uint8)
        return True
    if form != PLANES:
        raise PayloadError(f"it has the unknown form {form}")
    planes, at = np.empty((width, count), np.uint8), 1
    for plane in planes:
        at = _get(data, at, plane)
    if at != len(data):
        return False
    get_kernels("auto").join_planes(torch.from_numpy(planes), width, floating, torch.from_numpy(out))
    return True


def _few_words(words: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Octets] | None:
    """Return the distinct words and the number of each element's word; None if there are too many."""
    for sample in _SAMPLES:
        distinct = np.unique(words[:: max(1, len(words) // sample)])
        if not 0 < len(distinct) <= MOST_WORDS // 2:
            return None
    symbols = np.minimum(np.searchsorted(distinct, words), len(distinct) - 1)
    missed = distinct[symbols] != words
    if missed.any():
        distinct = np.union1d(distinct, words[missed])
        if len(distinct) > MOST_WORDS:
            return None
        symbols = np.searchsorted(distinct, words)
    return distinct, symbols.astype(np.uint8)


def _is_noise(plane: Octets) -> bool:
    """Return whether a sample of a plane hardly shrinks: runs of neighbours, some way apart."""
    if len(plane) < _ROWS * _ROW:
        return False
    sample = plane[: len(plane) // _ROWS * _ROWS].reshape(_ROWS, -1)[:, :_ROW].reshape(-1)
    return entropy_bits(torch.from_numpy(sample)) > _NOISE_BITS * len(sample)


def _coder() -> SectionCoder:
    return get_kernels("auto").coder(CODER)


def _put(symbols: Octets, out: Octets, at: int, noise: bool) -> int:
    """Write a section behind its length; return where it ends."""
    begin = at + _LENGTH.size
    room, source = torch.from_numpy(out[begin:]), torch.from_numpy(symbols)
    size = _coder().store(source, room) if noise else _coder().encode(source, room)
    out[at:begin] = np.frombuffer(_LENGTH.pack(size), np.uint8)
    return begin + size


def _get(data: Octets, at: int, symbols: Octets) -> int:
    """Read a section behind its length, of as many symbols as there is room for; return where it ends."""
    begin = at + _LENGTH.size
    size = int(_LENGTH.unpack(data[at:begin].tobytes())[0])
    _coder().decode(torch.from_numpy(data[begin : begin + size]), torch.from_numpy(symbols))
    return begin + size
