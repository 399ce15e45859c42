# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies for lattices. See ``drivers.py`` for who calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.cpu_vector_philox import PhiloxVectors, five_words
from gradwire.kernels.lattice.base import FAR
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES
from gradwire.kernels.vectors import F32, I16, I32, I64, Emitter, data_pointer, loop, vector

__all__ = ["lattice_colours", "lattice_sums"]

_AHEAD = 2560  # elements from here to what is fetched from memory meanwhile
_FLAT = vector(I32, LANES)


def _scaled(e: Emitter, product: Any, uniform: Any, shift: Any) -> tuple[Any, Any]:
    """Give t and theta of sixteen elements."""
    b = e.b
    place = b.and_(b.add(uniform, shift), e.constant(0xFFFFFF))
    theta = b.fmul(b.sitofp(place, vector(F32, LANES)), e.constant(2.0**-24, F32))
    theta = b.fsub(theta, e.constant(0.5, F32))
    t = b.fsub(product, theta)
    near = b.fcmp_ordered("<", e.lanewise("fabs", t), e.constant(FAR, F32))
    return b.select(near, t, e.constant(0.0, F32)), theta


def _groups(b: Any, count: Any) -> Any:
    return b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))


def _odd(e: Emitter, uniform: Any) -> Any:
    return e.b.or_(e.shift_left(uniform, 1), e.constant(1))


@intrinsic
def lattice_colours(
    typing_context, x, first, count, inverse, bits, shift, key0, key1, round, stream, block, digits, at, checks
):
    """Write the colours of ``count`` elements from ``x[first]`` and add to the lanes of their check."""

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        values = data_pointer(context, b, signature.args[0], arguments[0], arguments[1], F32)
        target = data_pointer(context, b, signature.args[11], arguments[11], arguments[12], I16)
        checks = data_pointer(context, b, signature.args[13], arguments[13], ir.Constant(I64, 0), I32)
        count, inverse, narrow = arguments[2], e.splat(arguments[3]), b.trunc(arguments[4], I32)
        bits, shift = e.splat(narrow), e.splat(arguments[5])
        mask = e.splat(b.sub(b.shl(ir.Constant(I32, 1), narrow), ir.Constant(I32, 1)))
        source = PhiloxVectors(e, (arguments[6], arguments[7]), arguments[8], arguments[9])

        def group(index: Any, products: list[Any]) -> list[Any]:
            begin = b.mul(index, ir.Constant(I64, GROUP_SIZE))
            here = e.at(values, begin, F32)
            masks = e.lanes_below(b.sub(count, begin), PLANES)
            words = five_words(e, source.words(list(products))[0])
            sums = e.load(checks, I32)
            for plane, (word, inside) in enumerate(zip(words, masks)):
                pointer = e.at(here, LANES * plane, F32)
                e.prefetch(e.at(pointer, _AHEAD, F32))
                uniform = e.shift_right(word, 8)
                t, _ = _scaled(e, b.fmul(e.masked_load(pointer, F32, inside), inverse), uniform, shift)
                k = b.fptosi(e.lanewise("rint", t), _FLAT)
                to = e.at(target, b.add(begin, ir.Constant(I64, LANES * plane)), I16)
                e.store(b.trunc(b.and_(k, mask), vector(I16, LANES)), to, align=2)
                sums = b.add(sums, b.mul(b.ashr(k, bits), _odd(e, uniform)))
            e.store(sums, checks, align=4)
            return source.advance(list(products), 16)

        loop(b, _groups(b, count), 1, source.products(arguments[10]), group)
        return context.get_dummy_value()

    return (
        types.void(
            x, first, count, inverse, bits, shift, key0, key1, round, stream, block, digits, at, checks
        ),
        codegen,
    )  # fmt: skip


@intrinsic
def lattice_sums(
    typing_context, own, x, first, count, inverse, scale, accumulate, bits, shifts, number, integers, distance, at,
    key0, key1, round, stream, block, checks,
):  # fmt: skip
    """Sum the points of all rows next to ``own[first]`` and on; ``integers`` are colours less their middle.

    Row r's are at ``integers[r * distance + at]``, and its check has the sixteen lanes from ``checks[16 * r]``.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        pointer = lambda i, index, kind: data_pointer(  # noqa: E731
            context, b, signature.args[i], arguments[i], index, kind
        )
        zero = ir.Constant(I64, 0)
        values, target = pointer(0, arguments[2], F32), pointer(1, arguments[2], F32)
        shifts, colours = pointer(8, zero, I32), pointer(10, arguments[12], I32)
        checks = pointer(18, zero, I32)
        count, inverse, scale, adds = arguments[3], e.splat(arguments[4]), e.splat(arguments[5]), e.splat(arguments[6])
        narrow, number, distance = b.trunc(arguments[7], I32), arguments[9], arguments[11]
        bits, all_colours = e.splat(narrow), b.shl(ir.Constant(I32, 1), narrow)
        middle = e.splat(b.lshr(all_colours, ir.Constant(I32, 1)))
        part = e.splat(b.fdiv(ir.Constant(F32, 1.0), b.sitofp(all_colours, F32)))
        source = PhiloxVectors(e, (arguments[13], arguments[14]), arguments[15], arguments[16])

        def group(index: Any, products: list[Any]) -> list[Any]:
            begin = b.mul(index, ir.Constant(I64, GROUP_SIZE))
            masks = e.lanes_below(b.sub(count, begin), PLANES)
            words = five_words(e, source.words(list(products))[0])
            uniforms = [e.shift_right(word, 8) for word in words]
            scaled = []
            for plane, inside in enumerate(masks):
                at = e.at(values, b.add(begin, ir.Constant(I64, LANES * plane)), F32)
                e.prefetch(e.at(at, _AHEAD, F32))
                scaled.append(b.fmul(e.masked_load(at, F32, inside), inverse))

            def row(index: Any, totals: list[Any]) -> list[Any]:
                shift = e.splat(b.load(e.at(shifts, index, I32)))
                here = e.at(colours, b.add(b.mul(index, distance), begin), I32)
                check = e.at(checks, b.mul(index, ir.Constant(I64, LANES)), I32)
                is_first = e.splat(b.icmp_signed("==", index, zero))
                new, sums = [], e.load(check, I32)
                for plane, (product, uniform) in enumerate(zip(scaled, uniforms)):
                    t, theta = _scaled(e, product, uniform, shift)
                    colour = b.add(e.load(e.at(here, LANES * plane, I32), I32), middle)
                    turn = b.fmul(b.fsub(t, b.sitofp(colour, vector(F32, LANES))), part)
                    turn = b.fptosi(e.lanewise("rint", turn), _FLAT)
                    sums = b.add(sums, b.mul(turn, _odd(e, uniform)))
                    k = b.add(colour, b.shl(turn, bits))
                    found = b.fmul(b.fadd(b.sitofp(k, vector(F32, LANES)), theta), scale)
                    new.append(b.select(is_first, found, b.fadd(totals[plane], found)))
                e.store(sums, check, align=4)
                return new

            totals = loop(b, number, 1, [e.constant(0.0, F32)] * PLANES, row)
            for plane, (total, inside) in enumerate(zip(totals, masks)):
                to = e.at(target, b.add(begin, ir.Constant(I64, LANES * plane)), F32)
                before = e.masked_load(to, F32, b.and_(inside, adds))
                e.masked_store(b.select(adds, b.fadd(before, total), total), to, inside)
            return source.advance(list(products), 16)

        loop(b, _groups(b, count), 1, source.products(arguments[17]), group)
        return context.get_dummy_value()

    return (
        types.void(
            own, x, first, count, inverse, scale, accumulate, bits, shifts, number, integers, distance, at, key0, key1,
            round, stream, block, checks,
        ),
        codegen,
    )  # fmt: skip
