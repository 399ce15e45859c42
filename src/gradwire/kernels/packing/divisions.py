"""Layouts as compiled code takes them: division by the base is done by multiplications."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.errors import BackendError
from gradwire.kernels.packing.layout import DigitLayout

__all__ = ["WordTable", "reciprocal16", "word_table"]


def reciprocal16(divisor: int, largest: int) -> tuple[int, int]:
    """Return ``(multiplier, shift)``: ``v // divisor == (v * multiplier >> 16) >> shift`` for ``0 <= v <= largest``."""
    for shift in range(16):
        multiplier = -(-(1 << (16 + shift)) // divisor)
        excess = multiplier * divisor - (1 << (16 + shift))
        if multiplier < 1 << 16 and excess * largest < 1 << (16 + shift):
            return multiplier, shift
    raise BackendError(
        f"no 16-bit reciprocal of {divisor} up to {largest}: this is a defect of gradwire, please report it"
    )


PART = 1 << 22
"""Numbers below this are divided in float32."""


class WordTable(NamedTuple):
    """A :class:`DigitLayout` as compiled code takes it, with what it needs to divide by the base.

    For whole ``v`` below 2^22 and ``d = base^p``, ``v // d == trunc(fl((v + 1/2) * fl(1/d)))``: the exact product lies
    at least ``1 / (2 d)`` from a whole number, and the two roundings move it by less than ``(v + 1/2) / d * 2^-23``.
    Words of one or two bytes are below that; one of four is cut by ``base^low``, in float64, so that both parts are.

    Attributes:
        low: How many digits the lower part of a word has.
        power: ``base^low``.
        inverse: ``fl(1 / base^p)`` for each digit, float32 ``[digits]``.
        narrow: Where five digits fill 16 bits, multiplier and shift of :func:`reciprocal16` for base, base^2, base^4.
        largest: What the highest digit of a word is clamped to.
    """

    base: int
    digits: int
    word_bytes: int
    low: int
    power: int
    inverse: npt.NDArray[np.float32]
    narrow: tuple[int, ...]
    largest: int


@cache
def word_table(layout: DigitLayout, clamp: bool = True) -> WordTable:
    """Return the table of a layout.

    Args:
        layout: How digits are packed.
        clamp: Take a highest digit that no encoder writes for the largest, rather than for what it is.
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
    narrow: tuple[int, ...] = (0,) * 6
    if layout.digits == 5 and layout.word_bytes <= 2:
        largest = max(base**5 - 1, 255 if layout.word_bytes == 1 else 0)
        narrow = tuple(part for power in (1, 2, 4) for part in reciprocal16(base**power, largest))
    top = base - 1 if clamp else 256**layout.word_bytes
    return WordTable(base, layout.digits, layout.word_bytes, low, base**low, inverse, narrow, top)
