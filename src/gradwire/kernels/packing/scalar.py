# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Plain Numba bodies from packed digits to floats, with the signatures of the explicit-vector ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.ternary.scalar import word_at, word_width

__all__ = ["end_streams", "sum_words", "unpack_digits"]

_u32, _f32 = np.uint32, np.float32


@njit(nogil=True)
def sum_words(words, first, stride, number, word, blocks, per_word, base, low, power, inverse, floats):
    width = word_width(word)
    floats[: 16 * blocks * per_word] = _f32(0)
    for row in range(number):
        for block in range(blocks):
            for lane in range(16):
                value = word_at(words, first + row * stride + (block * 16 + lane) * width, width)
                for digit in range(per_word):
                    quotient = _u32(value // _u32(base)) if digit < per_word - 1 else _u32(0)
                    rest = min(_u32(value - _u32(quotient * _u32(base))), _u32(base - 1))
                    floats[(block * per_word + digit) * 16 + lane] += _f32(rest)
                    value = quotient


@njit(nogil=True)
def unpack_digits(words, first, word, blocks, per_word, base, low, power, inverse, floats):
    sum_words(words, first, 0, 1, word, blocks, per_word, base, low, power, inverse, floats)


@njit(nogil=True)
def end_streams():
    pass
