# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops for planes of bytes, which LLVM turns into vectors by itself."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.compiled import Compiled, kept
from gradwire.kernels.numba_core.vectors import prefer_wide

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "cca510c049009733"


class PlanesLoops(Compiled):
    """The operations of the family ``planes``, compiled."""

    def split_planes(self, data, width, floating, planes):
        words, rows = data.numpy().view(f"<u{width}"), planes.numpy()
        if not words.flags.aligned:
            # Compiled code takes numbers at their natural addresses; those of a mapped file may lie elsewhere.
            words = words.copy()
        self.split(len(words), 64, width, lambda a, b: split_range(words, a, b, floating, rows))

    def join_planes(self, planes, width, floating, out):
        rows, words = planes.numpy(), out.numpy().view(f"<u{width}")
        target = words if words.flags.aligned else np.empty(len(words), words.dtype)
        self.split(len(words), 64, width, lambda a, b: join_range(rows, a, b, floating, target))
        if target is not words:
            words[:] = target


@njit(nogil=True)
def _write_plane(words, shift, row):
    """Write the bytes that begin at bit ``shift``."""
    for i in range(row.size):
        row[i] = np.uint8(words[i] >> shift)


@njit(nogil=True)
def _write_turned_plane(words, shift, row):
    """Write the bytes that begin at bit ``shift`` of words that are rotated to the left by one bit."""
    kind = words.dtype.type
    one, top = kind(1), kind(8 * words.itemsize - 1)
    for i in range(row.size):
        row[i] = np.uint8(kind(kind(words[i] << one) | kind(words[i] >> top)) >> shift)


@kept(DIGEST)
def split_range(words, begin, end, floating, planes):
    """Write the planes of the words ``begin .. end``."""
    prefer_wide()
    part, width = words[begin:end], words.itemsize
    for place in range(width):
        shift = words.dtype.type(8 * (width - 1 - place))
        row = planes[place][begin:end]
        if floating:
            _write_turned_plane(part, shift, row)
        else:
            _write_plane(part, shift, row)


@njit(nogil=True)
def _join(first, second, third, fourth, out):
    """Write words of up to four bytes, of which the first planes are the highest."""
    kind, width = out.dtype.type, out.itemsize
    for i in range(out.size):
        word = kind(first[i])
        if width > 1:
            word = kind(kind(word << kind(8)) | kind(second[i]))
        if width > 2:
            word = kind(kind(word << kind(8)) | kind(third[i]))
            word = kind(kind(word << kind(8)) | kind(fourth[i]))
        out[i] = word


@njit(nogil=True)
def _turn_back(words):
    """Rotate words to the right by one bit."""
    kind = words.dtype.type
    one, top = kind(1), kind(8 * words.itemsize - 1)
    for i in range(words.size):
        words[i] = kind(kind(words[i] >> one) | kind(words[i] << top))


@kept(DIGEST)
def join_range(planes, begin, end, floating, out):
    """Write the words ``begin .. end``, given their planes."""
    prefer_wide()
    width = out.itemsize
    # Parts that stay in the first-level cache until they have been turned back.
    for at in range(begin, end, 4096):
        stop = min(at + 4096, end)
        part = out[at:stop]
        if width == 8:
            kind = out.dtype.type
            for i in range(part.size):
                part[i] = kind(0)
            for place in range(width):
                row, shift = planes[place][at:stop], kind(8 * (width - 1 - place))
                for i in range(part.size):
                    part[i] |= kind(kind(row[i]) << shift)
        else:
            last = width - 1
            _join(
                planes[0][at:stop], planes[min(1, last)][at:stop], planes[min(2, last)][at:stop],
                planes[last][at:stop], part,
            )  # fmt: skip
        if floating:
            _turn_back(part)
