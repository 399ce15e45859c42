# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of the rANS coder. ``rans_loops.py`` calls them.

A decoder distributes the next words to the lanes that need one. The fastest way depends on the CPU, so there are three
forms of the decoder: :class:`Expanded`, :class:`Widened` and :class:`Picked`. No form uses gathers: table entries are
scalar loads, see :meth:`Emitter.pick`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gradwire.kernels.numba_core.vectors import F32, I8, I16, I32, I64, Emitter, data_pointer, loop, vector

_GROUPS = 8  # vectors of 16 lanes in a row


class Expanded(NamedTuple):
    """Expand words of 16 bits from memory: one instruction with AVX-512 VBMI2, else a branch for each lane."""

    vectors: bool = True


class Widened(NamedTuple):
    """Widen words to 32 bits and expand them, for which AVX-512F has an instruction."""

    vectors: bool = True


class Picked(NamedTuple):
    """Count the short lanes before each lane, and load its word by that index: for CPUs without an expansion."""

    vectors: bool = True


def _next_words(e: Emitter, form: Any, pointer: Any, short: Any) -> Any:
    """Distribute the words from ``pointer`` on to the short lanes, as 32 bits; other lanes are unspecified."""
    b, wide = e.b, vector(I32, e.lanes)
    if form is Expanded:
        return b.zext(e.expand_load(pointer, I16, short), wide)
    if form is Widened:
        # By way of the stack, since LLVM expands from memory only. The states follow the words, so that 16 words can
        # be read wherever one can.
        room = cgutils.alloca_once(b, wide)
        b.store(b.zext(e.load(pointer, I16), wide), room)
        return e.expand_load(room, I32, short)
    ones = b.zext(short, vector(I16, e.lanes))
    total, zero = ones, e.constant(0, I16)
    distance = 1
    while distance < e.lanes:
        moved = [lane - distance if lane >= distance else e.lanes for lane in range(e.lanes)]
        total = b.add(total, e.shuffle(total, zero, moved))
        distance *= 2
    return b.zext(e.pick(pointer, b.zext(b.sub(total, ones), wide), I16), wide)


def _states(e: Emitter, pointer: Any) -> list[Any]:
    return [e.load(e.at(pointer, e.lanes * group, I32), I32) for group in range(_GROUPS)]


def _keep_states(e: Emitter, pointer: Any, states: list[Any]) -> None:
    for group, state in enumerate(states):
        e.store(state, e.at(pointer, e.lanes * group, I32))


@intrinsic
def decode_rows(typing_context, form, data, stop, rows, table, states, out, first):
    """Decode ``rows`` rows to ``out[first:]``; return the end of the words that are not yet read.

    ``form`` is :class:`Expanded`, :class:`Widened` or :class:`Picked`. ``table`` (uint32 ``[4096]``) holds
    ``f * 2^20 + (slot - start) * 2^8 + symbol``. At least 128 words for each row precede
    ``stop``, and 32 bytes follow it.
    """
    chosen = form.instance_class

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        places = ((1, zero, I8), (4, zero, I32), (5, zero, I32), (6, arguments[7], I8))
        source, slots, kept, target = (
            data_pointer(context, b, signature.args[k], arguments[k], index, kind) for k, index, kind in places
        )

        def body(index, carried):
            place, old, found, short = carried[0], carried[1:], [], []
            row = e.at(target, b.mul(index, ir.Constant(I64, e.lanes * _GROUPS)), I8)
            for group, state in enumerate(old):
                entry = e.pick(slots, b.and_(state, e.constant(4095)), I32)
                bias = b.and_(e.shift_right(entry, 8), e.constant(4095))
                found.append(b.add(b.mul(e.shift_right(entry, 20), e.shift_right(state, 12)), bias))
                short.append(b.icmp_unsigned("<", found[-1], e.constant(1 << 16)))
                e.store(b.trunc(entry, vector(I8, e.lanes)), e.at(row, e.lanes * group, I8))
            for group in reversed(range(_GROUPS)):
                place = b.sub(place, b.shl(e.count(short[group]), ir.Constant(I64, 1)))
                words = _next_words(e, chosen, e.at(source, place, I8), short[group])
                refilled = b.or_(e.shift_left(found[group], 16), words)
                found[group] = b.select(short[group], refilled, found[group])
            return [place, *found]

        place, *last = loop(b, arguments[3], 1, [arguments[2], *_states(e, kept)], body)
        _keep_states(e, kept, last)
        return place

    return types.int64(form, data, stop, rows, table, states, out, first), codegen


@intrinsic
def encode_rows(typing_context, symbols, first, rows, table, inverse, states, out, at, masks):
    """Encode ``rows`` rows from ``symbols[first]`` on, the last one first, to ``out[at:]``; return its end.

    ``table`` (uint32 ``[256]``) holds ``rare * 2^31 + start * 2^12 + f``, ``inverse`` (uint64 ``[256]``)
    ``floor(2^44 / f) + 1``, by which plain loops divide. ``masks`` (uint64, two for each row) gets the lanes of rare
    symbols. ``out`` has room for 128 words for each row and 32 bytes more.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        places = ((0, arguments[1], I8), (3, zero, I32), (5, zero, I32), (6, zero, I8), (8, zero, I64))
        source, entries, kept, target, rare = (
            data_pointer(context, b, signature.args[k], arguments[k], index, kind) for k, index, kind in places
        )
        rows = arguments[2]

        def body(index, carried):
            place, new = carried[0], []
            number = b.sub(b.sub(rows, ir.Constant(I64, 1)), index)
            row = e.at(source, b.mul(number, ir.Constant(I64, e.lanes * _GROUPS)), I8)
            flags, spilled = [zero, zero], []
            for group, state in enumerate(carried[1:]):
                symbol = b.zext(e.load(e.at(row, e.lanes * group, I8), I8), vector(I32, e.lanes))
                entry = e.pick(entries, symbol, I32)
                f = b.and_(entry, e.constant(4095))
                start = b.and_(e.shift_right(entry, 12), e.constant(4095))
                flag = e.mask_bits(b.icmp_signed("<", entry, e.constant(0)))
                half = group * e.lanes // 64
                flags[half] = b.or_(flags[half], b.shl(flag, ir.Constant(I64, e.lanes * group % 64)))
                full = b.icmp_unsigned(">=", state, e.shift_left(f, 20))
                spilled.append((state, full))
                state = b.select(full, e.shift_right(state, 16), state)
                # The float quotient, below 2^20, is off by at most 0.13: less 0.2, it gives the quotient or one less.
                ratio = b.fdiv(b.uitofp(state, vector(F32, e.lanes)), b.uitofp(f, vector(F32, e.lanes)))
                quotient = b.fptosi(b.fsub(ratio, e.constant(0.2, F32)), vector(I32, e.lanes))
                remainder = b.sub(state, b.mul(quotient, f))
                spread = b.add(b.add(remainder, start), e.shift_left(quotient, 12))
                one_more = b.add(spread, b.sub(e.constant(4096), f))
                new.append(b.select(b.icmp_unsigned(">=", remainder, f), one_more, spread))
            for state, full in spilled:
                e.compress_store(state, e.at(target, place, I8), full)
                place = b.add(place, b.shl(e.count(full), ir.Constant(I64, 1)))
            for half, flag in enumerate(flags):
                b.store(flag, e.at(rare, b.add(b.add(number, number), ir.Constant(I64, half)), I64))
            return [place, *new]

        place, *last = loop(b, rows, 1, [arguments[7], *_states(e, kept)], body)
        _keep_states(e, kept, last)
        return place

    return types.int64(symbols, first, rows, table, inverse, states, out, at, masks), codegen


@intrinsic
def match_row(typing_context, data, at, value):
    """Return a mask of the 64 bytes from ``data[at]`` on that equal ``value``."""

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder, 64)
        row = e.load(data_pointer(context, b, signature.args[0], arguments[0], arguments[1], I8), I8)
        return e.mask_bits(b.icmp_unsigned("==", row, e.splat(b.trunc(arguments[2], I8))))

    return types.uint64(data, at, value), codegen


@intrinsic
def lowest(typing_context, bits):
    """Return the place of the lowest bit that is set."""

    def codegen(context, builder, signature, arguments):
        return Emitter(builder).call("llvm.cttz.i64", I64, [arguments[0], ir.Constant(ir.IntType(1), 0)])

    return types.int64(types.uint64), codegen
