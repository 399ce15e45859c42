# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that round values to levels and decode them. ``loops.py`` calls them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from gradwire.kernels.levels.grid import UNIT
from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I16, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.packing.simd import write_scaled
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES

_SIGN = 0x80000000
_AHEAD = 2560  # distance of prefetches, in elements
_NUMBER = lambda value: ir.Constant(I64, value)  # noqa: E731


def _even_counts(e: Emitter, values: list[Any], uniform: list[Any], grid: Any) -> list[Any]:
    """Count the steps passed, if all have the length 1 / ``steps``."""
    b = e.b
    top = b.sitofp(b.trunc(grid.steps, I32), F32)
    tops, factor = e.splat(top), e.splat(b.fmul(top, ir.Constant(F32, 1 / UNIT)))
    counts = []
    for value, u in zip(values, uniform):
        t = b.fmul(value, factor)
        # With this order of operands a NaN, which has no integer, becomes the top.
        t = b.select(b.fcmp_ordered("<", t, tops), t, tops)
        low = b.fptosi(t, vector(I32, LANES))
        rest = b.fmul(b.fsub(t, b.sitofp(low, vector(F32, LANES))), e.constant(UNIT, F32))
        counts.append(b.add(low, b.zext(b.fcmp_ordered("<", u, rest), vector(I32, LANES))))
    return counts


def _step_counts(e: Emitter, values: list[Any], uniform: list[Any], grid: Any) -> list[Any]:
    """Count the steps passed by one comparison with each."""
    b, edges, gaps = e.b, grid.edge.pointer(0, F32), grid.gap.pointer(0, F32)

    def body(index: Any, counts: list[Any]) -> list[Any]:
        lower, length = (e.splat(b.load(e.at(column, index, F32))) for column in (edges, gaps))
        passed = [b.fcmp_ordered("<", b.fadd(b.fmul(u, length), lower), value) for value, u in zip(values, uniform)]
        return [b.add(c, b.zext(p, vector(I32, LANES))) for c, p in zip(counts, passed)]

    return loop(b, grid.steps, 1, [e.constant(0)] * len(values), body)


def _sought_counts(e: Emitter, values: list[Any], uniform: list[Any], grid: Any) -> list[Any]:
    """Count the steps passed by a lookup: all before the value's own, and that one at random."""
    b, cells, counts = e.b, grid.cells, []
    edges, gaps = grid.edge.pointer(0, F32), grid.gap.pointer(0, F32)
    steps, borders = cells.step.pointer(0, I32), cells.border.pointer(0, F32)
    per_unit, shift, last = e.splat(cells.per_unit), e.splat(cells.shift), e.splat(b.trunc(cells.last, I32))
    zero, top = e.constant(0.0, F32), b.sitofp(last, vector(F32, LANES))
    for value, u in zip(values, uniform):
        t = b.fadd(b.fmul(value, per_unit), shift)
        # With these orders of operands a NaN, which has no integer, becomes zero.
        t = b.select(b.fcmp_ordered(">", t, zero), t, zero)
        t = b.select(b.fcmp_ordered("<", t, top), t, top)
        step, border = e.pick_all([(steps, I32), (borders, F32)], b.fptosi(t, vector(I32, LANES)))
        step = b.add(step, b.zext(b.fcmp_ordered(">", value, border), vector(I32, LANES)))
        edge, gap = e.pick_all([(edges, F32), (gaps, F32)], step)
        passed = b.fcmp_ordered("<", b.fadd(b.fmul(u, gap), edge), value)
        counts.append(b.add(step, b.zext(passed, vector(I32, LANES))))
    return counts


def _quantise(
    e: Emitter, x: Any, first: Any, count: Any, scales: Any, grid: Any, noise: Any, digits: Any, at: Any,
    counts_of: Callable[..., list[Any]],
) -> None:  # fmt: skip
    b, zero = e.b, _NUMBER(0)
    values, inverses, target = x.pointer(first, F32), scales.values.pointer(0, F32), digits.pointer(at, I16)
    source = PhiloxVectors(e, noise)
    plus, minus = (e.splat(b.trunc(digit, I32)) for digit in (grid.positive, grid.negative))
    # The sign bit selects digits below the middle, unless values are compared with their sign.
    sign = b.select(grid.signed, ir.Constant(I32, 0), ir.Constant(I32, _SIGN))
    signs, others = e.splat(sign), e.splat(b.not_(sign))

    def some(first: Any, number: Any, together: int, carried: list[Any], whole: bool) -> list[Any]:
        """Encode ``number`` groups from ``first`` on, ``together`` side by side; ``whole`` if none is partial."""

        def turn(index: Any, carried: list[Any]) -> list[Any]:
            place, rest, *products = carried
            begin = b.mul(b.add(first, index), _NUMBER(GROUP_SIZE))
            pointer, planes = e.at(values, begin, F32), PLANES * together
            masks = [None] * planes if whole else e.lanes_below(b.sub(count, begin), planes)
            inputs = list(products)
            for later in range(1, together):
                inputs += source.advance(list(products), 16 * later)
            words = [word for four in source.words(inputs) for word in five_words(e, four)]
            magnitudes, negatives, uniform = [], [], []
            for plane, (word, mask) in enumerate(zip(words, masks)):
                here = e.at(pointer, LANES * plane, F32)
                e.prefetch(e.at(here, _AHEAD, F32))
                value = e.load(here, F32, align=4) if mask is None else e.masked_load(here, F32, mask)
                factor = e.splat(b.load(e.at(inverses, place, F32)))
                bits = b.bitcast(b.fmul(value, factor), vector(I32, LANES))
                raw = b.bitcast(value, vector(I32, LANES))
                magnitudes.append(b.bitcast(b.and_(bits, others), vector(F32, LANES)))
                negatives.append(b.icmp_signed("!=", b.and_(raw, signs), e.constant(0)))
                uniform.append(b.sitofp(e.shift_right(word, 8), vector(F32, LANES)))
                rest = b.sub(rest, _NUMBER(LANES))
                over = b.icmp_signed("<=", rest, zero)
                more = b.and_(over, b.icmp_signed("<", place, scales.last))
                place = b.add(place, b.zext(more, I64))
                rest = b.select(over, scales.size, rest)
            counts = counts_of(e, magnitudes, uniform, grid)
            for plane, (c, below) in enumerate(zip(counts, negatives)):
                digit = b.select(below, b.sub(minus, c), b.add(plus, c))
                to = e.at(target, b.add(begin, _NUMBER(LANES * plane)), I16)
                e.store(b.trunc(digit, vector(I16, LANES)), to, align=2)
            return [place, rest, *source.advance(list(products), 16 * together)]

        return loop(b, number, together, carried, turn)

    groups = b.sdiv(b.add(count, _NUMBER(GROUP_SIZE - 1)), _NUMBER(GROUP_SIZE))
    paired = b.mul(b.sdiv(count, _NUMBER(2 * GROUP_SIZE)), _NUMBER(2))
    carried = some(zero, paired, 2, [scales.block, scales.left, *source.products()], True)
    some(paired, b.sub(groups, paired), 1, carried, False)


@vector_body()
def quantise_even(e, x, first, count, scales, grid, noise, digits, at):
    """Write the digits of ``count`` elements from ``x[first]`` on for evenly spaced levels to ``digits[at]`` on."""
    _quantise(e, x, first, count, scales, grid, noise, digits, at, _even_counts)


@vector_body()
def quantise_steps(e, x, first, count, scales, grid, noise, digits, at):
    """Write the digits of ``count`` elements from ``x[first]`` on for any levels to ``digits[at]`` on."""
    _quantise(e, x, first, count, scales, grid, noise, digits, at, _step_counts)


@vector_body()
def quantise_sought(e, x, first, count, scales, grid, noise, digits, at):
    """Write the digits of ``count`` elements from ``x[first]`` on for many levels to ``digits[at]`` on."""
    _quantise(e, x, first, count, scales, grid, noise, digits, at, _sought_counts)


def _even_levels(e: Emitter, values: Any, number: Any) -> Callable[[Any], Any]:
    """Return a function that maps digits to levels j / s."""
    b = e.b
    middle = e.splat(b.sitofp(b.lshr(number, _NUMBER(1)), F32))
    return lambda digit: b.fdiv(b.fsub(digit, middle), middle)


def _chosen(bits: int) -> Callable[[Emitter, Any, Any], Callable[[Any], Any]]:
    """Return a function that maps digits to at most ``2^bits`` levels in registers, by ``2^bits - 1`` selections."""

    def prepare(e: Emitter, values: Any, number: Any) -> Callable[[Any], Any]:
        b, leaves = e.b, []
        for leaf in range(1 << bits):
            last = b.sub(number, _NUMBER(1))
            index = b.select(b.icmp_signed("<", _NUMBER(leaf), last), _NUMBER(leaf), last)
            leaves.append(e.splat(b.load(e.at(values, index, F32))))

        def level(digit: Any) -> Any:
            index, found = b.fptosi(digit, vector(I32, LANES)), leaves
            for bit in range(bits):
                high = b.icmp_signed("!=", b.and_(index, e.constant(1 << bit)), e.constant(0))
                found = [b.select(high, found[i + 1], found[i]) for i in range(0, len(found), 2)]
            return found[0]

        return level

    return prepare


def _picked(e: Emitter, values: Any, number: Any) -> Callable[[Any], Any]:
    """Return a function that maps digits to levels in memory."""
    return lambda digit: e.pick(values, e.b.fptosi(digit, vector(I32, LANES)), F32)


@vector_body()
def write_levels(e, floats, first, count, grid, scales, x, at, accumulate, streamed):
    """Write the levels of ``count`` digits from ``floats[first]`` on, times their blocks' scales, to ``x[at]`` on.

    Where a scale is not finite, the scale itself is written. ``accumulate`` adds; ``streamed`` writes whole cache lines
    past the caches.
    """
    b, zero = e.b, _NUMBER(0)
    source, target = floats.pointer(first, F32), x.pointer(at, F32)
    values, factors, number = grid.values.pointer(0, F32), scales.values.pointer(0, F32), grid.values.length
    size = scales.size

    def smaller(first: Any, second: Any) -> Any:
        return b.select(b.icmp_signed("<", first, second), first, second)

    def runs(prepare: Callable[[Emitter, Any, Any], Callable[[Any], Any]]) -> None:
        level = prepare(e, values, number)

        def run(_: Any, carried: list[Any]) -> list[Any]:
            begin, place, left = carried
            end = b.add(begin, smaller(left, b.sub(count, begin)))
            factor = e.splat(b.load(e.at(factors, place, F32)))
            finite = b.fcmp_ordered("<", e.lanewise("fabs", factor), e.constant(math.inf, F32))

            def scaled(digit: Any) -> Any:
                return b.select(finite, b.fmul(level(digit), factor), factor)

            write_scaled(e, source, target, (begin, end), scaled, accumulate, streamed)
            return [end, b.add(place, _NUMBER(1)), size]

        over = b.sub(count, scales.left)
        more = b.sdiv(b.add(over, b.sub(size, _NUMBER(1))), size)
        more = b.select(b.icmp_signed("<", over, zero), zero, more)
        loop(b, b.add(more, _NUMBER(1)), 1, [zero, scales.block, scales.left], run)

    at_most = lambda levels: b.icmp_signed("<=", number, _NUMBER(levels))  # noqa: E731
    with b.if_else(grid.uniform) as (then, otherwise):
        with then:
            runs(_even_levels)
        with otherwise, b.if_else(at_most(8)) as (eight, more):
            with eight:
                runs(_chosen(3))
            with more, b.if_else(at_most(16)) as (sixteen, many):
                with sixteen:
                    runs(_chosen(4))
                with many:
                    runs(_picked)
