# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies for levels. See ``loops.py`` for who calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.levels.grid import UNIT
from gradwire.kernels.numba_core.philox_simd import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I16, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES

__all__ = ["quantise_even", "quantise_steps"]

_SIGN = 0x80000000
_AHEAD = 2560  # elements from here to what is fetched from memory meanwhile


def _even(e: Emitter, values: list[Any], uniform: list[Any], edge: Any, gap: Any, steps: Any) -> list[Any]:
    """Count the steps passed where they are all 1 / ``steps`` long."""
    b = e.b
    top = b.sitofp(b.trunc(steps, I32), F32)
    tops, factor = e.splat(top), e.splat(b.fmul(top, ir.Constant(F32, 1 / UNIT)))
    counts = []
    for value, u in zip(values, uniform):
        t = b.fmul(value, factor)
        # This order of operands makes the top of a NaN, which has no integer.
        t = b.select(b.fcmp_ordered("<", t, tops), t, tops)
        low = b.fptosi(t, vector(I32, LANES))
        rest = b.fmul(b.fsub(t, b.sitofp(low, vector(F32, LANES))), e.constant(UNIT, F32))
        counts.append(b.add(low, b.zext(b.fcmp_ordered("<", u, rest), vector(I32, LANES))))
    return counts


def _steps(e: Emitter, values: list[Any], uniform: list[Any], edge: Any, gap: Any, steps: Any) -> list[Any]:
    """Count the steps passed, one comparison each."""
    b = e.b

    def body(index: Any, counts: list[Any]) -> list[Any]:
        lower, length = (e.splat(b.load(e.at(column, index, F32))) for column in (edge, gap))
        passed = [b.fcmp_ordered("<", b.fadd(b.fmul(u, length), lower), value) for value, u in zip(values, uniform)]
        return [b.add(c, b.zext(p, vector(I32, LANES))) for c, p in zip(counts, passed)]

    return loop(b, steps, 1, [e.constant(0)] * len(values), body)


def _quantiser(count_steps: Callable[..., list[Any]], doc: str) -> Any:
    def body(
        typing_context, x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive,
        negative, signed, key0, key1, round, stream, block, digits, at,
    ):  # fmt: skip
        def codegen(context, builder, signature, arguments):
            b, e = builder, Emitter(builder)
            pointer = lambda i, index, kind: data_pointer(  # noqa: E731
                context, builder, signature.args[i], arguments[i], index, kind
            )
            zero = ir.Constant(I64, 0)
            values, inverses = pointer(0, arguments[1], F32), pointer(3, zero, F32)
            edges, gaps = pointer(8, zero, F32), pointer(9, zero, F32)
            target = pointer(19, arguments[20], I16)
            count, last, size, steps = arguments[2], arguments[6], arguments[7], arguments[10]
            source = PhiloxVectors(e, (arguments[14], arguments[15]), arguments[16], arguments[17])
            plus, minus = (e.splat(b.trunc(arguments[i], I32)) for i in (11, 12))
            # The bit that tells a digit below the middle: none where values are compared with their sign.
            sign = b.select(arguments[13], ir.Constant(I32, 0), ir.Constant(I32, _SIGN))
            signs, others = e.splat(sign), e.splat(b.not_(sign))

            def some(first: Any, number: Any, together: int, carried: list[Any], whole: bool) -> list[Any]:
                """Encode ``number`` groups from group ``first`` on, so many at a time; ``whole`` if all are."""

                def turn(index: Any, carried: list[Any]) -> list[Any]:
                    place, rest, *products = carried
                    begin = b.mul(b.add(first, index), ir.Constant(I64, GROUP_SIZE))
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
                        rest = b.sub(rest, ir.Constant(I64, LANES))
                        over = b.icmp_signed("<=", rest, zero)
                        more = b.and_(over, b.icmp_signed("<", place, last))
                        place = b.add(place, b.zext(more, I64))
                        rest = b.select(over, size, rest)
                    counts = count_steps(e, magnitudes, uniform, edges, gaps, steps)
                    for plane, (c, below) in enumerate(zip(counts, negatives)):
                        digit = b.select(below, b.sub(minus, c), b.add(plus, c))
                        to = e.at(target, b.add(begin, ir.Constant(I64, LANES * plane)), I16)
                        e.store(b.trunc(digit, vector(I16, LANES)), to, align=2)
                    return [place, rest, *source.advance(list(products), 16 * together)]

                return loop(b, number, together, carried, turn)

            groups = b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))
            paired = b.mul(b.sdiv(count, ir.Constant(I64, 2 * GROUP_SIZE)), ir.Constant(I64, 2))
            carried = [arguments[4], arguments[5], *source.products(arguments[18])]
            carried = some(zero, paired, 2, carried, True)
            some(paired, b.sub(groups, paired), 1, carried, False)
            return context.get_dummy_value()

        return (
            types.void(
                x, first, count, inverse, scale_at, left, scale_last, block_size, edge, gap, steps, positive,
                negative, signed, key0, key1, round, stream, block, digits, at,
            ),
            codegen,
        )  # fmt: skip

    body.__doc__ = doc
    return intrinsic(body)


quantise_even = _quantiser(_even, "Write the digits of ``count`` elements from ``x[first]``, levels evenly spaced.")
quantise_steps = _quantiser(_steps, "Write the digits of ``count`` elements from ``x[first]``, any levels.")
