# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies for count sketches. ``loops.py`` calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, F64, I32, I64, loop, vector, vector_body
from gradwire.kernels.sketch.operations import COLUMN_BITS
from gradwire.kernels.table import GROUP_SIZE, LANES

AHEAD = 64
"""Number of elements before whose addition a sum is fetched."""

MOST_IN_REGISTERS = 7
"""Number of rows up to which medians are found in registers."""

_ONE, _SIGN, _LOW = 0x3F800000, 0x80000000, 0xFFFFFFFF


@vector_body()
def hashes(e, noise, columns, places, signs):
    """Write columns and signs, 1 or -1, of the elements of whole groups."""
    b, source = e.b, PhiloxVectors(e, noise)
    target, factors = places.pointer(0, I32), signs.pointer(0, F32)

    def group(index: Any, products: list[Any]) -> list[Any]:
        begin = b.mul(index, ir.Constant(I64, GROUP_SIZE))
        for plane, word in enumerate(five_words(e, source.words(list(products))[0])):
            here = b.add(begin, ir.Constant(I64, LANES * plane))
            e.store(_columns(e, word, columns), e.at(target, here, I32), align=4)
            sign = b.or_(b.and_(word, e.constant(_SIGN)), e.constant(_ONE))
            e.store(b.bitcast(sign, vector(F32, 16)), e.at(factors, here, F32), align=4)
        return source.advance(list(products), LANES)

    loop(b, b.sdiv(places.length, ir.Constant(I64, GROUP_SIZE)), 1, source.products(), group)


def _columns(e: Any, word: Any, columns: Any) -> Any:
    """Return the columns that random words give; the lowest eight bits are no part of an element's integer."""
    b, kind = e.b, vector(I64, 8)
    constant = lambda value: e.constant(value, I64, 8)  # noqa: E731
    # Products are of the lower halves of 64-bit lanes. LLVM knows that the upper halves are zero if masks say so here.
    factor = b.and_(e.splat(columns, 8), constant(_LOW))
    integers = b.bitcast(b.and_(e.shift_right(word, 8), e.constant((1 << COLUMN_BITS) - 1)), kind)
    even = b.lshr(b.mul(b.and_(integers, constant(_LOW)), factor), constant(COLUMN_BITS))
    odd = b.shl(b.mul(b.lshr(integers, constant(32)), factor), constant(32 - COLUMN_BITS))
    return b.bitcast(b.or_(even, b.and_(odd, constant(_LOW << 32))), word.type)


@vector_body()
def add_at(e, values, places, sums):
    """Add values to the sums at their places, in order; ``AHEAD`` more places follow, which are not used."""
    b = e.b
    source, index, target = values.pointer(0, F32), places.pointer(0, I32), sums.pointer(0, F64)
    sum_at = lambda i: e.at(target, b.zext(b.load(e.at(index, i, I32)), I64), F64)  # noqa: E731

    def add(i: Any, _: list[Any]) -> list[Any]:
        e.prefetch(sum_at(b.add(i, ir.Constant(I64, AHEAD))))
        place = sum_at(i)
        b.store(b.fadd(b.load(place), b.fpext(b.load(e.at(source, i, F32)), F64)), place)
        return []

    loop(b, values.length, 1, [], add)


@vector_body()
def estimate(e, sums, places, signs, out):
    """Write the sums at the places of whole groups, times their signs."""
    b, table = e.b, sums.pointer(0, F32)
    index, factors, target = places.pointer(0, I32), signs.pointer(0, F32), out.pointer(0, F32)

    def some(i: Any, _: list[Any]) -> list[Any]:
        found = e.pick(table, e.load(e.at(index, i, I32), I32, align=4), F32)
        e.store(b.fmul(found, e.load(e.at(factors, i, F32), F32, align=4)), e.at(target, i, F32), align=4)
        return []

    loop(b, out.length, LANES, [], some)


@vector_body()
def medians(e, rows, numel, pitch, estimates):
    """Replace the first row of ``rows``, an odd number up to ``MOST_IN_REGISTERS``, by the medians of all of them."""
    b, matrix = e.b, estimates.pointer(0, F32)

    def median(i: Any, known: int) -> list[Any]:
        at = [e.at(matrix, b.add(b.mul(pitch, ir.Constant(I64, row)), i), F32) for row in range(known)]
        values = [e.load(place, F32, align=4) for place in at]
        # Odd-even transposition sort; LLVM drops what does not lead to the median.
        for turn in range(known):
            for row in range(turn % 2, known - 1, 2):
                x, y = values[row : row + 2]
                less, more = b.fcmp_ordered("<", y, x), b.fcmp_ordered(">", y, x)
                values[row : row + 2] = b.select(less, y, x), b.select(more, y, x)
        e.store(values[known // 2], at[0], align=4)
        return []

    for known in range(3, MOST_IN_REGISTERS + 1, 2):
        with b.if_then(b.icmp_signed("==", rows, ir.Constant(I64, known))):
            loop(b, numel, LANES, [], lambda i, _, known=known: median(i, known))
