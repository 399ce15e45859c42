# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that encode, sum and decode trits. ``loops.py`` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.philox import PhiloxVectors, five_words
from gradwire.kernels.numba_core.vectors import F32, I8, I16, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.packing.simd import write_scaled
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, LANES, PLANES

# high_product(v, c) = floor(v / 3^k) for all bytes v: c = ceil(2^16 / 3^k).
_THIRDS = (21846, 7282, 2428, 810)
_AHEAD_BYTES = 4096  # distance of prefetches: about 64 turns of the loop, the latency of memory
_AHEAD = 2560  # distance of the encoder's prefetches, in elements


def _ternary_bytes(e: Emitter, words: list[Any], values: list[Any], limit: Any, inverse: Any) -> Any:
    """Turn five random words and five vectors of x into a vector of 16 bytes."""
    b = e.b
    # The byte is summed in float32, which is exact here: copysign and a masked addition make a signed digit.
    total = e.constant(121.0, F32)
    for plane, (word, value) in enumerate(zip(five_words(e, words), values)):
        uniform = b.sitofp(e.shift_right(word, 8), vector(F32, LANES))
        magnitude = e.lanewise("fabs", value)
        # With this order of operands a NaN in x stays a NaN, as in the reference.
        magnitude = b.select(b.fcmp_ordered("<", limit, magnitude), limit, magnitude)
        fires = b.fcmp_ordered("<", uniform, b.fmul(magnitude, inverse))
        digit = e.lanewise("copysign", e.constant(float(3**plane), F32), value)
        total = b.select(fires, b.fadd(total, digit), total)
    return b.trunc(b.fptosi(total, vector(I32, LANES)), vector(I8, LANES))


@vector_body()
def encode_groups(e, x, first, count, limit, inverse, noise, out, at):
    """Encode ``count`` elements from ``x[first]`` into ``out[at]``.

    Missing elements of the last group are not read and have the trit zero.
    """
    b, values, target = e.b, x.pointer(first, F32), out.pointer(at, I8)
    source, bounds = PhiloxVectors(e, noise), (e.splat(limit), e.splat(inverse))

    def turn(unroll: int, offset: Any, masked: bool) -> Any:
        def body(index: Any, products: list[Any]) -> list[Any]:
            index = b.add(index, offset)
            here = e.at(values, b.mul(index, ir.Constant(I64, GROUP_SIZE)), F32)
            inputs = list(products)
            for group in range(1, unroll):
                inputs += source.advance(list(products), 16 * group)
            words = source.words(inputs)
            if masked:
                left = b.sub(count, b.mul(index, ir.Constant(I64, GROUP_SIZE)))
                masks = e.lanes_below(left, PLANES * unroll)
                inputs = [e.masked_load(e.at(here, LANES * k, F32), F32, mask) for k, mask in enumerate(masks)]
            else:
                for k in range(PLANES * unroll):
                    e.prefetch(e.at(here, LANES * k + _AHEAD, F32))
                inputs = [e.load(e.at(here, LANES * k, F32), F32, align=4) for k in range(PLANES * unroll)]
            for group in range(unroll):
                octets = _ternary_bytes(e, words[group], inputs[PLANES * group :], *bounds)
                to = b.mul(b.add(index, ir.Constant(I64, group)), ir.Constant(I64, GROUP_BYTES))
                e.store(octets, e.at(target, to, I8))
            return source.advance(list(products), 16 * unroll)

        return body

    # Pairs of whole groups, then one or two groups, the last of which may be partial.
    paired = b.mul(b.sdiv(count, ir.Constant(I64, 2 * GROUP_SIZE)), ir.Constant(I64, 2))
    groups = b.sdiv(b.add(count, ir.Constant(I64, GROUP_SIZE - 1)), ir.Constant(I64, GROUP_SIZE))
    products = loop(b, paired, 2, source.products(), turn(2, ir.Constant(I64, 0), False))
    both = b.and_(b.sub(groups, paired), ir.Constant(I64, 2))
    loop(b, both, 2, products, turn(2, paired, True))
    loop(b, b.sub(b.sub(groups, paired), both), 1, products, turn(1, paired, True))


def _columns(e: Emitter, rows: Any, stride: Any, number: Any, lanes: int, units: int) -> list[list[Any]]:
    """Sum ``floor(byte / 3^k)``, k = 0..4, over rows, for ``units`` vectors of ``lanes`` bytes side by side.

    The sums wrap modulo 2^16, which is harmless since the digit sums computed from them are below 2^16. If ``number``
    is an ``int``, the loop over rows is unrolled, without prefetches (see ``_over_rows``).
    """
    b, kind = e.b, vector(I16, lanes)
    unrolled = isinstance(number, int)

    def body(index: Any, sums: list[Any]) -> list[Any]:
        row, new = e.at(rows, b.mul(index, stride), I8), []
        for unit in range(units):
            value = b.zext(e.load(e.at(row, lanes * unit, I8), I8, lanes), kind)
            if unit == 0 and not unrolled:
                e.prefetch(e.at(row, _AHEAD_BYTES, I8))
            parts = [value, *(e.high_product(value, e.constant(c, I16, lanes)) for c in _THIRDS)]
            new += [b.add(total, part) for total, part in zip(sums[PLANES * unit :], parts)]
        return new

    total = [e.constant(0, I16, lanes)] * (PLANES * units)
    if unrolled:
        for row in range(number):
            total = body(ir.Constant(I64, row), total)
    else:
        total = loop(b, number, 1, total, body)
    return [total[PLANES * unit : PLANES * (unit + 1)] for unit in range(units)]


def _over_rows(e: Emitter, number: Any, unrolled: Sequence[int], length: Any, use: Any) -> None:
    """Call ``use(index, number, lanes, units)`` for 64 bytes at a time, then for the remaining groups of 16.

    The loop over rows is unrolled for the numbers of rows in ``unrolled``. Each load instruction then reads along one
    row, a pattern that CPUs prefetch; one instruction that jumps from row to row took twice the time.
    """
    b = e.b
    end = b.append_basic_block("summed")
    for rows in [*unrolled, number]:
        if rows is not number:
            this, other = b.append_basic_block(f"rows{rows}"), b.append_basic_block("others")
            b.cbranch(b.icmp_signed("==", number, ir.Constant(I64, rows)), this, other)
            b.position_at_end(this)
        whole = b.and_(length, ir.Constant(I64, -64))
        loop(b, whole, 64, [], lambda index, _, rows=rows: use(index, rows, 32, 2) or [])
        rest = b.sub(length, whole)
        loop(b, rest, 16, [], lambda index, _, rows=rows, whole=whole: use(b.add(index, whole), rows, 16, 1) or [])
        b.branch(end)
        b.position_at_end(end if rows is number else other)


@vector_body()
def sum_to_digits(e, rows, first, length, digits):
    """Write the digit sums of ``length`` bytes (a multiple of 16) of each row, from ``first`` on, as uint16."""
    b, source, target = e.b, rows.octets.pointer(first, I8), digits.pointer(0, I16)

    def use(index: Any, number: Any, lanes: int, units: int) -> None:
        for unit, sums in enumerate(_columns(e, e.at(source, index, I8), rows.stride, number, lanes, units)):
            at = e.at(target, b.mul(b.add(index, ir.Constant(I64, lanes * unit)), ir.Constant(I64, PLANES)), I16)
            for plane, total in enumerate(sums):
                if plane < PLANES - 1:
                    total = b.sub(total, b.mul(sums[plane + 1], e.constant(3, I16, lanes)))
                for group in range(lanes // LANES):
                    part = e.shuffle(total, total, range(LANES * group, LANES * (group + 1)))
                    e.store(part, e.at(at, GROUP_SIZE * group + LANES * plane, I16))

    _over_rows(e, rows.number, (2, 3, 5, 6, 7, 8), length, use)


@vector_body()
def sum_to_words(e, rows, first, length, layout, out, at):
    """Sum ``length`` bytes of each row, from ``first`` on, into 16-bit words of five digits, from ``out[at]`` on.

    Digit sums are ``d_k = S_k - 3 S_{k+1}``, so the word is
    ``S_0 + (base - 3) (S_1 + base (S_2 + base (S_3 + base S_4)))``.
    """
    b, source, target = e.b, rows.octets.pointer(first, I8), out.pointer(at, I8)
    narrow = b.trunc(layout.base, I16)

    def use(index: Any, number: Any, lanes: int, units: int) -> None:
        bases, less = e.splat(narrow, lanes), e.splat(b.sub(narrow, ir.Constant(I16, 3)), lanes)
        for unit, sums in enumerate(_columns(e, e.at(source, index, I8), rows.stride, number, lanes, units)):
            word = sums[4]
            for plane in (3, 2, 1):
                word = b.add(sums[plane], b.mul(word, bases))
            word = b.add(sums[0], b.mul(word, less))
            e.store(word, e.at(e.at(target, b.mul(index, ir.Constant(I64, 2)), I8), 2 * lanes * unit, I8))

    _over_rows(e, rows.number, (4,), length, use)


def _floats(e: Emitter, words: Any, layout: Any, scale: Any) -> list[list[Any]]:
    """Turn a vector of 16-bit words of five digits into ``[group][plane]`` vectors of 16 scaled floats."""
    b, lanes = e.b, words.type.count

    def divide(value: Any, index: int) -> Any:
        multiplier, shift = (e.splat(b.trunc(layout.narrow[2 * index + i], I16), lanes) for i in (0, 1))
        return b.lshr(e.high_product(value, multiplier), shift)

    # Divided by base, base^2 and base^4; base^3 by way of base^2, since its multiplier may need 17 bits.
    second = divide(words, 1)
    quotients = [words, divide(words, 0), second, divide(second, 0), divide(words, 2)]
    bases = e.splat(b.trunc(layout.base, I16), lanes)
    shifted = e.splat(b.trunc(b.lshr(layout.base, ir.Constant(I64, 1)), I16), lanes)
    result: list[list[Any]] = [[] for _ in range(lanes // LANES)]
    for plane, quotient in enumerate(quotients):
        if plane < PLANES - 1:
            quotient = b.sub(quotient, b.mul(quotients[plane + 1], bases))
        signed = b.sub(quotient, shifted)
        for group, planes in enumerate(result):
            part = e.shuffle(signed, signed, range(LANES * group, LANES * (group + 1)))
            planes.append(b.fmul(b.sitofp(b.sext(part, vector(I32, LANES)), vector(F32, LANES)), scale))
    return result


def _load_words(e: Emitter, pointer: Any, element: Any, lanes: int) -> Any:
    value = e.load(pointer, element, lanes)
    return value if element is I16 else e.b.zext(value, vector(I16, lanes))


@vector_body(types.void, "word")
def decode_groups(e, words, first, word, layout, count, scale, x, at):
    """Decode five-digit words of 8 or 16 bits into ``count`` elements of ``x`` (float32) from ``at`` on."""
    b, element, scale = e.b, I8 if word.bitwidth == 8 else I16, e.splat(scale)
    source, target = words.pointer(first, I8), x.pointer(at, F32)
    pairs = b.sdiv(count, ir.Constant(I64, 2 * GROUP_SIZE))
    done = b.mul(pairs, ir.Constant(I64, 2 * GROUP_SIZE))

    def decoded(source: Any, groups: int) -> list[Any]:
        words = _load_words(e, source, element, LANES * groups)
        return [v for group in _floats(e, words, layout, scale) for v in group]

    def pair(index: Any, _: Any) -> list[Any]:
        to = e.at(target, b.mul(index, ir.Constant(I64, 2 * GROUP_SIZE)), F32)
        for k, value in enumerate(decoded(e.at(source, b.mul(index, ir.Constant(I64, 2 * LANES)), element), 2)):
            e.store(value, e.at(to, LANES * k, F32), align=4)
        return []

    def masked(index: Any, carried: list[Any]) -> list[Any]:
        (source,) = carried
        to = e.at(target, b.add(done, index), F32)
        masks = e.lanes_below(b.sub(b.sub(count, done), index), PLANES)
        for k, (value, mask) in enumerate(zip(decoded(source, 1), masks)):
            e.masked_store(value, e.at(to, LANES * k, F32), mask)
        return [e.at(source, LANES, element)]

    loop(b, pairs, 1, [], pair)
    source_left = e.at(source, b.mul(pairs, ir.Constant(I64, 2 * LANES)), element)
    loop(b, b.sub(count, done), GROUP_SIZE, [source_left], masked)


@vector_body()
def write_digits(e, floats, first, count, middle, factor, x, at, accumulate, streamed):
    """Write, or add, ``(digit - middle) * factor`` for ``count`` digits from ``floats[first]`` on to ``x[at]`` on."""
    b, middles, factors = e.b, e.splat(middle), e.splat(factor)
    run = ir.Constant(I64, 0), count

    def scaled(digit: Any) -> Any:
        return b.fmul(b.fsub(digit, middles), factors)

    write_scaled(e, floats.pointer(first, F32), x.pointer(at, F32), run, scaled, accumulate, streamed)


@vector_body(types.void, "word")
def decode_streamed(e, words, first, word, layout, groups, scale, x, at):
    """Decode an even number of groups like ``decode_groups``, with aligned stores past the caches.

    Words of one group before and of one group after must exist. **Elements of these groups are overwritten**: the
    caller decodes them afterwards.

    If x is not aligned to vectors, word vectors are loaded with rotated lanes: an aligned vector of x takes its first
    lanes from one plane and its last lanes from the next.
    """
    b, element, scale = e.b, I8 if word.bitwidth == 8 else I16, e.splat(scale)
    source, target = words.pointer(first, I8), x.pointer(at, F32)
    address = b.ptrtoint(target, I64)
    head = b.lshr(b.and_(b.neg(address), ir.Constant(I64, 63)), ir.Constant(I64, 2))
    shift = b.sub(head, ir.Constant(I64, LANES))
    target, source = e.at(target, shift, F32), e.at(source, shift, element)
    first_plane = e.first_lanes(b.neg(shift))
    both = e.shuffle(first_plane, first_plane, range(2 * LANES))

    def turn(index: Any, carried: list[Any]) -> list[Any]:
        here = e.at(source, b.mul(index, ir.Constant(I64, LANES)), element)
        later, earlier = (_load_words(e, e.at(here, by, element), element, 2 * LANES) for by in (LANES, 0))
        to = e.at(target, b.mul(index, ir.Constant(I64, GROUP_SIZE)), F32)
        pair = _floats(e, b.select(both, later, earlier), layout, scale)
        values = [*carried, *pair[0], *pair[1]]
        for k in range(2 * PLANES):
            e.stream(b.select(first_plane, values[k], values[k + 1]), e.at(to, LANES * k, F32))
        return values[-1:]

    (last,) = loop(b, groups, 2, [e.constant(0.0, F32)], turn)
    e.stream(last, e.at(target, b.mul(groups, ir.Constant(I64, GROUP_SIZE)), F32))
    b.fence("seq_cst")  # stores past the caches are not ordered with others
