# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies over float32 input: moments and the ternary encoder. See ``cpu.py`` for who calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.numba_core.philox_simd import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I8, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, LANES, PLANES

__all__ = ["UNROLL", "block_maximum", "block_sums", "each_vector", "encode_groups"]

UNROLL = 4


def each_vector(e: Emitter, pointer: Any, count: Any, carried: list[Any], use: Any) -> list[Any]:
    """Loop over ``count`` floats, 16 at a time: four unmasked vectors a turn, then single masked ones.

    ``use(value, unit, carried, pointer)`` takes a vector (zeros past the end) and
    updates the values of accumulator ``unit``.
    """
    b = e.b
    step = LANES * UNROLL
    whole = b.and_(count, ir.Constant(I64, -step))

    def turn(index: Any, values: list[Any]) -> list[Any]:
        for unit in range(UNROLL):
            at = e.at(pointer, b.add(index, ir.Constant(I64, LANES * unit)), F32)
            use(e.load(at, F32, align=4), unit, values, at)
        return values

    carried = loop(b, whole, step, carried, lambda index, values: turn(index, list(values)))
    rest = b.sub(count, whole)
    pointer = e.at(pointer, whole, F32)

    def masked(index: Any, values: list[Any]) -> list[Any]:
        at = e.at(pointer, index, F32)
        use(e.masked_load(at, F32, e.first_lanes(b.sub(rest, index))), 0, values, None)
        return values

    return loop(b, rest, LANES, carried, lambda index, values: masked(index, list(values)))


@intrinsic
def block_maximum(typing_context, x, first, count, ahead):
    """Give the largest ``bits(x) & 0x7fffffff`` (int32) of ``x[first : first + count]``.

    Half of the cache lines ``ahead`` elements further on, the next block, are fetched meanwhile; ``block_sums``
    fetches the other half, so that memory is never idle.
    """

    def codegen(context, builder, signature, arguments):
        e = Emitter(builder)
        pointer = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], F32)

        def use(value, unit, values, at):
            if at is not None and unit % 2 == 0:
                e.prefetch(e.at(at, arguments[3], F32))
            bits = builder.and_(builder.bitcast(value, vector(I32, LANES)), e.constant(0x7FFFFFFF))
            values[unit] = e.lanewise("smax", values[unit], bits)

        largest = each_vector(e, pointer, arguments[2], [e.constant(0)] * UNROLL, use)
        while len(largest) > 1:
            largest = [e.lanewise("smax", *largest[i : i + 2]) for i in range(0, len(largest), 2)]
        return e.reduce("smax", largest[0])

    return types.int32(x, first, count, ahead), codegen


@intrinsic
def block_sums(typing_context, x, first, count, factor, ahead):
    """Give ``(sum q, sum q*q)`` (int64) of ``q = trunc(x * factor)`` over at most 4096 elements with ``|q| < 2^24``.

    Half of the next block is fetched from memory meanwhile, see ``block_maximum``.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        pointer = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], F32)
        factors = e.splat(arguments[3])
        wide = vector(I64, LANES // 2)

        def use(value, unit, values, at):
            if at is not None and unit % 2:
                e.prefetch(e.at(at, arguments[4], F32))
            q = b.fptosi(b.fmul(value, factors), vector(I32, LANES))
            # At most 64 + 4 additions of 24-bit numbers per accumulator and lane: they fit 32 bits.
            values[unit] = b.add(values[unit], q)
            pairs = b.bitcast(q, wide)
            odd = b.ashr(pairs, e.constant(32, I64, 8))
            even = b.ashr(b.shl(pairs, e.constant(32, I64, 8)), e.constant(32, I64, 8))
            squares = b.add(b.mul(even, even), b.mul(odd, odd))
            values[UNROLL + unit] = b.add(values[UNROLL + unit], squares)

        start = [e.constant(0)] * UNROLL + [e.constant(0, I64, 8)] * UNROLL
        end = each_vector(e, pointer, arguments[2], start, use)
        sums = [b.sext(value, vector(I64, LANES)) for value in end[:UNROLL]]
        squares = end[UNROLL:]
        for unit in range(1, UNROLL):
            sums[0], squares[0] = b.add(sums[0], sums[unit]), b.add(squares[0], squares[unit])
        return context.make_tuple(b, signature.return_type, [e.reduce("add", sums[0]), e.reduce("add", squares[0])])

    return types.UniTuple(types.int64, 2)(x, first, count, factor, ahead), codegen


def _ternary_bytes(e: Emitter, words: list[Any], values: list[Any], limit: Any, inverse: Any) -> Any:
    """Turn five random words and five vectors of x into a vector of 16 bytes."""
    b = e.b
    # The byte is summed in float32, exact for such integers: copysign and a masked addition make a signed digit.
    total = e.constant(121.0, F32)
    for plane, (word, value) in enumerate(zip(five_words(e, words), values)):
        uniform = b.sitofp(e.shift_right(word, 8), vector(F32, LANES))
        magnitude = e.lanewise("fabs", value)
        # This order of operands makes a NaN in x stay one, as in the reference.
        magnitude = b.select(b.fcmp_ordered("<", limit, magnitude), limit, magnitude)
        fires = b.fcmp_ordered("<", uniform, b.fmul(magnitude, inverse))
        digit = e.lanewise("copysign", e.constant(float(3**plane), F32), value)
        total = b.select(fires, b.fadd(total, digit), total)
    return b.trunc(b.fptosi(total, vector(I32, LANES)), vector(I8, LANES))


def _prepare(context, builder, signature, arguments):
    """Unpack the arguments of the encoder but the last two."""
    x, first, limit, inverse, key0, key1, round, stream, block, out, out_first = range(11)
    e = Emitter(builder)
    values = data_pointer(context, builder, signature.args[x], arguments[x], arguments[first], F32)
    target = data_pointer(context, builder, signature.args[out], arguments[out], arguments[out_first], I8)
    source = PhiloxVectors(e, (arguments[key0], arguments[key1]), arguments[round], arguments[stream])
    bounds = e.splat(arguments[limit]), e.splat(arguments[inverse])
    return e, values, target, source, source.products(arguments[block]), bounds


@intrinsic
def encode_groups(
    typing_context, x, first, limit, inverse, key0, key1, round, stream, block, out, out_first, count, ahead
):
    """Encode ``count`` elements from ``x[first]`` into ``out[out_first]``; ``block`` is that of the first lane.

    What the last group lacks is neither read nor fires. Elements ``ahead`` further on are fetched from memory
    meanwhile.
    """

    def codegen(context, builder, signature, arguments):
        e, values, target, source, start, bounds = _prepare(context, builder, signature, arguments)
        b, count, ahead = builder, arguments[11], arguments[12]

        def turn(unroll, offset, masked):
            def body(index, products):
                index = b.add(index, offset)
                at = e.at(values, b.mul(index, ir.Constant(I64, GROUP_SIZE)), F32)
                inputs = list(products)
                for group in range(1, unroll):
                    inputs += source.advance(list(products), 16 * group)
                words = source.words(inputs)
                if masked:
                    left = b.sub(count, b.mul(index, ir.Constant(I64, GROUP_SIZE)))
                    masks = e.lanes_below(left, PLANES * unroll)
                    inputs = [e.masked_load(e.at(at, LANES * k, F32), F32, mask) for k, mask in enumerate(masks)]
                else:
                    for k in range(PLANES * unroll):
                        e.prefetch(e.at(e.at(at, LANES * k, F32), ahead, F32))
                    inputs = [e.load(e.at(at, LANES * k, F32), F32, align=4) for k in range(PLANES * unroll)]
                for group in range(unroll):
                    octets = _ternary_bytes(e, words[group], inputs[PLANES * group :], *bounds)
                    to = b.mul(b.add(index, ir.Constant(I64, group)), ir.Constant(I64, GROUP_BYTES))
                    e.store(octets, e.at(target, to, I8))
                return source.advance(list(products), 16 * unroll)

            return body

        # Pairs of whole groups, then one or two groups, the last of which may lack elements.
        paired = b.mul(b.sdiv(count, ir.Constant(I64, 2 * GROUP_SIZE)), ir.Constant(I64, 2))
        groups = b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))
        products = loop(b, paired, 2, start, turn(2, ir.Constant(I64, 0), False))
        both = b.and_(b.sub(groups, paired), ir.Constant(I64, 2))
        loop(b, both, 2, products, turn(2, paired, True))
        loop(b, b.sub(b.sub(groups, paired), both), 1, products, turn(1, paired, True))
        return context.get_dummy_value()

    return (
        types.void(x, first, limit, inverse, key0, key1, round, stream, block, out, out_first, count, ahead),
        codegen,
    )
