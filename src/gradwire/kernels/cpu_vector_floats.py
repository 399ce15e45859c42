# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies over float32 input: moments and the ternary encoder. See ``cpu.py`` for who calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, LANES, PLANES
from gradwire.kernels.vectors import F32, I8, I32, I64, Emitter, data_pointer, loop, vector

__all__ = ["block_maximum", "block_sums", "encode_groups"]

_UNROLL = 4
_LOW = 0xFFFFFFFF
_EVEN = [lane for pair in range(8) for lane in (2 * pair, 16 + 2 * pair)]
_ODD = [lane + 1 for lane in _EVEN]


def _vectors(e: Emitter, pointer: Any, count: Any, carried: list[Any], use: Any) -> list[Any]:
    """Loop over ``count`` floats, 16 at a time: four unmasked vectors a turn, then single masked ones.

    ``use(value, unit, carried, pointer)`` takes a vector (zeros past the end) and
    updates the values of accumulator ``unit``.
    """
    b = e.b
    step = LANES * _UNROLL
    whole = b.and_(count, ir.Constant(I64, -step))

    def turn(index: Any, values: list[Any]) -> list[Any]:
        for unit in range(_UNROLL):
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

        largest = _vectors(e, pointer, arguments[2], [e.constant(0)] * _UNROLL, use)
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
            values[_UNROLL + unit] = b.add(values[_UNROLL + unit], squares)

        start = [e.constant(0)] * _UNROLL + [e.constant(0, I64, 8)] * _UNROLL
        end = _vectors(e, pointer, arguments[2], start, use)
        sums = [b.sext(value, vector(I64, LANES)) for value in end[:_UNROLL]]
        squares = end[_UNROLL:]
        for unit in range(1, _UNROLL):
            sums[0], squares[0] = b.add(sums[0], sums[unit]), b.add(squares[0], squares[unit])
        return context.make_tuple(b, signature.return_type, [e.reduce("add", sums[0]), e.reduce("add", squares[0])])

    return types.UniTuple(types.int64, 2)(x, first, count, factor, ahead), codegen


class _Philox:
    """Philox4x32-7 on 16 blocks at once, for blocks of one parameter, round and stream.

    A state word lies in the lower half of 64-bit lanes, where the CPU's 32 x 32 -> 64 bit product wants it; what is in
    the upper half is noise. The even blocks form one register of 8 lanes, the odd ones a second: after the last round
    one shuffle of both puts the blocks in order. Rounds 0 and 1 have uniform halves, computed as scalars.
    """

    def __init__(self, e: Emitter, key: tuple[Any, Any], round: Any, stream: Any) -> None:
        b, self.e = e.b, e
        word = lambda value: ir.Constant(I64, value)  # noqa: E731
        low = lambda value: b.and_(value, word(_LOW))  # noqa: E731
        keys = [
            [b.add(key[side], ir.Constant(I32, (KEY_STEPS[side] * turn) & _LOW)) for side in (0, 1)]
            for turn in range(ROUNDS)
        ]
        self.keys = [[b.bitcast(e.splat(k), vector(I64, 8)) for k in pair] for pair in keys]
        wide = [[b.zext(k, I64) for k in pair] for pair in keys]
        splat = lambda value: e.splat(value, 8)  # noqa: E731
        stream = b.zext(stream, I64)
        # Round 0: counter = (block, low, high, stream); all but the block is uniform.
        p1 = b.mul(b.lshr(round, word(32)), word(MULTIPLIERS[1]))
        c0, c1 = b.xor(b.xor(b.lshr(p1, word(32)), low(round)), wide[0][0]), low(p1)
        self.first = splat(b.xor(stream, wide[0][1]))  # c2 of round 1 = high(p0) ^ this
        # Round 1: c0 and c1 are uniform, c2 and c3 = low(p0) are not.
        p0 = b.mul(c0, word(MULTIPLIERS[0]))
        self.second = splat(b.xor(c1, wide[1][0]))  # c0 of round 2 = high(p1) ^ this
        self.third = splat(b.xor(b.lshr(p0, word(32)), wide[1][1]))  # c2 of round 2 = c3 ^ this
        # Round 2: c3 = low(p0) of round 1 is still uniform.
        self.fourth = splat(b.xor(low(p0), wide[2][1]))
        self.factors = [e.constant(m, I64, 8) for m in MULTIPLIERS]

    def products(self, block: Any) -> list[Any]:
        """Give the first product of 16 blocks from ``block`` (i64) on: even ones, odd ones."""
        b, e = self.e.b, self.e
        lanes = [e.constants(range(half, 16, 2), I64) for half in (0, 1)]
        return [self._product(b.add(e.splat(block, 8), lane), 0) for lane in lanes]

    def advance(self, products: list[Any], blocks: int) -> list[Any]:
        """Move on by a number of blocks: no wrap, since a parameter has at most 2^32 of them."""
        return [self.e.b.add(p, self.e.constant(MULTIPLIERS[0] * blocks, I64, 8)) for p in products]

    def _product(self, state: Any, side: int) -> Any:
        b = self.e.b
        return b.mul(b.and_(state, self.e.constant(_LOW, I64, 8)), self.factors[side])

    def _high(self, product: Any) -> Any:
        return self.e.shift_right(product, 32)

    def words(self, products: list[Any]) -> list[list[Any]]:
        """Give the four output words of ``len(products) / 2`` groups, each a vector of 16 blocks in order.

        All groups go through a round together, so that their instructions interleave.
        """
        b = self.e.b
        c2 = [b.xor(self._high(p), self.first) for p in products]
        p1 = [self._product(c, 1) for c in c2]
        state = [(b.xor(self._high(q), self.second), q, b.xor(p, self.third), None) for p, q in zip(products, p1)]
        for turn in range(2, ROUNDS - 1):
            pairs = [(self._product(c[0], 0), self._product(c[2], 1)) for c in state]
            k0, k1 = self.keys[turn]
            state = [
                (
                    b.xor(b.xor(self._high(q), c[1]), k0),
                    q,
                    b.xor(self._high(p), self.fourth) if turn == 2 else b.xor(b.xor(self._high(p), c[3]), k1),
                    p,
                )
                for c, (p, q) in zip(state, pairs)
            ]
        return [self._last(state[i], state[i + 1]) for i in range(0, len(state), 2)]

    def _last(self, even: Any, odd: Any) -> list[Any]:
        b, e = self.e.b, self.e
        flat = vector(I32, 16)
        join = lambda first, second, lanes: e.shuffle(b.bitcast(first, flat), b.bitcast(second, flat), lanes)  # noqa: E731
        k0, k1 = (b.bitcast(key, flat) for key in self.keys[ROUNDS - 1])
        p0, q0 = (self._product(c[0], 0) for c in (even, odd))
        p1, q1 = (self._product(c[2], 1) for c in (even, odd))
        return [
            b.xor(b.xor(join(p1, q1, _ODD), join(even[1], odd[1], _EVEN)), k0),
            join(p1, q1, _EVEN),
            b.xor(b.xor(join(p0, q0, _ODD), join(even[3], odd[3], _EVEN)), k1),
            join(p0, q0, _EVEN),
        ]


def _ternary_bytes(e: Emitter, words: list[Any], values: list[Any], limit: Any, inverse: Any) -> Any:
    """Turn five random words and five vectors of x into a vector of 16 bytes."""
    b = e.b
    keep = lambda mask, first, second: b.or_(  # noqa: E731
        b.and_(first, e.constant(mask)), b.and_(second, e.constant(mask ^ _LOW))
    )
    spare = keep(
        0xFFFF0000,
        keep(0xFF000000, e.shift_left(words[0], 24), e.shift_left(words[1], 16)),
        e.shift_left(words[2], 8),
    )
    # The byte is summed in float32, exact for such integers: copysign and a masked addition make a signed digit.
    total = e.constant(121.0, F32)
    for plane, (word, value) in enumerate(zip([*words, spare], values)):
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
    source = _Philox(e, (arguments[key0], arguments[key1]), arguments[round], arguments[stream])
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
