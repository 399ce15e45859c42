"""A lossless code of state: bytes of a tensor in pieces, each coded by itself.

Parameters, momenta and gradients are floating-point numbers of which the exponents take few values, and the lowest
bits of the mantissas are noise. A piece is written in one of three forms, whichever fits:

- *few words*: its distinct words, if there are at most 255, and the number of each element's word. So gradients of
  ternary and quantised methods, and zeros, take few bits.
- *planes*: the first bytes of all elements, then the second bytes, and so on, each plane by itself under the entropy
  coder rANS, which leaves as they are those that it cannot shorten. The sign is moved behind the mantissa first, so
  that the highest byte of a float32 is its exponent.
- *plain*: as it is.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import GradwireError, PayloadError
from gradwire.kernels import Coder, get_kernels

Octets = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 20
"""Bytes of a piece, at most: a multiple of the bytes of any element."""

PLAIN, PLANES, WORDS = 0, 1, 2
"""First byte of a coded piece."""

CODER = "rans"
MOST_WORDS = 255
SAMPLE = 1 << 12
_LENGTH = struct.Struct("<I")


def warm_up() -> None:
    """Compile what the code needs, or load it from the disk."""
    get_kernels("auto").warm_up((CODER,))


def _coder() -> Coder:
    return get_kernels("auto").coder(CODER)


def encode(octets: Octets, width: int, floating: bool) -> bytes:
    """Return a piece in its shortest form.

    Args:
        octets: Bytes of whole elements, at most :data:`PIECE_BYTES`.
        width: Bytes of an element: 1, 2, 4 or 8.
        floating: True if an element's highest bit is a sign.
    """
    words = octets.view(f"<u{width}")
    parts = _few_words(words)
    if parts is None:
        parts = [bytes([PLANES]), *(_section(plane) for plane in _planes(words, width, floating))]
    if sum(map(len, parts)) > len(octets):
        return bytes([PLAIN]) + octets.tobytes()
    return b"".join(parts)


def decode(data: bytes, size: int, width: int, floating: bool) -> Octets:
    """Return the bytes of a piece.

    Args:
        data: What :func:`encode` returned.
        size: Bytes of the piece.
        width, floating: As for :func:`encode`.

    Raises:
        PayloadError: it is not such a piece.
    """
    try:
        found = _decoded(data, size, width, floating)
    except (GradwireError, ValueError, IndexError, struct.error) as error:
        raise PayloadError(f"a piece of state cannot be decoded: {str(error)[:200]}") from None
    if found is None or len(found) != size:
        raise PayloadError("a piece of state has another length")
    return found


def _decoded(data: bytes, size: int, width: int, floating: bool) -> Octets | None:
    form, body = data[0], np.frombuffer(data, np.uint8, offset=1)
    if form == PLAIN:
        return body.copy()
    count = size // width
    if form == WORDS:
        number = int(body[0])
        words = np.frombuffer(body[1 : 1 + number * width].tobytes(), f"<u{width}")
        symbols, end = _opened(body, 1 + number * width, count)
        if end != len(body) or len(words) != number or (count and int(symbols.max()) >= number):
            return None
        return words[symbols].view(np.uint8)
    if form != PLANES:
        return None
    planes, at = np.empty((count, width), np.uint8), 0
    for place in reversed(range(width)):
        planes[:, place], at = _opened(body, at, count)
    if at != len(body):
        return None
    words = planes.reshape(-1).view(f"<u{width}")
    if floating:
        words = words >> _one(width) | words << _top(width)
    return words.view(np.uint8)


def _planes(words: npt.NDArray[Any], width: int, floating: bool) -> list[Octets]:
    """Return the bytes of all elements by their place, the highest first."""
    if floating:
        words = words << _one(width) | words >> _top(width)
    rows = words.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(rows[:, place]) for place in reversed(range(width))]


def _few_words(words: npt.NDArray[Any]) -> list[bytes] | None:
    """Return the form *few words*; None if there are too many."""
    distinct = np.unique(words[:: max(1, len(words) // SAMPLE)])
    if not 0 < len(distinct) <= MOST_WORDS // 2:
        return None
    symbols = np.minimum(np.searchsorted(distinct, words), len(distinct) - 1)
    missed = distinct[symbols] != words
    if missed.any():
        distinct = np.union1d(distinct, words[missed])
        if len(distinct) > MOST_WORDS:
            return None
        symbols = np.searchsorted(distinct, words)
    return [bytes([WORDS, len(distinct)]), distinct.tobytes(), _section(symbols.astype(np.uint8))]


def _section(symbols: Octets) -> bytes:
    coder = _coder()
    out = torch.empty(coder.bound(len(symbols)), dtype=torch.uint8)
    size = coder.encode(torch.from_numpy(symbols), out)
    return _LENGTH.pack(size) + out.numpy()[:size].tobytes()


def _opened(body: Octets, at: int, count: int) -> tuple[Octets, int]:
    """Return the symbols of a section, and where it ends."""
    begin = at + _LENGTH.size
    (size,) = _LENGTH.unpack(body[at:begin].tobytes())
    out = torch.empty(count, dtype=torch.uint8)
    section = body[begin : begin + size].copy()
    _coder().decode(torch.from_numpy(section), out)
    return out.numpy(), begin + size


def _one(width: int) -> Any:
    return np.dtype(f"<u{width}").type(1)


def _top(width: int) -> Any:
    return np.dtype(f"<u{width}").type(8 * width - 1)
