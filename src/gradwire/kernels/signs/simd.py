# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that sum by sign, pack signs and decode them. ``loops.py`` calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.moments.simd import UNROLL, each_vector
from gradwire.kernels.numba_core.vectors import F32, I1, I8, I16, I32, I64, loop, vector, vector_body
from gradwire.kernels.table import LANES

_BITS = vector(I1, LANES)
_NUMBER = lambda value: ir.Constant(I64, value)  # noqa: E731
_AHEAD = 2560  # distance of prefetches, in elements


@vector_body(types.UniTuple(types.int64, 3))
def block_sign_sums(e, x, first, count, factor):
    """Return ``(sum q, sum |q|, number of x >= 0)``, int64: at most 4096 of ``q = trunc(x * factor)``, |q| < 2^24."""
    b, factors = e.b, e.splat(factor)

    def use(value: Any, unit: int, values: list[Any]) -> None:
        q = b.fptosi(b.fmul(value, factors), vector(I32, LANES))
        size = e.lanewise("smax", q, b.sub(e.constant(0), q))
        passed = b.sext(b.fcmp_ordered(">=", value, e.constant(0.0, F32)), vector(I32, LANES))
        # Each lane of an accumulator adds at most 64 + 4 numbers of 24 bits, which fits 32 bits.
        values[unit] = b.add(values[unit], q)
        values[UNROLL + unit] = b.add(values[UNROLL + unit], size)
        values[2 * UNROLL + unit] = b.sub(values[2 * UNROLL + unit], passed)

    end = each_vector(e, x.pointer(first, F32), count, [e.constant(0)] * (3 * UNROLL), 1, use)
    wide = [b.sext(value, vector(I64, LANES)) for value in end]
    sums = []
    for first_unit in range(0, 3 * UNROLL, UNROLL):
        total = wide[first_unit]
        for unit in range(1, UNROLL):
            total = b.add(total, wide[first_unit + unit])
        sums.append(e.reduce("add", total))
    # The last vector was filled up with zeros, which were counted as well.
    sums[2] = b.sub(sums[2], b.and_(b.sub(_NUMBER(0), count), _NUMBER(LANES - 1)))
    return sums


@vector_body()
def sign_bytes(e, x, first, count, out, at):
    """Write the bits of ``count`` elements from ``x[first]`` on to ``out[at]`` on."""
    b, zero, source, target = e.b, e.constant(0.0, F32), x.pointer(first, F32), out.pointer(at, I8)
    whole = b.and_(count, _NUMBER(-LANES * UNROLL))

    def write(place: Any, bits: Any) -> None:
        octets = e.at(target, b.lshr(place, _NUMBER(3)), I8)
        b.store(b.bitcast(bits, I16), b.bitcast(octets, I16.as_pointer()), align=1)

    def turn(index: Any, carried: list[Any]) -> list[Any]:
        for unit in range(UNROLL):
            place = b.add(index, _NUMBER(LANES * unit))
            here = e.at(source, place, F32)
            e.prefetch(e.at(here, _AHEAD, F32))
            write(place, b.fcmp_ordered(">=", e.load(here, F32, align=4), zero))
        return carried

    def masked(index: Any, carried: list[Any]) -> list[Any]:
        place = b.add(whole, index)
        mask = e.first_lanes(b.sub(count, place))
        value = e.masked_load(e.at(source, place, F32), F32, mask)
        write(place, b.and_(b.fcmp_ordered(">=", value, zero), mask))
        return carried

    loop(b, whole, LANES * UNROLL, [], turn)
    loop(b, b.sub(count, whole), LANES, [], masked)


@vector_body()
def decode_rows(e, rows, bit, count, values, run, x, at, accumulate, streamed):
    """Write the sums over rows of ``above`` or ``below`` to ``count`` elements from ``x[at]`` on, or add them.

    The bits begin at bit ``bit`` of the first row; the values of each row are those of run ``run``. Four bytes are read
    from the byte that holds the first bit of the last sixteen elements. ``streamed`` writes whole vectors past the
    caches.
    """
    b, number_of, number, columns = e.b, _NUMBER, rows.number, values.columns
    highs, lows, target = values.above.pointer(run, F32), values.below.pointer(run, F32), x.pointer(at, F32)

    def bits_from(begin: Any) -> tuple[Any, Any]:
        """Return a pointer to the byte that holds the bit of element ``begin``, and the bit's place in it."""
        place = b.add(bit, begin)
        return rows.octets.pointer(b.ashr(place, number_of(3)), I8), b.trunc(b.and_(place, number_of(7)), I32)

    def chosen(source: tuple[Any, Any], row: Any, index: Any, units: int) -> list[Any]:
        """Return the vectors of one row, from ``index`` elements (a multiple of 16) after the source's first on."""
        octets, shift = source
        high, low = (e.splat(b.load(e.at(values, b.mul(row, columns), F32))) for values in (highs, lows))
        octets = e.at(octets, b.add(b.mul(row, rows.stride), b.lshr(index, number_of(3))), I8)
        found = []
        for unit in range(units):
            word = b.load(b.bitcast(e.at(octets, LANES // 8 * unit, I8), I32.as_pointer()), align=1)
            found.append(b.select(b.bitcast(b.trunc(b.lshr(word, shift), I16), _BITS), high, low))
        return found

    def summed(source: tuple[Any, Any], index: Any, before: list[Any]) -> list[Any]:
        first = chosen(source, number_of(0), index, len(before))
        start = [value if old is None else b.fadd(old, value) for value, old in zip(first, before)]

        def add(row: Any, carried: list[Any]) -> list[Any]:
            more = chosen(source, b.add(row, number_of(1)), index, len(before))
            return [b.fadd(old, value) for old, value in zip(carried, more)]

        return loop(b, b.sub(number, number_of(1)), 1, start, add)

    def write(begin: Any, add: bool, past: bool) -> None:
        """Write elements ``begin`` to ``count - 1``."""
        step = LANES * UNROLL
        whole = b.and_(b.sub(count, begin), number_of(-step))
        source = bits_from(begin)

        def turn(index: Any, carried: list[Any]) -> list[Any]:
            place = b.add(begin, index)
            to = [e.at(target, b.add(place, number_of(LANES * unit)), F32) for unit in range(UNROLL)]
            before = [e.load(here, F32, align=4) if add else None for here in to]
            for value, here in zip(summed(source, index, before), to):
                if past:
                    e.stream(value, here)
                else:
                    e.store(value, here, align=4)
            return carried

        loop(b, whole, step, [], turn)
        some(b.add(begin, whole), b.sub(count, b.add(begin, whole)), add)

    def some(begin: Any, number: Any, add: bool) -> None:
        """Write ``number`` elements from ``begin`` on."""
        source = bits_from(begin)

        def masked(index: Any, carried: list[Any]) -> list[Any]:
            mask = e.first_lanes(b.sub(number, index))
            to = e.at(target, b.add(begin, index), F32)
            before = e.masked_load(to, F32, mask) if add else None
            e.masked_store(summed(source, index, [before])[0], to, mask)
            return carried

        loop(b, number, LANES, [], masked)

    with b.if_else(accumulate) as (then, otherwise):
        with then:
            write(number_of(0), True, False)
        with otherwise, b.if_else(streamed) as (past, near):
            with past:
                address = b.ptrtoint(target, I64)
                # The elements before the first whole cache line.
                head = b.and_(b.lshr(b.sub(number_of(0), address), number_of(2)), number_of(LANES - 1))
                some(number_of(0), head, False)
                write(head, False, True)
            with near:
                write(number_of(0), False, False)
