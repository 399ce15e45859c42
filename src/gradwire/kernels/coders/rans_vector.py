# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of the rANS coder and of the check. See ``loops.py`` for who calls them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.coders.checksum import LANES as SUMS
from gradwire.kernels.coders.checksum import MULTIPLIER, ROW_BYTES
from gradwire.kernels.numba_core.vectors import F32, I8, I16, I32, I64, Emitter, data_pointer, loop, vector

__all__ = ["check_rows", "decode_rows", "encode_rows", "lowest", "match_row"]

_GROUPS = 8  # vectors of 16 lanes in a row


def _states(e: Emitter, pointer: Any) -> list[Any]:
    return [e.load(e.at(pointer, e.lanes * group, I32), I32) for group in range(_GROUPS)]


def _keep_states(e: Emitter, pointer: Any, states: list[Any]) -> None:
    for group, state in enumerate(states):
        e.store(state, e.at(pointer, e.lanes * group, I32))


@intrinsic
def decode_rows(typing_context, data, stop, rows, table, states, out, first):
    """Decode ``rows`` rows to ``out[first:]``; return where the words not yet read end (``stop``: all of them).

    ``table`` (uint32 ``[4096]``) holds ``f * 2^20 + (slot - start) * 2^8 + symbol``. At least 128 words a row lie
    before ``stop``.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        places = ((0, zero, I8), (3, zero, I32), (4, zero, I32), (5, arguments[6], I8))
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
                words = b.zext(e.expand_load(e.at(source, place, I8), I16, short[group]), vector(I32, e.lanes))
                refilled = b.or_(e.shift_left(found[group], 16), words)
                found[group] = b.select(short[group], refilled, found[group])
            return [place, *found]

        place, *last = loop(b, arguments[2], 1, [arguments[1], *_states(e, kept)], body)
        _keep_states(e, kept, last)
        return place

    return types.int64(data, stop, rows, table, states, out, first), codegen


@intrinsic
def encode_rows(typing_context, symbols, first, rows, table, states, out, at, masks):
    """Encode ``rows`` rows from ``symbols[first]`` on, the last one first, to ``out[at:]``; return where it ends.

    ``table`` (uint32 ``[256]``) holds ``rare * 2^31 + start * 2^12 + f``; ``masks`` (uint64, two a row) gets the
    lanes that are rare. ``out`` has room for 128 words a row and 32 bytes more.
    """

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        places = ((0, arguments[1], I8), (3, zero, I32), (4, zero, I32), (5, zero, I8), (7, zero, I64))
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
                # Below 2^20, the float quotient is off by 0.13 at most: 0.2 less rounds to it or to one less.
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

        place, *last = loop(b, rows, 1, [arguments[6], *_states(e, kept)], body)
        _keep_states(e, kept, last)
        return place

    return types.int64(symbols, first, rows, table, states, out, at, masks), codegen


@intrinsic
def check_rows(typing_context, data, rows, sums):
    """Take ``rows`` rows of 128 bytes into ``sums`` (uint64 ``[16]``)."""

    def codegen(context, builder, signature, arguments):
        b, e, parts = builder, Emitter(builder, 8), range(0, SUMS, 8)
        zero = ir.Constant(I64, 0)
        source, kept = (
            data_pointer(context, b, signature.args[k], arguments[k], zero, kind) for k, kind in ((0, I8), (2, I64))
        )

        def body(index, carried):
            row, new = e.at(source, b.mul(index, ir.Constant(I64, ROW_BYTES)), I8), []
            for part, total in zip(parts, carried):
                mixed = b.xor(total, e.load(e.at(row, part, I64), I64))
                mixed = b.mul(mixed, e.constant(MULTIPLIER, I64))
                new.append(b.xor(mixed, e.shift_right(mixed, 32)))
            return new

        last = loop(b, arguments[1], 1, [e.load(e.at(kept, part, I64), I64) for part in parts], body)
        for part, total in zip(parts, last):
            e.store(total, e.at(kept, part, I64))
        return context.get_dummy_value()

    return types.void(data, rows, sums), codegen


@intrinsic
def match_row(typing_context, data, at, value):
    """Tell which of the 64 bytes from ``data[at]`` on equal ``value``, as bits."""

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder, 64)
        row = e.load(data_pointer(context, b, signature.args[0], arguments[0], arguments[1], I8), I8)
        return e.mask_bits(b.icmp_unsigned("==", row, e.splat(b.trunc(arguments[2], I8))))

    return types.uint64(data, at, value), codegen


@intrinsic
def lowest(typing_context, bits):
    """Give the place of the lowest bit that is set."""

    def codegen(context, builder, signature, arguments):
        return Emitter(builder).call("llvm.cttz.i64", I64, [arguments[0], ir.Constant(ir.IntType(1), 0)])

    return types.int64(types.uint64), codegen
