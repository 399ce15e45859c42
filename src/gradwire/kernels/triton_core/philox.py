# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The random words of ``philox.py``, as Triton computes them."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.kernels import philox as definition

__all__ = ["philox", "uniform"]

ROUNDS = tl.constexpr(definition.ROUNDS)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (tl.constexpr(word) for word in definition.MULTIPLIERS)
FIRST_STEP, SECOND_STEP = (tl.constexpr(word) for word in definition.KEY_STEPS)


@triton.jit
def philox(block, low, high, stream, key0, key1):
    """Return the four words, uint32, of counters ``(block, low, high, stream)``; signed integers count as unsigned."""
    c0 = block.to(tl.uint32)
    c1 = low.to(tl.uint32)
    c2 = high.to(tl.uint32)
    c3 = stream.to(tl.uint32)
    k0 = key0.to(tl.uint32)
    k1 = key1.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first_low = c0 * FIRST_MULTIPLIER
        first_high = tl.umulhi(c0, FIRST_MULTIPLIER)
        second_low = c2 * SECOND_MULTIPLIER
        second_high = tl.umulhi(c2, SECOND_MULTIPLIER)
        c0 = second_high ^ c1 ^ k0
        c1 = second_low
        c2 = first_high ^ c3 ^ k1
        c3 = first_low
        k0 = k0 + FIRST_STEP
        k1 = k1 + SECOND_STEP
    return c0, c1, c2, c3


@triton.jit
def uniform(w0, w1, w2, w3, PLANE: tl.constexpr):
    """Return the 24-bit integers of a plane, uint32, from the words of a group's blocks."""
    if PLANE == 0:
        word = w0
    elif PLANE == 1:
        word = w1
    elif PLANE == 2:
        word = w2
    elif PLANE == 3:
        word = w3
    else:
        word = ((w0 & 255) << 24) | ((w1 & 255) << 16) | ((w2 & 255) << 8)
    return word >> 8
