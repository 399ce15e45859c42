# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of moments. ``loops.py`` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.vectors import F32, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.table import BLOCK_SIZE, LANES

UNROLL = 4


def each_vector(
    e: Emitter, pointer: Any, count: Any, carried: list[Any], parity: int | None, use: Callable[..., None]
) -> list[Any]:
    """Loop over ``count`` floats: four vectors of 16 in each turn, then single masked vectors.

    ``use(value, unit, carried)`` takes a vector (zeros past the end) and updates the values of accumulator ``unit``.
    The loop prefetches half of the next block's cache lines, those of units with ``parity``; the second pass over the
    block prefetches the other half, so that memory is never idle.
    """
    b, step = e.b, LANES * UNROLL
    whole = b.and_(count, ir.Constant(I64, -step))

    def turn(index: Any, values: list[Any]) -> list[Any]:
        for unit in range(UNROLL):
            at = e.at(pointer, b.add(index, ir.Constant(I64, LANES * unit)), F32)
            value = e.load(at, F32, align=4)
            if unit % 2 == parity:
                e.prefetch(e.at(at, BLOCK_SIZE, F32))
            use(value, unit, values)
        return values

    carried = loop(b, whole, step, carried, lambda index, values: turn(index, list(values)))
    rest, pointer = b.sub(count, whole), e.at(pointer, whole, F32)

    def masked(index: Any, values: list[Any]) -> list[Any]:
        at = e.at(pointer, index, F32)
        use(e.masked_load(at, F32, e.first_lanes(b.sub(rest, index))), 0, values)
        return values

    return loop(b, rest, LANES, carried, lambda index, values: masked(index, list(values)))


@vector_body(types.int32)
def block_maximum(e, x, first, count):
    """Return the largest ``bits(x) & 0x7fffffff`` (int32) of ``x[first : first + count]``."""

    def use(value: Any, unit: int, values: list[Any]) -> None:
        bits = e.b.and_(e.b.bitcast(value, vector(I32, LANES)), e.constant(0x7FFFFFFF))
        values[unit] = e.lanewise("smax", values[unit], bits)

    largest = each_vector(e, x.pointer(first, F32), count, [e.constant(0)] * UNROLL, 0, use)
    while len(largest) > 1:
        largest = [e.lanewise("smax", *largest[i : i + 2]) for i in range(0, len(largest), 2)]
    return e.reduce("smax", largest[0])


@vector_body(types.UniTuple(types.int64, 2))
def block_sums(e, x, first, count, factor):
    """Return ``(sum q, sum q*q)`` (int64) of ``q = trunc(x * factor)`` for at most 4096 elements, ``|q| < 2^24``."""
    b, factors, wide = e.b, e.splat(factor), vector(I64, LANES // 2)

    def use(value: Any, unit: int, values: list[Any]) -> None:
        q = b.fptosi(b.fmul(value, factors), vector(I32, LANES))
        # Each lane of an accumulator adds at most 64 + 4 numbers of 24 bits, which fits 32 bits.
        values[unit] = b.add(values[unit], q)
        pairs = b.bitcast(q, wide)
        odd = b.ashr(pairs, e.constant(32, I64, 8))
        even = b.ashr(b.shl(pairs, e.constant(32, I64, 8)), e.constant(32, I64, 8))
        squares = b.add(b.mul(even, even), b.mul(odd, odd))
        values[UNROLL + unit] = b.add(values[UNROLL + unit], squares)

    start = [e.constant(0)] * UNROLL + [e.constant(0, I64, 8)] * UNROLL
    end = each_vector(e, x.pointer(first, F32), count, start, 1, use)
    sums = [b.sext(value, vector(I64, LANES)) for value in end[:UNROLL]]
    squares = end[UNROLL:]
    for unit in range(1, UNROLL):
        sums[0], squares[0] = b.add(sums[0], sums[unit]), b.add(squares[0], squares[unit])
    return [e.reduce("add", sums[0]), e.reduce("add", squares[0])]
