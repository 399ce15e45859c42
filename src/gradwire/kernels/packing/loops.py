# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled steps from packed digits of any layout to floats; see ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.numba_core.overloads import either
from gradwire.kernels.numba_core.vectors import prefer_wide

__all__ = ["digits_any", "end_streams", "sums_any"]

unpack_digits = either("unpack_digits", "packing.scalar", "packing.simd")
sum_words = either("sum_words", "packing.scalar", "packing.simd")
end_streams = either("end_streams", "packing.scalar", "packing.simd")


@njit(nogil=True)
def digits_any(variant, words, first, blocks, per_word, base, word_bytes, low, power, inverse, floats):
    """Write the digits of blocks of words of any width to ``floats``."""
    prefer_wide()
    if word_bytes == 1:
        unpack_digits(variant, words, first, np.uint8(0), blocks, per_word, base, low, power, inverse, floats)
    elif word_bytes == 2:
        unpack_digits(variant, words, first, np.uint16(0), blocks, per_word, base, low, power, inverse, floats)
    else:
        unpack_digits(variant, words, first, np.uint32(0), blocks, per_word, base, low, power, inverse, floats)


@njit(nogil=True)
def sums_any(variant, words, first, stride, number, blocks, per_word, base, word_bytes, low, power, inverse, floats):
    """Write the sums over rows of the digits of blocks of words of any width to ``floats``."""
    prefer_wide()
    if word_bytes == 1:
        sum_words(
            variant, words, first, stride, number, np.uint8(0), blocks, per_word, base, low, power, inverse, floats
        )  # fmt: skip
    elif word_bytes == 2:
        sum_words(
            variant, words, first, stride, number, np.uint16(0), blocks, per_word, base, low, power, inverse, floats
        )  # fmt: skip
    else:
        sum_words(
            variant, words, first, stride, number, np.uint32(0), blocks, per_word, base, low, power, inverse, floats
        )  # fmt: skip
