# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The compiled checksum, with a plain body: one pass over the bytes, by the body that the first argument chooses."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.checksum import reference, simd
from gradwire.kernels.numba_core.compiled import copy_into, either, kept
from gradwire.kernels.numba_core.vectors import prefer_wide

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "c5f4c3a29bc483cc"


_u64 = np.uint64
_HALF = _u64(32)


_BLOCK = reference.BLOCK_BYTES
_START, _SEED, _FACTOR = _u64(reference.START), _u64(reference.SEED), _u64(reference.MULTIPLIER)


@njit(nogil=True)
def plain_check_rows(data, rows, sums):
    words = data[: 128 * rows]
    for row in range(rows):
        for lane in range(16):
            at = 128 * row + 8 * lane
            word = _u64(0)
            for octet in range(8):
                word |= _u64(words[at + octet]) << _u64(8 * octet)
            mixed = _u64((sums[lane] ^ word) * _FACTOR)
            sums[lane] = mixed ^ (mixed >> _HALF)


_check_rows = either(plain_check_rows, simd.check_rows)


@njit(nogil=True)
def _sum_block(variant, body, sums):
    """Write the sums of a block, whose last row may be partial."""
    for lane in range(16):
        sums[lane] = _START * _u64(lane + 1)
    rows = body.size // 128
    _check_rows(variant, body, rows, sums)
    if body.size > 128 * rows:
        last = np.zeros(128, np.uint8)
        copy_into(last[: body.size - 128 * rows], body[128 * rows :])
        _check_rows(variant, last, 1, sums)


@kept(DIGEST)
def check(variant, head, body):
    """Compute the checksum of the words of a header (uint64) and a body (uint8)."""
    prefer_wide()
    sums, block = np.empty(16, np.uint64), np.empty(16, np.uint64)
    _sum_block(variant, body[:_BLOCK], sums)
    for begin in range(_BLOCK, body.size, _BLOCK):
        _sum_block(variant, body[begin : begin + _BLOCK], block)
        for lane in range(16):
            mixed = (sums[lane] ^ block[lane]) * _FACTOR
            sums[lane] = mixed ^ (mixed >> _u64(32))
    total = _SEED
    for value in head:
        total = (total ^ value) * _FACTOR
        total ^= total >> _u64(32)
    for value in sums:
        total = (total ^ value) * _FACTOR
        total ^= total >> _u64(32)
    return total


@kept(DIGEST)
def row_checksums(variant, flat, stride, length, heads, out):
    """Write the checksum of each row of heads with the ``length`` bytes of a row; rows are ``stride`` bytes apart."""
    for row in range(len(heads)):
        out[row] = check(variant, heads[row], flat[row * stride : row * stride + length])
