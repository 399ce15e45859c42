# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that round to powers of two and sum them. ``loops.py`` calls them."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I1, I8, I16, I32, I64, loop, vector, vector_body
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES

_AHEAD = 2560  # distance of prefetches, in elements


@vector_body()
def natural_groups(e, x, first, count, noise, out, exponents, signs):
    """Write exponents and signs of ``count`` elements from ``x[first]`` on, padded to whole groups."""
    b, values, source = e.b, x.pointer(first, F32), PhiloxVectors(e, noise)
    octets, masks_at = out.pointer(exponents, I8), out.pointer(signs, I8)

    def group(index: Any, products: list[Any]) -> list[Any]:
        begin = b.mul(index, ir.Constant(I64, GROUP_SIZE))
        here = e.at(values, begin, F32)
        masks = e.lanes_below(b.sub(count, begin), PLANES)
        words = five_words(e, source.words(list(products))[0])
        for plane, (word, mask) in enumerate(zip(words, masks)):
            at = e.at(here, LANES * plane, F32)
            e.prefetch(e.at(at, _AHEAD, F32))
            raw = b.bitcast(e.masked_load(at, F32, mask), vector(I32, LANES))
            bits = b.and_(raw, e.constant(0x7FFFFFFF))
            rounded = e.shift_right(b.add(bits, e.shift_right(word, 9)), 23)
            rounded = e.lanewise("umin", rounded, e.constant(254))
            special = b.icmp_signed(">=", bits, e.constant(0x7F800000))
            rounded = b.select(special, e.constant(255), rounded)
            to = b.add(begin, ir.Constant(I64, LANES * plane))
            e.store(b.trunc(rounded, vector(I8, LANES)), e.at(octets, to, I8))
            below = b.bitcast(b.icmp_signed("<", raw, e.constant(0)), I16)
            to = b.add(b.mul(index, ir.Constant(I64, 2 * PLANES)), ir.Constant(I64, 2 * plane))
            b.store(below, b.bitcast(e.at(masks_at, to, I8), I16.as_pointer()), align=1)
        return source.advance(list(products), 16)

    groups = b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))
    loop(b, groups, 1, source.products(), group)


@vector_body()
def natural_sums(e, rows, exponents, signs, count, weight, x, first, accumulate):
    """Write the sums over rows of ``count`` elements to ``x[first]`` on, or add them."""
    b, one = e.b, ir.Constant(I64, 1)
    octets, masks_at = rows.octets.pointer(exponents, I8), rows.octets.pointer(signs, I8)
    target, weight, infinity = x.pointer(first, F32), e.splat(weight), e.constant(math.inf, F32)

    def values(row: Any, group: Any) -> list[Any]:
        start = b.mul(row, rows.stride)
        here = e.at(octets, b.add(start, b.mul(group, ir.Constant(I64, GROUP_SIZE))), I8)
        signs = e.at(masks_at, b.add(start, b.mul(group, ir.Constant(I64, 2 * PLANES))), I8)
        e.prefetch(e.at(here, _AHEAD, I8))
        found = []
        for plane in range(PLANES):
            exponent = e.load(e.at(here, LANES * plane, I8), I8)
            minus = b.load(b.bitcast(e.at(signs, 2 * plane, I8), I16.as_pointer()), align=1)
            bits = e.shift_left(b.zext(exponent, vector(I32, LANES)), 23)
            sign = b.select(b.bitcast(minus, vector(I1, LANES)), e.constant(0x80000000), e.constant(0))
            part = b.fmul(b.bitcast(b.or_(bits, sign), vector(F32, LANES)), weight)
            special = b.icmp_signed("==", exponent, e.constant(-1, I8))
            found.append(b.select(special, infinity, part))
        return found

    def groups(begin: Any, stop: Any, masked: bool, adds: bool) -> None:
        def group(index: Any, _: Any) -> list[Any]:
            index = b.add(begin, index)
            totals = loop(
                b, b.sub(rows.number, one), 1, values(ir.Constant(I64, 0), index),
                lambda row, sums: [b.fadd(s, v) for s, v in zip(sums, values(b.add(row, one), index))],
            )  # fmt: skip
            first = b.mul(index, ir.Constant(I64, GROUP_SIZE))
            masks = e.lanes_below(b.sub(count, first), PLANES) if masked else []
            for plane, total in enumerate(totals):
                to = e.at(target, b.add(first, ir.Constant(I64, LANES * plane)), F32)
                if adds:
                    before = e.masked_load(to, F32, masks[plane]) if masked else e.load(to, F32, align=4)
                    total = b.fadd(before, total)
                if masked:
                    e.masked_store(total, to, masks[plane])
                else:
                    e.store(total, to, align=4)
            return []

        loop(b, stop, 1, [], group)

    whole = b.sdiv(count, ir.Constant(I64, GROUP_SIZE))
    rest = b.zext(b.icmp_signed("<", b.mul(whole, ir.Constant(I64, GROUP_SIZE)), count), I64)
    with b.if_else(accumulate) as (then, otherwise):
        for branch, adds in ((then, True), (otherwise, False)):
            with branch:
                groups(ir.Constant(I64, 0), whole, False, adds)
                groups(whole, rest, True, adds)
