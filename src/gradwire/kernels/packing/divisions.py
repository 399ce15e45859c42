"""Division by the base of a layout, as multiplications."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from gradwire.errors import BackendError
from gradwire.kernels.packing.layout import DigitLayout

__all__ = ["divisions", "float_divisions", "reciprocal16", "reciprocal32"]


@cache
def reciprocal32(divisor: int) -> tuple[int, int, int]:
    """Give ``(multiplier, addend, shift)`` with ``v // divisor == (v * multiplier + addend) >> shift`` for 32-bit v.

    For an odd divisor either the multiplier rounded up or the one rounded down (with itself as addend) is exact and
    fits 32 bits (Robison, "N-bit unsigned division via N-bit multiply-add", ARITH 2005).

    Example:
        >>> multiplier, addend, shift = reciprocal32(7)
        >>> all((v * multiplier + addend) >> shift == v // 7 for v in (0, 6, 7, 2**32 - 2, 2**32 - 1))
        True
    """
    bits = divisor.bit_length() - 1
    shift = 32 + bits
    up = -(-(1 << shift) // divisor)
    if up * divisor - (1 << shift) <= 1 << bits:
        return up, 0, shift
    down = (1 << shift) // divisor
    return down, down, shift


def reciprocal16(divisor: int, largest: int) -> tuple[int, int]:
    """Give ``(multiplier, shift)``: ``v // divisor == (v * multiplier >> 16) >> shift`` for ``0 <= v <= largest``."""
    for shift in range(16):
        multiplier = -(-(1 << (16 + shift)) // divisor)
        excess = multiplier * divisor - (1 << (16 + shift))
        if multiplier < 1 << 16 and excess * largest < 1 << (16 + shift):
            return multiplier, shift
    raise BackendError(
        f"no 16-bit reciprocal of {divisor} up to {largest}: this is a defect of gradwire, please report it"
    )


@cache
def divisions(layout: DigitLayout) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Give the reciprocals of a layout's base for 32 bits; of base, base^2, base^4 for five digits in 16 bits."""
    base = layout.base
    narrow: tuple[int, ...] = (0,) * 6
    if layout.digits == 5 and layout.word_bytes <= 2:
        largest = max(base**5 - 1, 255 if layout.word_bytes == 1 else 0)
        narrow = tuple(part for power in (1, 2, 4) for part in reciprocal16(base**power, largest))
    return reciprocal32(base), narrow


PART = 1 << 22
"""Numbers below this are divided in float32."""


@cache
def float_divisions(layout: DigitLayout) -> tuple[int, int, npt.NDArray[np.float32]]:
    """Give ``(low, base^low, inverse)``: how many digits the lower part of a word has, and ``fl(1 / base^p)``.

    For whole ``v`` below 2^22 and ``d = base^p``, ``v // d == trunc(fl((v + 1/2) * fl(1/d)))``: the exact product lies
    at least ``1 / (2 d)`` from a whole number, and the two roundings move it by less than ``(v + 1/2) / d * 2^-23``.
    Words of one or two bytes are below that; one of four is cut by ``base^low``, in float64, so that both parts are.
    """
    base, low = layout.base, layout.digits
    if layout.word_bytes == 4:
        low = 0
        while base ** (low + 1) <= PART:
            low += 1
        if low >= layout.digits or base**low * PART < 256**4:
            raise BackendError(f"words of {layout} have no such parts: this is a defect of gradwire, please report it")
    inverse = (1.0 / np.float64(base) ** np.arange(layout.digits)).astype(np.float32)
    inverse.flags.writeable = False
    return low, base**low, inverse
