# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The explicit-vector body from digits to scaled levels. See ``loops.py`` for who calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.numba_core.vectors import F32, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import LANES

__all__ = ["write_levels"]

_UNROLL = 2
_NUMBER = lambda value: ir.Constant(I64, value)  # noqa: E731


def _even(e: Emitter, values: Any, number: Any) -> Callable[[Any], Any]:
    """Give the function from digits to levels j / s."""
    b = e.b
    middle = e.splat(b.sitofp(b.lshr(number, _NUMBER(1)), F32))
    return lambda digit: b.fdiv(b.fsub(digit, middle), middle)


def _chosen(bits: int) -> Callable[[Emitter, Any, Any], Callable[[Any], Any]]:
    """Give levels out of at most ``2^bits``, which stay in registers, by choosing between two ``2^bits - 1`` times."""

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
    """Give levels out of memory."""
    return lambda digit: e.pick(values, e.b.fptosi(digit, vector(I32, LANES)), F32)


@intrinsic
def write_levels(
    typing_context, floats, first, count, values, even, scale, block, rest, block_size, x, at, accumulate, streamed
):
    """Write the levels of ``count`` digits from ``floats[first]`` on, times their blocks' scales, to ``x[at]``.

    The first block has ``rest`` elements left. A scale that is not finite is written itself. ``accumulate`` adds;
    ``streamed`` sends whole cache lines past the caches.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        pointer = lambda i, index: data_pointer(  # noqa: E731
            context, b, signature.args[i], arguments[i], index, F32
        )
        zero = _NUMBER(0)
        source, target = pointer(0, arguments[1]), pointer(9, arguments[10])
        values, scales = pointer(3, zero), pointer(5, zero)
        number = context.make_array(signature.args[3])(context, b, arguments[3]).nitems
        count, even, block, rest, size = (arguments[i] for i in (2, 4, 6, 7, 8))
        adds, streamed = arguments[11], arguments[12]
        added = e.splat(adds)

        def smaller(first: Any, second: Any) -> Any:
            return b.select(b.icmp_signed("<", first, second), first, second)

        def runs(prepare: Callable[[Emitter, Any, Any], Callable[[Any], Any]]) -> None:
            level = prepare(e, values, number)

            def run(_: Any, carried: list[Any]) -> list[Any]:
                begin, place, left = carried
                end = b.add(begin, smaller(left, b.sub(count, begin)))
                factor = e.splat(b.load(e.at(scales, place, F32)))
                finite = b.fcmp_ordered("<", e.lanewise("fabs", factor), e.constant(math.inf, F32))

                def scaled(digit: Any) -> Any:
                    return b.select(finite, b.fmul(level(digit), factor), factor)

                def some(start: Any, lanes: Any) -> None:
                    mask = e.first_lanes(lanes)
                    to = e.at(target, start, F32)
                    value = scaled(e.masked_load(e.at(source, start, F32), F32, mask))
                    before = e.masked_load(to, F32, b.and_(mask, added))
                    e.masked_store(b.select(added, b.fadd(before, value), value), to, mask)

                def whole(start: Any, stop: Any, vectors: int, past: bool) -> None:
                    def turn(index: Any, _: Any) -> list[Any]:
                        places = [b.add(b.add(start, index), _NUMBER(LANES * unit)) for unit in range(vectors)]
                        found = [scaled(e.load(e.at(source, p, F32), F32, align=4)) for p in places]
                        for p, value in zip(places, found):
                            to = e.at(target, p, F32)
                            if past:
                                e.stream(value, to)
                            else:
                                before = e.masked_load(to, F32, added)
                                e.store(b.select(added, b.fadd(before, value), value), to, align=4)
                        return []

                    loop(b, b.sub(stop, start), LANES * vectors, [], turn)

                # Elements up to an address that takes whole cache lines.
                address = b.ptrtoint(e.at(target, begin, F32), I64)
                head = b.and_(b.lshr(b.sub(zero, address), _NUMBER(2)), _NUMBER(LANES - 1))
                head = b.select(streamed, smaller(head, b.sub(end, begin)), zero)
                with b.if_then(b.icmp_signed("!=", head, zero)):
                    some(begin, head)
                inner = b.add(begin, head)
                pairs = b.add(inner, b.and_(b.sub(end, inner), _NUMBER(-LANES * _UNROLL)))
                lines = b.add(inner, b.and_(b.sub(end, inner), _NUMBER(-LANES)))
                with b.if_else(streamed) as (then, otherwise):
                    for branch, past in ((then, True), (otherwise, False)):
                        with branch:
                            whole(inner, pairs, _UNROLL, past)
                            whole(pairs, lines, 1, past)
                with b.if_then(b.icmp_signed("<", lines, end)):
                    some(lines, b.sub(end, lines))
                return [end, b.add(place, _NUMBER(1)), size]

            over = b.sub(count, rest)
            more = b.sdiv(b.add(over, b.sub(size, _NUMBER(1))), size)
            more = b.select(b.icmp_signed("<", over, zero), zero, more)
            loop(b, b.add(more, _NUMBER(1)), 1, [zero, block, rest], run)

        at_most = lambda levels: b.icmp_signed("<=", number, _NUMBER(levels))  # noqa: E731
        with b.if_else(even) as (then, otherwise):
            with then:
                runs(_even)
            with otherwise, b.if_else(at_most(8)) as (eight, more):
                with eight:
                    runs(_chosen(3))
                with more, b.if_else(at_most(16)) as (sixteen, many):
                    with sixteen:
                        runs(_chosen(4))
                    with many:
                        runs(_picked)
        return context.get_dummy_value()

    return (
        types.void(
            floats, first, count, values, even, scale, block, rest, block_size, x, at, accumulate, streamed
        ),
        codegen,
    )  # fmt: skip
