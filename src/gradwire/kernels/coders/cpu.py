"""The Numba backend of the coders, in two variants: explicit vectors (``cpu``) and plain loops (``cpu-plain``)."""

from __future__ import annotations

import numpy as np

from gradwire.errors import BackendError
from gradwire.kernels.coders.base import Bytes

try:
    from gradwire.kernels.coders import drivers, huffman_drivers
except ImportError as error:
    raise BackendError(f"coder backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error

__all__ = ["CpuHuffman", "CpuRans"]


class _Compiled:
    def __init__(self, vectors: bool = True) -> None:
        self.backend = "cpu" if vectors else "cpu-plain"
        self._variant = True if vectors else None

    def check(self, head: bytes, body: Bytes) -> int:
        words = np.array([int.from_bytes(head[:8], "little"), int.from_bytes(head[8:16], "little")], np.uint64)
        return int(drivers.check(self._variant, words, body))


class CpuRans(_Compiled):
    """rANS; see :class:`gradwire.kernels.coders.reference.ReferenceRans` for what is computed."""

    coder = "rans"

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        return int(drivers.rans_encode(self._variant, symbols, room))

    def decode(self, body: Bytes, out: Bytes) -> int:
        return int(drivers.rans_decode(self._variant, body, out))


class CpuHuffman(_Compiled):
    """Huffman; see :class:`gradwire.kernels.coders.reference.ReferenceHuffman` for what is computed."""

    coder = "huffman"

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        return int(huffman_drivers.huffman_encode(symbols, room))

    def decode(self, body: Bytes, out: Bytes) -> int:
        return int(huffman_drivers.huffman_decode(body, out))
