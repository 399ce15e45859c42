# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector body that sums products along a row. ``loops.py`` calls it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.vectors import F32, I32, I64, loop, vector_body
from gradwire.kernels.table import LANES


@vector_body(types.float32)
def dot(e, a, b):
    """Return the sum of products of two vectors of equal length: 16 sums, which are then added by halves."""
    builder, first, second = e.b, a.pointer(0, F32), b.pointer(0, F32)
    count = a.length
    whole = builder.and_(count, ir.Constant(I64, -LANES))

    def turn(index: Any, sums: list[Any]) -> list[Any]:
        product = builder.fmul(
            e.load(e.at(first, index, F32), F32, align=4), e.load(e.at(second, index, F32), F32, align=4)
        )
        return [builder.fadd(sums[0], product)]

    def rest(index: Any, sums: list[Any]) -> list[Any]:
        here = builder.add(whole, index)
        inside = e.first_lanes(builder.sub(count, here))
        one, other = (e.masked_load(e.at(place, here, F32), F32, inside) for place in (first, second))
        return [builder.fadd(sums[0], builder.fmul(one, other))]

    sums = loop(builder, whole, LANES, [e.constant(0.0, F32)], turn)
    (total,) = loop(builder, builder.sub(count, whole), LANES, sums, rest)
    half = LANES // 2
    while half:
        lower, upper = (e.shuffle(total, total, range(begin, begin + half)) for begin in (0, half))
        total = builder.fadd(lower, upper)
        half //= 2
    return builder.extract_element(total, ir.Constant(I32, 0))
