# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Philox in plain Numba: the random words of one block, that is of five elements, at once."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

__all__ = ["five_words"]

# Numba widens 32-bit arithmetic to 64 bits unless every step is cast back.
_u32, _u64 = np.uint32, np.uint64
_MASK, _HALF = _u64(0xFFFFFFFF), _u64(32)
_M0, _M1 = _u64(MULTIPLIERS[0]), _u64(MULTIPLIERS[1])
_W0, _W1 = _u32(KEY_STEPS[0]), _u32(KEY_STEPS[1])


@njit(nogil=True)
def five_words(noise, lane):
    """Return the words of five planes, ``lane`` blocks on: Philox's four, and one made of their spare low bytes."""
    c0, c1 = _u64(noise.block + lane) & _MASK, noise.round & _MASK
    c2, c3 = noise.round >> _HALF, _u64(noise.stream)
    k0, k1 = noise.key0, noise.key1
    for _ in range(ROUNDS):
        p0, p1 = _u64(c0 * _M0), _u64(c2 * _M1)
        c0, c1 = _u64((p1 >> _HALF) ^ c1 ^ _u64(k0)), _u64(p1 & _MASK)
        c2, c3 = _u64((p0 >> _HALF) ^ c3 ^ _u64(k1)), _u64(p0 & _MASK)
        k0, k1 = _u32(k0 + _W0), _u32(k1 + _W1)
    spare = (c0 & _u64(255)) << _u64(24) | (c1 & _u64(255)) << _u64(16) | (c2 & _u64(255)) << _u64(8)
    return c0, c1, c2, c3, spare
