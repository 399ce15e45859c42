# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Scalar body of products with thin factors, with the signature of the explicit-vector one."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.table import LANES

__all__ = ["dot"]

_f32 = np.float32


@njit(nogil=True)
def dot(a, b):
    sums = np.zeros(LANES, np.float32)
    for j in range(a.size):
        sums[j % LANES] += _f32(a[j] * b[j])
    half = LANES // 2
    while half:
        for lane in range(half):
            sums[lane] += sums[lane + half]
        half //= 2
    return sums[0]
