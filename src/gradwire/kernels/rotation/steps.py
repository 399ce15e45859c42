# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""The steps of a Walsh-Hadamard transform in explicit vectors: within a vector, between vectors, between groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from gradwire.kernels.numba_core.vectors import F32, I64, Emitter, loop
from gradwire.kernels.table import LANES

AHEAD = 4096  # distance of prefetches, in elements
GROUP = 16  # neighbouring vectors that are in registers at the same time
_SQUARE = GROUP * GROUP  # vectors for whose steps two passes with sixteen vectors in registers suffice
NUMBER = lambda value: ir.Constant(I64, value)  # noqa: E731


def lanes(e: Emitter, value: Any, steps: Sequence[int]) -> Any:
    """Do the steps between lanes of a vector."""
    for h in steps:
        partner = e.shuffle(value, value, [lane ^ h for lane in range(LANES)])
        # The lower lane u becomes u + v, the upper lane v becomes u - v. A product with +-1 is exact, so only the sum
        # is rounded.
        signs = e.constants([-1.0 if lane & h else 1.0 for lane in range(LANES)], F32)
        value = e.lanewise("fma", value, signs, partner)
    return value


def between(e: Emitter, values: list[Any], steps: Sequence[int]) -> list[Any]:
    """Do the steps between whole vectors."""
    b = e.b
    for h in steps:
        for j in range(len(values)):
            if not j & h:
                u, v = values[j], values[j + h]
                values[j], values[j + h] = b.fadd(u, v), b.fsub(u, v)
    return values


def _pass(
    e: Emitter, source: Any, target: Any, vectors: Any, stride: Any, steps: Sequence[int], streamed: bool, ahead: bool
) -> None:
    """Do steps on ``2^len(steps)`` vectors at a time, ``stride`` vectors apart, from source to target.

    ``streamed`` writes the results past the caches; ``ahead`` prefetches the memory after the source.
    """
    b, radix = e.b, 1 << len(steps)
    run = b.mul(stride, NUMBER(radix))

    def outer(index: Any, _: Any) -> list[Any]:
        first = b.mul(index, run)

        def inner(j: Any, _: Any) -> list[Any]:
            here = b.mul(b.add(first, j), NUMBER(LANES))
            places = [b.add(here, b.mul(stride, NUMBER(LANES * k))) for k in range(radix)]
            values = []
            for place in places:
                at = e.at(source, place, F32)
                if ahead:
                    e.prefetch(e.at(at, AHEAD, F32), first=False)
                values.append(e.load(at, F32, align=4))
            for place, value in zip(places, between(e, values, steps)):
                to = e.at(target, place, F32)
                if streamed:
                    e.stream(value, to)
                else:
                    e.store(value, to, align=4)
            return []

        loop(b, stride, 1, [], inner)
        return []

    loop(b, b.sdiv(vectors, run), 1, [], outer)


def _while(b: Any, start: Any, comparison: str, end: Any, turn: Callable[[Any], Any]) -> Any:
    """Emit ``while number <comparison> end: number = turn(number)``; return the last number."""
    before = b.block
    head, inner, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    number = b.phi(I64)
    number.add_incoming(start, before)
    b.cbranch(b.icmp_signed(comparison, number, end), inner, after)
    b.position_at_end(inner)
    following = turn(number)
    number.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(after)
    return number


def steps_up(e: Emitter, z: Any, target: Any, vectors: Any, streamed: Any) -> None:
    """Do the steps between vectors of different groups in place, those of the nearest groups first.

    If ``streamed``, the last pass writes its results to ``target``, past the caches.
    """
    b = e.b
    four = b.icmp_signed(">=", vectors, NUMBER(_SQUARE))

    def turn(stride: Any) -> Any:
        wide = b.and_(four, b.icmp_signed("==", stride, NUMBER(GROUP)))
        reached = b.select(wide, NUMBER(_SQUARE), b.shl(stride, NUMBER(1)))
        last = b.and_(streamed, b.icmp_signed("==", reached, vectors))

        def some(stride: Any, steps: Sequence[int]) -> None:
            with b.if_else(last) as (leaves, stays):
                with leaves:
                    _pass(e, z, target, vectors, stride, steps, streamed=True, ahead=False)
                with stays:
                    _pass(e, z, z, vectors, stride, steps, streamed=False, ahead=False)

        with b.if_else(wide) as (then, otherwise):
            with then:
                some(NUMBER(GROUP), (1, 2, 4, 8))
            with otherwise:
                some(stride, (1,))
        return reached

    _while(b, NUMBER(GROUP), "<", vectors, turn)


def steps_down(e: Emitter, z: Any, room: Any, vectors: Any) -> Any:
    """Do the steps between vectors of different groups, nearest last; return where the results are, ``room`` or z."""
    b = e.b

    def turn(reach: Any) -> Any:
        source = b.select(b.icmp_signed("==", reach, vectors), z, room)
        wide, half = b.icmp_signed("==", reach, NUMBER(_SQUARE)), b.ashr(reach, NUMBER(1))
        with b.if_else(wide) as (then, otherwise):
            with then:
                _pass(e, source, room, vectors, NUMBER(GROUP), (8, 4, 2, 1), streamed=False, ahead=True)
            with otherwise:
                _pass(e, source, room, vectors, half, (1,), streamed=False, ahead=True)
        return b.select(wide, NUMBER(GROUP), half)

    _while(b, vectors, ">", NUMBER(GROUP), turn)
    return b.select(b.icmp_signed("==", vectors, NUMBER(GROUP)), z, room)
