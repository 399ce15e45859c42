# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies over packed digits: sums, words, decoding. See ``ternary/loops.py`` for who calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.numba_core.vectors import F32, I8, I16, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import GROUP_SIZE, LANES, PLANES

__all__ = ["decode_groups", "decode_streamed", "pack_blocks", "sum_to_digits", "sum_to_words", "unpack_blocks"]

# high_product(v, c) = floor(v / 3^k) for all bytes v: c = ceil(2^16 / 3^k).
_THIRDS = (21846, 7282, 2428, 810)
_AHEAD_BYTES = 4096  # distance of prefetches: some 64 turns of the loop, the latency of memory

_ELEMENTS = {types.uint8: I8, types.uint16: I16, types.uint32: I32}


def _columns(e: Emitter, rows: Any, stride: Any, number: Any, lanes: int, units: int) -> list[list[Any]]:
    """Add up ``floor(byte / 3^k)``, k = 0..4, over rows, for ``units`` vectors of ``lanes`` bytes side by side.

    The sums wrap modulo 2^16, which is harmless: the digit sums taken from them are below 2^16.
    ``number`` may be an ``int``: then there is no loop, and no prefetch (see ``_over_rows``).
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

    For some numbers of rows the loop over rows is unrolled: every load instruction then walks along one row, which is
    what the prefetchers of CPUs recognise. One instruction that jumps from row to row took twice the time.
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


@intrinsic
def sum_to_digits(typing_context, rows, first, stride, number, length, digits):
    """Write the digit sums of ``length`` bytes (a multiple of 16) from ``rows[first]`` on to ``digits`` (uint16)."""

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        target = data_pointer(context, builder, signature.args[5], arguments[5], ir.Constant(I64, 0), I16)

        def use(index, number, lanes, units):
            for unit, sums in enumerate(_columns(e, e.at(source, index, I8), arguments[2], number, lanes, units)):
                at = e.at(target, b.mul(b.add(index, ir.Constant(I64, lanes * unit)), ir.Constant(I64, PLANES)), I16)
                for plane, total in enumerate(sums):
                    if plane < PLANES - 1:
                        total = b.sub(total, b.mul(sums[plane + 1], e.constant(3, I16, lanes)))
                    for group in range(lanes // LANES):
                        part = e.shuffle(total, total, range(LANES * group, LANES * (group + 1)))
                        e.store(part, e.at(at, GROUP_SIZE * group + LANES * plane, I16))

        _over_rows(e, arguments[3], (2, 3, 5, 6, 7, 8), arguments[4], use)
        return context.get_dummy_value()

    return types.void(rows, first, stride, number, length, digits), codegen


@intrinsic
def sum_to_words(typing_context, rows, first, stride, number, length, base, out, out_first):
    """Sum ``length`` bytes of rows straight into 16-bit words of five digits, from ``out[out_first]`` on.

    Digit sums are ``d_k = S_k - 3 S_{k+1}``, so the word is
    ``S_0 + (base - 3) (S_1 + base (S_2 + base (S_3 + base S_4)))``.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        target = data_pointer(context, builder, signature.args[6], arguments[6], arguments[7], I8)
        narrow = b.trunc(arguments[5], I16)

        def use(index, number, lanes, units):
            bases, less = e.splat(narrow, lanes), e.splat(b.sub(narrow, ir.Constant(I16, 3)), lanes)
            for unit, sums in enumerate(_columns(e, e.at(source, index, I8), arguments[2], number, lanes, units)):
                word = sums[4]
                for plane in (3, 2, 1):
                    word = b.add(sums[plane], b.mul(word, bases))
                word = b.add(sums[0], b.mul(word, less))
                e.store(word, e.at(e.at(target, b.mul(index, ir.Constant(I64, 2)), I8), 2 * lanes * unit, I8))

        _over_rows(e, arguments[3], (4,), arguments[4], use)
        return context.get_dummy_value()

    return types.void(rows, first, stride, number, length, base, out, out_first), codegen


@intrinsic
def pack_blocks(typing_context, digits, blocks, per_word, base, word, out, out_first):
    """Pack ``blocks`` of ``16 * per_word`` digits into words of ``word``'s type, at ``out[out_first]``.

    Digits are uint16, or float32 of whole numbers below 2^16.
    """
    element, given = _ELEMENTS[word], F32 if digits.dtype == types.float32 else I16

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], ir.Constant(I64, 0), given)
        target = data_pointer(context, builder, signature.args[5], arguments[5], arguments[6], I8)
        per_word, bases = arguments[2], e.splat(b.trunc(arguments[3], I32))

        def block(index, _):
            last = b.mul(b.add(b.mul(index, per_word), b.sub(per_word, ir.Constant(I64, 1))), ir.Constant(I64, LANES))

            def digit(plane, values):
                here = e.load(e.at(source, b.sub(last, b.mul(plane, ir.Constant(I64, LANES))), given), given)
                flat = vector(I32, LANES)
                here = b.fptosi(here, flat) if given is F32 else b.zext(here, flat)
                return [b.add(b.mul(values[0], bases), here)]

            (value,) = loop(b, per_word, 1, [e.constant(0)], digit)
            if element is not I32:
                value = b.trunc(value, vector(element, LANES))
            e.store(value, e.at(target, b.mul(index, ir.Constant(I64, LANES * element.width // 8)), I8))
            return []

        loop(b, arguments[1], 1, [], block)
        return context.get_dummy_value()

    return types.void(digits, blocks, per_word, base, word, out, out_first), codegen


@intrinsic
def unpack_blocks(typing_context, words, first, word, blocks, per_word, base, reciprocal, values):
    """Undo ``pack_blocks`` from ``words[first]`` on, less ``base // 2``, into ``values`` (int32).

    ``reciprocal`` is ``(multiplier, addend, shift)`` of :func:`gradwire.kernels.cpu.reciprocal32`.
    """
    element = _ELEMENTS[word]

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        target = data_pointer(context, builder, signature.args[7], arguments[7], ir.Constant(I64, 0), I32)
        per_word = arguments[4]
        narrow = b.trunc(arguments[5], I32)
        bases, shifted = e.splat(narrow), e.splat(b.lshr(narrow, ir.Constant(I32, 1)))
        multiplier, addend, shift = (e.splat(b.extract_value(arguments[6], i)) for i in range(3))
        wide, flat = vector(I64, LANES), vector(I32, LANES)

        def block(index, _):
            value = e.load(e.at(source, b.mul(index, ir.Constant(I64, LANES * element.width // 8)), I8), element)
            value = value if element is I32 else b.zext(value, flat)
            at = e.at(target, b.mul(b.mul(index, per_word), ir.Constant(I64, LANES)), I32)

            def digit(plane, values):
                quotient = b.add(b.mul(b.zext(values[0], wide), multiplier), addend)
                quotient = b.trunc(b.lshr(quotient, shift), flat)
                remainder = b.sub(b.sub(values[0], b.mul(quotient, bases)), shifted)
                e.store(remainder, e.at(at, b.mul(plane, ir.Constant(I64, LANES)), I32))
                return [quotient]

            last = b.sub(per_word, ir.Constant(I64, 1))
            (value,) = loop(b, last, 1, [value], digit)
            e.store(b.sub(value, shifted), e.at(at, b.mul(last, ir.Constant(I64, LANES)), I32))
            return []

        loop(b, arguments[3], 1, [], block)
        return context.get_dummy_value()

    return types.void(words, first, word, blocks, per_word, base, reciprocal, values), codegen


def _floats(e: Emitter, words: Any, base: Any, reciprocals: Any, scale: Any) -> list[list[Any]]:
    """Turn a vector of 16-bit words of five digits into ``[group][plane]`` vectors of 16 scaled floats."""
    b, lanes = e.b, words.type.count

    def divide(value: Any, index: int) -> Any:
        multiplier, shift = (e.splat(b.trunc(b.extract_value(reciprocals, 2 * index + i), I16), lanes) for i in (0, 1))
        return b.lshr(e.high_product(value, multiplier), shift)

    # By base, base^2 and base^4; base^3 through base^2, since its own multiplier may need 17 bits.
    second = divide(words, 1)
    quotients = [words, divide(words, 0), second, divide(second, 0), divide(words, 2)]
    bases = e.splat(b.trunc(base, I16), lanes)
    shifted = e.splat(b.trunc(b.lshr(base, ir.Constant(I64, 1)), I16), lanes)
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


@intrinsic
def decode_groups(typing_context, words, first, word, count, base, reciprocals, scale, x, x_first):
    """Decode five-digit words of 8 or 16 bits into ``count`` elements of ``x`` (float32) from ``x_first`` on."""
    element = _ELEMENTS[word]

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        target = data_pointer(context, builder, signature.args[7], arguments[7], arguments[8], F32)
        count, scale = arguments[3], e.splat(arguments[6])
        pairs = b.sdiv(count, ir.Constant(I64, 2 * GROUP_SIZE))
        done = b.mul(pairs, ir.Constant(I64, 2 * GROUP_SIZE))

        def decoded(source, groups):
            words = _load_words(e, source, element, LANES * groups)
            return [v for group in _floats(e, words, arguments[4], arguments[5], scale) for v in group]

        def pair(index, _):
            to = e.at(target, b.mul(index, ir.Constant(I64, 2 * GROUP_SIZE)), F32)
            for k, value in enumerate(decoded(e.at(source, b.mul(index, ir.Constant(I64, 2 * LANES)), element), 2)):
                e.store(value, e.at(to, LANES * k, F32), align=4)
            return []

        def masked(index, carried):
            (source,) = carried
            to = e.at(target, b.add(done, index), F32)
            masks = e.lanes_below(b.sub(b.sub(count, done), index), PLANES)
            for k, (value, mask) in enumerate(zip(decoded(source, 1), masks)):
                e.masked_store(value, e.at(to, LANES * k, F32), mask)
            return [e.at(source, LANES, element)]

        loop(b, pairs, 1, [], pair)
        source_left = e.at(source, b.mul(pairs, ir.Constant(I64, 2 * LANES)), element)
        loop(b, b.sub(count, done), GROUP_SIZE, [source_left], masked)
        return context.get_dummy_value()

    return types.void(words, first, word, count, base, reciprocals, scale, x, x_first), codegen


@intrinsic
def decode_streamed(typing_context, words, first, word, groups, base, reciprocals, scale, x, x_first):
    """Decode an even number of groups, as ``decode_groups`` does, with aligned stores past the caches.

    Words of a group before and of one after must exist; **their floats are spoilt**, for the caller to decode later.

    For an x that is not aligned to its vectors, word vectors are composed with lanes rotated: a vector of x then takes
    its first lanes from one plane and its last ones from the next.
    """
    element = _ELEMENTS[word]

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        source = data_pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        target = data_pointer(context, builder, signature.args[7], arguments[7], arguments[8], F32)
        address = b.ptrtoint(target, I64)
        head = b.lshr(b.and_(b.neg(address), ir.Constant(I64, 63)), ir.Constant(I64, 2))
        shift = b.sub(head, ir.Constant(I64, LANES))
        target, source = e.at(target, shift, F32), e.at(source, shift, element)
        first_plane = e.first_lanes(b.neg(shift))
        both = e.shuffle(first_plane, first_plane, range(2 * LANES))
        scale = e.splat(arguments[6])

        def turn(index, carried):
            at = e.at(source, b.mul(index, ir.Constant(I64, LANES)), element)
            later, earlier = (_load_words(e, e.at(at, by, element), element, 2 * LANES) for by in (LANES, 0))
            to = e.at(target, b.mul(index, ir.Constant(I64, GROUP_SIZE)), F32)
            groups = _floats(e, b.select(both, later, earlier), arguments[4], arguments[5], scale)
            values = [*carried, *groups[0], *groups[1]]
            for k in range(2 * PLANES):
                e.stream(b.select(first_plane, values[k], values[k + 1]), e.at(to, LANES * k, F32))
            return values[-1:]

        (last,) = loop(b, arguments[3], 2, [e.constant(0.0, F32)], turn)
        e.stream(last, e.at(target, b.mul(arguments[3], ir.Constant(I64, GROUP_SIZE)), F32))
        b.fence("seq_cst")  # such stores are not ordered with others
        return context.get_dummy_value()

    return types.void(words, first, word, groups, base, reciprocals, scale, x, x_first), codegen
