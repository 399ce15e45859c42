# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies for signs. See ``loops.py`` for who calls them."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.moments.simd import UNROLL, each_vector
from gradwire.kernels.numba_core.vectors import F32, I1, I8, I16, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import LANES

__all__ = ["block_sign_sums", "decode_rows", "sign_bytes"]

_BITS = vector(I1, LANES)


@intrinsic
def block_sign_sums(typing_context, x, first, count, factor, ahead):
    """Give ``(sum q, sum |q|, number of x >= 0)`` (int64) of ``q = trunc(x * factor)``, at most 4096 with |q| < 2^24.

    Half of the next block is fetched from memory meanwhile, see ``block_maximum``.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        pointer = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], F32)
        factors = e.splat(arguments[3])

        def use(value, unit, values, at):
            if at is not None and unit % 2:
                e.prefetch(e.at(at, arguments[4], F32))
            q = b.fptosi(b.fmul(value, factors), vector(I32, LANES))
            size = e.lanewise("smax", q, b.sub(e.constant(0), q))
            passed = b.sext(b.fcmp_ordered(">=", value, e.constant(0.0, F32)), vector(I32, LANES))
            # At most 64 + 4 additions of 24-bit numbers per accumulator and lane: they fit 32 bits.
            values[unit] = b.add(values[unit], q)
            values[UNROLL + unit] = b.add(values[UNROLL + unit], size)
            values[2 * UNROLL + unit] = b.sub(values[2 * UNROLL + unit], passed)

        end = each_vector(e, pointer, arguments[2], [e.constant(0)] * (3 * UNROLL), use)
        wide = [b.sext(value, vector(I64, LANES)) for value in end]
        sums = []
        for first_unit in range(0, 3 * UNROLL, UNROLL):
            total = wide[first_unit]
            for unit in range(1, UNROLL):
                total = b.add(total, wide[first_unit + unit])
            sums.append(e.reduce("add", total))
        # The last vector was filled up with zeros, which count as passed.
        missing = b.and_(b.sub(ir.Constant(I64, 0), arguments[2]), ir.Constant(I64, LANES - 1))
        sums[2] = b.sub(sums[2], missing)
        return context.make_tuple(b, signature.return_type, sums)

    return types.UniTuple(types.int64, 3)(x, first, count, factor, ahead), codegen


@intrinsic
def sign_bytes(typing_context, x, first, count, out, out_first, ahead):
    """Write the bits of ``count`` elements from ``x[first]`` to ``out[out_first]``, two bytes for sixteen.

    Elements ``ahead`` further on are fetched from memory meanwhile.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], F32)
        target = data_pointer(context, builder, signature.args[3], arguments[3], arguments[4], I8)
        count = arguments[2]
        step = LANES * UNROLL
        whole = b.and_(count, ir.Constant(I64, -step))
        zero = e.constant(0.0, F32)

        def turn(index, carried):
            for unit in range(UNROLL):
                place = b.add(index, ir.Constant(I64, LANES * unit))
                at = e.at(source, place, F32)
                e.prefetch(e.at(at, arguments[5], F32))
                bits = b.bitcast(b.fcmp_ordered(">=", e.load(at, F32, align=4), zero), I16)
                octets = b.lshr(place, ir.Constant(I64, 3))
                b.store(bits, b.bitcast(e.at(target, octets, I8), I16.as_pointer()), align=1)
            return carried

        loop(b, whole, step, [], turn)
        rest = b.sub(count, whole)

        def masked(index, carried):
            place = b.add(whole, index)
            mask = e.first_lanes(b.sub(rest, index))
            value = e.masked_load(e.at(source, place, F32), F32, mask)
            bits = b.bitcast(b.and_(b.fcmp_ordered(">=", value, zero), mask), I16)
            octets = b.lshr(place, ir.Constant(I64, 3))
            b.store(bits, b.bitcast(e.at(target, octets, I8), I16.as_pointer()), align=1)
            return carried

        loop(b, rest, LANES, [], masked)
        return context.get_dummy_value()

    return types.void(x, first, count, out, out_first, ahead), codegen


@intrinsic
def decode_rows(
    typing_context, rows, stride, number, bit, count, above, below, columns, run, x, at, accumulate, streamed
):
    """Write the sum over rows of ``above`` or ``below`` to ``count`` elements from ``x[at]``, or add it.

    Row r's bits begin ``stride`` bytes after those of the row before, the first at number ``bit``; its values are
    elements ``columns * r + run``. Reads up to four bytes from the byte of the last sixteen elements' first bit on.
    ``streamed`` sends whole vectors past the caches.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        (_, stride, number, bit, count, _, _, columns, run, _, at, accumulate, streamed) = arguments
        number_of = lambda value: ir.Constant(I64, value)  # noqa: E731
        pointer = lambda i, index, kind: data_pointer(  # noqa: E731
            context, builder, signature.args[i], arguments[i], index, kind
        )
        highs, lows, target = pointer(5, run, F32), pointer(6, run, F32), pointer(9, at, F32)

        def bits_from(begin):
            """Point to the byte that holds the bit of element ``begin``, and say where in it."""
            place = b.add(bit, begin)
            return pointer(0, b.ashr(place, number_of(3)), I8), b.trunc(b.and_(place, number_of(7)), I32)

        def chosen(source, row, index, units):
            """Give the vectors of one row from element ``index`` (a multiple of 16) after the source's first on."""
            octets, shift = source
            high, low = (e.splat(b.load(e.at(values, b.mul(row, columns), F32))) for values in (highs, lows))
            octets = e.at(octets, b.add(b.mul(row, stride), b.lshr(index, number_of(3))), I8)
            found = []
            for unit in range(units):
                word = b.load(b.bitcast(e.at(octets, LANES // 8 * unit, I8), I32.as_pointer()), align=1)
                found.append(b.select(b.bitcast(b.trunc(b.lshr(word, shift), I16), _BITS), high, low))
            return found

        def summed(source, index, before):
            first = chosen(source, number_of(0), index, len(before))
            start = [value if old is None else b.fadd(old, value) for value, old in zip(first, before)]

            def add(row, carried):
                more = chosen(source, b.add(row, number_of(1)), index, len(before))
                return [b.fadd(old, value) for old, value in zip(carried, more)]

            return loop(b, b.sub(number, number_of(1)), 1, start, add)

        def write(begin, add, past):
            """Write elements ``begin`` to ``count``."""
            step = LANES * UNROLL
            whole = b.and_(b.sub(count, begin), number_of(-step))
            source = bits_from(begin)

            def turn(index, carried):
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

        def some(begin, number, add):
            """Write ``number`` elements from ``begin`` on."""
            source = bits_from(begin)

            def masked(index, carried):
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
                    # Elements up to an address that takes whole cache lines.
                    head = b.and_(b.lshr(b.sub(number_of(0), address), number_of(2)), number_of(LANES - 1))
                    some(number_of(0), head, False)
                    write(head, False, True)
                with near:
                    write(number_of(0), False, False)
        return context.get_dummy_value()

    return (
        types.void(rows, stride, number, bit, count, above, below, columns, run, x, at, accumulate, streamed),
        codegen,
    )
