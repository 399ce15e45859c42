# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of selection. ``loops.py`` and ``sampling.py`` call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.vectors import I32, I64, Emitter, loop, vector_body
from gradwire.kernels.table import LANES

_UNROLL = 4
_AHEAD = 4096
"""Distance of prefetches in elements: as long as a block, so that the next block is fetched."""


def _each(
    e: Emitter, source: Any, count: Any, carried: list[Any], choose: Callable[..., Any], use: Callable[..., list[Any]],
    rare: bool = False,
) -> list[Any]:  # fmt: skip
    """Loop over ``count`` integers, 16 at a time, unrolled four times; return the last carried values.

    ``choose(index, values)`` takes the index of the first of 16 and returns a mask and an object for ``use``.
    ``use(mask, more, carried)`` gets both and returns the new carried values. In each turn all calls of ``choose``
    precede all calls of ``use``, so that results may overwrite the part of ``source`` that was read. If ``rare``, a
    turn without a chosen integer skips ``use``, which then must not depend on what a mask leaves out.
    """
    b, step = e.b, LANES * _UNROLL
    whole = b.and_(count, ir.Constant(I64, -step))

    def turn(index: Any, values: list[Any]) -> list[Any]:
        chosen = []
        for unit in range(_UNROLL):
            here = b.add(index, ir.Constant(I64, LANES * unit))
            at = e.at(source, here, I32)
            e.prefetch(e.at(at, _AHEAD, I32))
            chosen.append(choose(here, e.load(at, I32, align=4)))

        def use_all(_: Any, values: list[Any]) -> list[Any]:
            for mask, more in chosen:
                values = use(mask, more, values)
            return values

        if not rare:
            return use_all(None, values)
        some = chosen[0][0]
        for mask, _ in chosen[1:]:
            some = b.or_(some, mask)
        found = b.icmp_unsigned("!=", e.mask_bits(some), ir.Constant(I64, 0))
        return loop(b, b.zext(found, I64), 1, values, use_all)

    carried = loop(b, whole, step, carried, turn)

    def masked(index: Any, values: list[Any]) -> list[Any]:
        here = b.add(whole, index)
        inside = e.first_lanes(b.sub(count, here))
        mask, more = choose(here, e.masked_load(e.at(source, here, I32), I32, inside))
        return use(b.and_(mask, inside), more, values)

    return loop(b, b.sub(count, whole), LANES, carried, masked)


def _append(
    e: Emitter, source: Any, count: Any, place: Any, choose: Callable[[Any, Any], tuple[Any, list[tuple[Any, Any]]]],
    rare: bool = False,
) -> Any:  # fmt: skip
    """Append the chosen ones of ``count`` integers from ``place`` on; return the place after the last.

    ``choose(index, values)`` returns the mask of chosen lanes, and pairs of a vector and the pointer to the array to
    which its chosen lanes are appended.
    """

    def use(mask: Any, pairs: list[tuple[Any, Any]], carried: list[Any]) -> list[Any]:
        for value, target in pairs:
            e.compress_store(value, e.at(target, carried[0], I32), mask, I32)
        return [e.b.add(carried[0], e.count(mask))]

    return _each(e, source, count, [place], choose, use, rare)[0]


@vector_body(types.int64)
def count_at_least(e, bits, threshold):
    """Count the integers that are at least ``threshold``."""
    b, least = e.b, e.splat(_narrow(e, threshold))

    def choose(here: Any, values: Any) -> tuple[Any, None]:
        return b.icmp_signed(">=", values, least), None

    def use(mask: Any, more: None, carried: list[Any]) -> list[Any]:
        return [b.add(carried[0], e.count(mask))]

    return _each(e, bits.pointer(0, I32), bits.length, [ir.Constant(I64, 0)], choose, use)[0]


@vector_body(types.int64)
def find_at_least(e, x, at, count, first, threshold, index, bits, place):
    """Append positions and magnitude bits of the elements of ``x[at : at + count]`` that reach ``threshold``.

    The position of ``x[at]`` is ``first``. Up to 16 elements after the last are overwritten. Return the place after it.
    """
    b, least = e.b, e.splat(_narrow(e, threshold))
    found, magnitudes = index.pointer(0, I32), bits.pointer(0, I32)
    iota = e.constants(list(range(LANES)))

    def choose(here: Any, values: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        magnitude = b.and_(values, e.constant(0x7FFFFFFF))
        positions = b.add(e.splat(b.trunc(b.add(first, here), I32)), iota)
        return b.icmp_signed(">=", magnitude, least), [(positions, found), (magnitude, magnitudes)]

    return _append(e, x.pointer(at, I32), count, place, choose, rare=True)


@vector_body(types.int64)
def keep_at_least(e, bits, index, at, count, threshold, out):
    """Write the elements of ``index[at : at + count]`` whose bits reach ``threshold`` to ``out``; return their number.

    Up to 16 elements after the last are overwritten.
    """
    b, least = e.b, e.splat(_narrow(e, threshold))
    positions, target = index.pointer(at, I32), out.pointer(0, I32)

    def choose(here: Any, values: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        # A whole vector can be loaded: the list of positions has room for one after its end.
        found = e.load(e.at(positions, here, I32), I32, align=4)
        return b.icmp_signed(">=", values, least), [(found, target)]

    return _append(e, bits.pointer(at, I32), count, ir.Constant(I64, 0), choose)


@vector_body(types.int64)
def keep_at_most(e, bits, count, limit, out):
    """Write those of ``count`` integers that are at most ``limit`` to ``out``; return their number.

    Up to 16 elements after the last are overwritten.
    """
    b, most, target = e.b, e.splat(_narrow(e, limit)), out.pointer(0, I32)

    def choose(here: Any, values: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        return b.icmp_signed("<=", values, most), [(values, target)]

    return _append(e, bits.pointer(0, I32), count, ir.Constant(I64, 0), choose)


@vector_body(types.UniTuple(types.int64, 2))
def find_between(e, x, at, count, low, high, bits, place):
    """Append the magnitude bits of ``x[at : at + count]`` that are from ``low`` to ``high``; count those above.

    Up to 16 elements after the last are overwritten. Return the place after it, and the number above.
    """
    b, least, most = e.b, e.splat(_narrow(e, low)), e.splat(_narrow(e, high))
    target = bits.pointer(0, I32)

    def choose(here: Any, values: Any) -> tuple[Any, Any]:
        magnitude = b.and_(values, e.constant(0x7FFFFFFF))
        return b.icmp_signed(">=", magnitude, least), magnitude

    def use(mask: Any, magnitude: Any, carried: list[Any]) -> list[Any]:
        place, above = carried
        over = b.and_(mask, b.icmp_signed(">", magnitude, most))
        inner = b.xor(mask, over)
        e.compress_store(magnitude, e.at(target, place, I32), inner, I32)
        return [b.add(place, e.count(inner)), b.add(above, e.count(over))]

    return list(_each(e, x.pointer(at, I32), count, [place, ir.Constant(I64, 0)], choose, use))


def _narrow(e: Emitter, value: Any) -> Any:
    """Return an integer truncated to 32 bits."""
    return value if value.type.width == 32 else e.b.trunc(value, I32)
