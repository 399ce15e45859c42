# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector body that draws the random words of count sketches. ``loops.py`` calls it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import I32, I64, loop, vector_body
from gradwire.kernels.table import GROUP_SIZE, LANES


@vector_body()
def random_words(e, noise, words):
    """Write the random words of whole groups; the lowest eight bits are no part of an element's integer."""
    b, target, source = e.b, words.pointer(0, I32), PhiloxVectors(e, noise)

    def group(index: Any, products: list[Any]) -> list[Any]:
        here = e.at(target, b.mul(index, ir.Constant(I64, GROUP_SIZE)), I32)
        for plane, word in enumerate(five_words(e, source.words(list(products))[0])):
            e.store(word, e.at(here, LANES * plane, I32), align=4)
        return source.advance(list(products), LANES)

    loop(b, b.sdiv(words.length, ir.Constant(I64, GROUP_SIZE)), 1, source.products(), group)
