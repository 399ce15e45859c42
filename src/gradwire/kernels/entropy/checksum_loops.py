# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The compiled check: one pass over a body, in vectors or plain loops by the type of the first argument."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.entropy import checksum
from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide

__all__ = ["check"]

# Of all that this is compiled from, so that Numba drops what it kept when that changes (``make digests``).
DIGEST = "94a498b10cbe6a32"

_u64 = np.uint64
_START, _SEED, _FACTOR = _u64(checksum.START), _u64(checksum.SEED), _u64(checksum.MULTIPLIER)

_check_rows = either("check_rows", "entropy.checksum_scalar", "entropy.checksum_simd")


@njit(nogil=True, cache=True)
def check(variant, head, body):
    """Compute the check of 16 bytes of header (uint64 ``[2]``) and a body (uint8)."""
    prefer_wide()
    sums = np.empty(16, np.uint64)
    for lane in range(16):
        sums[lane] = _START * _u64(lane + 1)
    rows = body.size // 128
    _check_rows(variant, body, rows, sums)
    if body.size > 128 * rows:
        last = np.zeros(128, np.uint8)
        last[: body.size - 128 * rows] = body[128 * rows :]
        _check_rows(variant, last, 1, sums)
    total = _SEED
    for value in head:
        total = (total ^ value) * _FACTOR
        total ^= total >> _u64(32)
    for value in sums:
        total = (total ^ value) * _FACTOR
        total ^= total >> _u64(32)
    return total
