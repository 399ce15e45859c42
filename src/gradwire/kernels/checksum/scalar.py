# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The rows of the checksum in plain Numba, with the signature and promises of ``simd.py``."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.checksum.reference import MULTIPLIER

__all__ = ["check_rows"]

_u64 = np.uint64
_FACTOR, _HALF = _u64(MULTIPLIER), _u64(32)


@njit(nogil=True)
def check_rows(data, rows, sums):
    words = data[: 128 * rows]
    for row in range(rows):
        for lane in range(16):
            at = 128 * row + 8 * lane
            word = _u64(0)
            for octet in range(8):
                word |= _u64(words[at + octet]) << _u64(8 * octet)
            mixed = _u64((sums[lane] ^ word) * _FACTOR)
            sums[lane] = mixed ^ (mixed >> _HALF)
