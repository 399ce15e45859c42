# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector body of the checksum. ``loops.py`` calls it."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.checksum.reference import LANES, MULTIPLIER, ROW_BYTES
from gradwire.kernels.numba_core.vectors import I8, I64, Emitter, data_pointer, loop


@intrinsic
def check_rows(typing_context, data, rows, sums):
    """Update ``sums`` (uint64 ``[16]``) with ``rows`` rows of 128 bytes."""

    def codegen(context, builder, signature, arguments):
        b, e, parts = builder, Emitter(builder, 8), range(0, LANES, 8)
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
