"""The Numba backend of the coders: one class for each coder, given the variants of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.errors import BackendError
from gradwire.kernels.entropy.base import SCALAR, Body, Bytes, Variants

try:
    from gradwire.kernels.checksum import loops as checksum_loops
    from gradwire.kernels.entropy import huffman_loops, rans_loops
except BackendError:
    raise
except ImportError as error:
    raise BackendError(f"coder backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error


def compiled_check(vectors: bool, head: bytes, body: Bytes) -> int:
    """Compute the check of 16 bytes of header and a body, in explicit vectors or by a plain loop."""
    words = np.array([int.from_bytes(head[:8], "little"), int.from_bytes(head[8:16], "little")], np.uint64)
    return int(checksum_loops.check(True if vectors else None, words, body))


class _Compiled:
    def __init__(self, variants: Variants) -> None:
        self.variants = variants
        self.backend = "cpu" if variants.vectors else "cpu-plain"
        self._check_in_vectors = variants.check != SCALAR

    def check(self, head: bytes, body: Bytes) -> int:
        return compiled_check(self._check_in_vectors, head, body)


class CompiledRans(_Compiled):
    """Compiled rANS; :class:`gradwire.kernels.entropy.reference.ReferenceRans` defines the bytes."""

    coder = "rans"

    def __init__(self, variants: Variants) -> None:
        super().__init__(variants)
        self._encoder = None if variants.encode == SCALAR else True
        self._decoder = _decoder_form(variants.decode)

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        return int(rans_loops.rans_encode(self._encoder, symbols, room))

    def decode(self, body: Bytes, out: Bytes) -> int:
        return int(rans_loops.rans_decode(self._decoder, body, out))


class CompiledHuffman(_Compiled):
    """Compiled Huffman coder; :class:`gradwire.kernels.entropy.reference.ReferenceHuffman` defines the bytes."""

    coder = "huffman"

    def encode(self, symbols: Bytes, room: Bytes) -> int:
        return int(huffman_loops.huffman_encode(symbols, room))

    def decode(self, body: Bytes, out: Bytes) -> int:
        return int(huffman_loops.huffman_decode(body, out))


def compiled_body(coder: str, variants: Variants) -> Body:
    """Return the compiled body of a coder with variants of its parts."""
    return CompiledRans(variants) if coder == "rans" else CompiledHuffman(variants)


def _decoder_form(variant: str) -> Any:
    """Return the argument whose type makes :func:`rans_loops.rans_decode` compile this form of the decoder."""
    if variant == SCALAR:
        return None
    # Imported here, so that a machine on which explicit vectors fail can still run the plain loops.
    from gradwire.kernels.entropy import rans_simd

    forms = {"simd": rans_simd.Expanded, "simd-widened": rans_simd.Widened, "simd-picked": rans_simd.Picked}
    return forms[variant]()
