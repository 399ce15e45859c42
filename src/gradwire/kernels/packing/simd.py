# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies from packed digits of any layout to floats. See ``loops.py`` for who calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.numba_core.vectors import F32, F64, I8, I32, I64, Emitter, data_pointer, loop, vector
from gradwire.kernels.table import LANES

__all__ = ["end_streams", "sum_words", "unpack_digits"]

_BITS = {types.uint8: 8, types.uint16: 16, types.uint32: 32}
_AHEAD_BYTES = 1024
_FLAT = vector(I32, LANES)


class _Words:
    """Vectors of sixteen words of one width, and their digits as floats.

    A word of four bytes is cut in two by ``power``, its base to the number ``low`` of the lower part's digits, so that
    either part is below 2^22; see :func:`gradwire.kernels.divisions.float_divisions` for why the quotients are exact.
    """

    def __init__(self, e: Emitter, bits: int, base: Any, per_word: Any, low: Any, power: Any, inverse: Any) -> None:
        self.e, self.bits, self.per_word, self.low, self.inverse = e, bits, per_word, low, inverse
        b = e.b
        self._bases = e.splat(b.sitofp(base, F32))
        self._largest = b.fsub(self._bases, e.constant(1.0, F32))
        self._power = e.splat(b.trunc(power, I32))
        self._share = e.splat(b.fdiv(ir.Constant(F64, 1.0), b.sitofp(power, F64)))

    def load(self, pointer: Any, block: Any) -> Any:
        """Load the words of a block."""
        e = self.e
        here = e.at(pointer, e.b.mul(block, ir.Constant(I64, LANES * self.bits // 8)), I8)
        e.prefetch(e.at(here, _AHEAD_BYTES, I8))
        return e.load(here, ir.IntType(self.bits))

    def sums(self, words: list[list[Any]], write: Callable[[int, Any, Any], None]) -> None:
        """Call ``write(i, digit, value)`` with the sums over ``words[i]`` of each digit; the highest are clamped."""
        b, begin = self.e.b, ir.Constant(I64, 0)
        if self.bits < 32:
            words = [[b.zext(word, _FLAT) for word in part] for part in words]
        else:
            cut = [[self._halves(word) for word in part] for part in words]
            tops = self._digits([[half[0] for half in part] for part in cut], self.low, begin, write)
            for i, part in enumerate(tops):
                write(i, b.sub(self.low, ir.Constant(I64, 1)), self._sum(part))
            words, begin = [[half[1] for half in part] for part in cut], self.low
        tops = self._digits(words, b.sub(self.per_word, begin), begin, write)
        for i, part in enumerate(tops):
            clamped = [b.select(b.fcmp_ordered("<", top, self._largest), top, self._largest) for top in part]
            write(i, b.sub(self.per_word, ir.Constant(I64, 1)), self._sum(clamped))

    def _halves(self, word: Any) -> tuple[Any, Any]:
        b, e = self.e.b, self.e
        exact = b.fadd(b.uitofp(word, vector(F64, LANES)), e.constant(0.5, F64))
        high = b.fptosi(b.fmul(exact, self._share), _FLAT)
        return b.sub(word, b.mul(high, self._power)), high

    def _sum(self, values: list[Any]) -> Any:
        total = values[0]
        for value in values[1:]:
            total = self.e.b.fadd(total, value)
        return total

    def _digits(
        self, parts: list[list[Any]], count: Any, begin: Any, write: Callable[[int, Any, Any], None]
    ) -> list[list[Any]]:
        """Write the sums of all ``count`` digits but the highest; return those, a vector a word."""
        b, e = self.e.b, self.e
        floats = [[b.sitofp(word, vector(F32, LANES)) for word in part] for part in parts]
        middles = [[b.fadd(word, e.constant(0.5, F32)) for word in part] for part in floats]
        number, one = len(parts), ir.Constant(I64, 1)

        def digit(index: Any, carried: list[Any]) -> list[Any]:
            inverse = e.splat(b.load(e.at(self.inverse, b.add(index, one), F32)))
            quotients = [[e.lanewise("trunc", b.fmul(word, inverse)) for word in part] for part in middles]
            sums = [self._sum(part) for part in quotients]
            for i in range(number):
                write(i, b.add(begin, index), b.fsub(carried[i], b.fmul(sums[i], self._bases)))
            return [*sums, *(quotient for part in quotients for quotient in part)]

        start = [self._sum(part) for part in floats]
        end = loop(b, b.sub(count, one), 1, [*start, *(word for part in floats for word in part)], digit)[number:]
        size = len(parts[0])
        return [end[i * size : (i + 1) * size] for i in range(number)]


@intrinsic
def unpack_digits(typing_context, words, first, word, blocks, per_word, base, low, power, inverse, floats):
    """Write the digits of ``blocks`` blocks of words from ``words[first]`` on to ``floats``.

    The highest digit of a word is at most ``base - 1``.
    """
    bits = _BITS[word]

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        source = data_pointer(context, b, signature.args[0], arguments[0], arguments[1], I8)
        inverses = data_pointer(context, b, signature.args[8], arguments[8], zero, F32)
        target = data_pointer(context, b, signature.args[9], arguments[9], zero, F32)
        blocks, per_word = arguments[3], arguments[4]
        reader = _Words(e, bits, arguments[5], per_word, arguments[6], arguments[7], inverses)

        def some(first: Any, number: Any, together: int) -> None:
            def body(index: Any, _: Any) -> list[Any]:
                own = [b.add(b.add(first, index), ir.Constant(I64, k)) for k in range(together)]

                def write(i: int, digit: Any, value: Any) -> None:
                    place = b.mul(b.add(b.mul(own[i], per_word), digit), ir.Constant(I64, LANES))
                    e.store(value, e.at(target, place, F32), align=4)

                reader.sums([[reader.load(source, block)] for block in own], write)
                return []

            loop(b, number, together, [], body)

        pairs = b.and_(blocks, ir.Constant(I64, -2))
        some(zero, pairs, 2)
        some(pairs, b.sub(blocks, pairs), 1)
        return context.get_dummy_value()

    return types.void(words, first, word, blocks, per_word, base, low, power, inverse, floats), codegen


@intrinsic
def sum_words(typing_context, words, first, stride, number, word, blocks, per_word, base, low, power, inverse, floats):
    """Write the sums over ``number`` rows of the digits of ``blocks`` blocks of words to ``floats``.

    Row r begins at ``words[first + r * stride]``. Four rows are added before a sum is stored, as long as there are.
    """
    bits = _BITS[word]

    def codegen(context, builder, signature, arguments):
        b, e = builder, Emitter(builder)
        zero = ir.Constant(I64, 0)
        source = data_pointer(context, b, signature.args[0], arguments[0], arguments[1], I8)
        inverses = data_pointer(context, b, signature.args[10], arguments[10], zero, F32)
        target = data_pointer(context, b, signature.args[11], arguments[11], zero, F32)
        stride, number, blocks, per_word = arguments[2], arguments[3], arguments[5], arguments[6]
        reader = _Words(e, bits, arguments[7], per_word, arguments[8], arguments[9], inverses)

        def some(first: Any, rows: Any, together: int) -> None:
            def body(index: Any, _: Any) -> list[Any]:
                row = b.add(first, index)
                adds = e.splat(b.icmp_signed("!=", row, zero))
                starts = [e.at(source, b.mul(b.add(row, ir.Constant(I64, k)), stride), I8) for k in range(together)]

                def block(index: Any, _: Any) -> list[Any]:
                    def write(i: int, digit: Any, value: Any) -> None:
                        place = b.mul(b.add(b.mul(index, per_word), digit), ir.Constant(I64, LANES))
                        to = e.at(target, place, F32)
                        e.store(b.fadd(e.masked_load(to, F32, adds), value), to, align=4)

                    reader.sums([[reader.load(start, index) for start in starts]], write)
                    return []

                loop(b, blocks, 1, [], block)
                return []

            loop(b, rows, together, [], body)

        done = zero
        for together in (4, 2, 1):
            rows = b.and_(b.sub(number, done), ir.Constant(I64, -together))
            some(done, rows, together)
            done = b.add(done, rows)
        return context.get_dummy_value()

    return (
        types.void(words, first, stride, number, word, blocks, per_word, base, low, power, inverse, floats),
        codegen,
    )


@intrinsic
def _end_streams(typing_context):
    """Order what was streamed before all that follows."""

    def codegen(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


end_streams: Any = _end_streams  # to type checkers the decorator does not hide the first parameter
