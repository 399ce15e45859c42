# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies that pack digits, unpack, sum and write them; ``loops.py`` of all families calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.vectors import F32, F64, I8, I16, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.table import LANES

_AHEAD_BYTES = 1024
_TOGETHER = 4  # blocks packed side by side
_FLAT = vector(I32, LANES)


@vector_body(types.void, "word")
def pack_blocks(e, digits, blocks, layout, word, out, at):
    """Pack ``blocks`` of ``16 * layout.digits`` digits into words of ``word``'s type, at ``out[at]``.

    Digits are uint16, or whole numbers below 2^16 in float32.
    """
    b, bits, given = e.b, word.bitwidth, F32 if digits.dtype == types.float32 else I16
    source, target = digits.pointer(0, given), out.pointer(at, I8)
    per_word, bases = layout.digits, e.splat(b.trunc(layout.base, I32))

    def some(first: Any, number: Any, together: int) -> None:
        """Pack ``number`` blocks from ``first`` on, ``together`` side by side, since each digit depends on the last."""

        def body(index: Any, _: Any) -> list[Any]:
            own = [b.add(b.add(first, index), ir.Constant(I64, k)) for k in range(together)]
            ends = [b.sub(b.mul(b.add(i, ir.Constant(I64, 1)), per_word), ir.Constant(I64, 1)) for i in own]

            def digit(plane: Any, values: list[Any]) -> list[Any]:
                here = [e.at(source, b.mul(b.sub(end, plane), ir.Constant(I64, LANES)), given) for end in ends]
                new = [e.load(place, given) for place in here]
                new = [b.fptosi(n, _FLAT) if given is F32 else b.zext(n, _FLAT) for n in new]
                return [b.add(b.mul(value, bases), n) for value, n in zip(values, new)]

            for i, value in zip(own, loop(b, per_word, 1, [e.constant(0)] * together, digit)):
                word = value if bits == 32 else b.trunc(value, vector(ir.IntType(bits), LANES))
                e.store(word, e.at(target, b.mul(i, ir.Constant(I64, LANES * bits // 8)), I8))
            return []

        loop(b, number, together, [], body)

    fours = b.and_(blocks, ir.Constant(I64, -_TOGETHER))
    some(ir.Constant(I64, 0), fours, _TOGETHER)
    some(fours, b.sub(blocks, fours), 1)


class _Words:
    """Vectors of sixteen words of one width, and their digits as floats.

    A word of four bytes is divided by ``layout.power``, so that both parts are below 2^22;
    :class:`gradwire.kernels.packing.loops.WordTable` explains why the quotients are exact.
    """

    def __init__(self, e: Emitter, bits: int, layout: Any) -> None:
        self.e, self.bits, self.per_word, self.low = e, bits, layout.digits, layout.low
        self.inverse = layout.inverse.pointer(0, F32)
        b = e.b
        self._bases = e.splat(b.sitofp(layout.base, F32))
        self._largest = e.splat(b.sitofp(layout.largest, F32))
        self._power = e.splat(b.trunc(layout.power, I32))
        self._share = e.splat(b.fdiv(ir.Constant(F64, 1.0), b.sitofp(layout.power, F64)))

    def load(self, pointer: Any, block: Any) -> Any:
        """Load the words of a block."""
        e = self.e
        here = e.at(pointer, e.b.mul(block, ir.Constant(I64, LANES * self.bits // 8)), I8)
        e.prefetch(e.at(here, _AHEAD_BYTES, I8))
        return e.load(here, ir.IntType(self.bits))

    def sums(self, words: list[list[Any]], write: Callable[[int, Any, Any], None]) -> None:
        """Call ``write(i, digit, value)`` with the sum over ``words[i]`` of each digit; highest digits are clamped."""
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
        """Write the sums of all ``count`` digits but the highest; return the highest, one vector for each word."""
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


@vector_body(types.void, "word")
def unpack_blocks(e, rows, at, word, blocks, layout, floats):
    """Write the digits of ``blocks`` blocks of words from ``rows.octets[at]`` on to ``floats``."""
    b, source, target = e.b, rows.octets.pointer(at, I8), floats.pointer(0, F32)
    reader = _Words(e, word.bitwidth, layout)

    def some(first: Any, number: Any, together: int) -> None:
        def body(index: Any, _: Any) -> list[Any]:
            own = [b.add(b.add(first, index), ir.Constant(I64, k)) for k in range(together)]

            def write(i: int, digit: Any, value: Any) -> None:
                place = b.mul(b.add(b.mul(own[i], layout.digits), digit), ir.Constant(I64, LANES))
                e.store(value, e.at(target, place, F32), align=4)

            reader.sums([[reader.load(source, block)] for block in own], write)
            return []

        loop(b, number, together, [], body)

    pairs = b.and_(blocks, ir.Constant(I64, -2))
    some(ir.Constant(I64, 0), pairs, 2)
    some(pairs, b.sub(blocks, pairs), 1)


@vector_body(types.void, "word")
def sum_words(e, rows, at, word, blocks, layout, floats):
    """Write the sums over rows of the digits of ``blocks`` blocks of words to ``floats``.

    The words of the first row begin at ``rows.octets[at]``. Four rows are added before a sum is stored.
    """
    b, zero = e.b, ir.Constant(I64, 0)
    source, target = rows.octets.pointer(at, I8), floats.pointer(0, F32)
    reader = _Words(e, word.bitwidth, layout)

    def some(first: Any, number: Any, together: int) -> None:
        def body(index: Any, _: Any) -> list[Any]:
            row = b.add(first, index)
            adds = e.splat(b.icmp_signed("!=", row, zero))
            starts = [e.at(source, b.mul(b.add(row, ir.Constant(I64, k)), rows.stride), I8) for k in range(together)]

            def block(index: Any, _: Any) -> list[Any]:
                def write(i: int, digit: Any, value: Any) -> None:
                    place = b.mul(b.add(b.mul(index, layout.digits), digit), ir.Constant(I64, LANES))
                    to = e.at(target, place, F32)
                    e.store(b.fadd(e.masked_load(to, F32, adds), value), to, align=4)

                reader.sums([[reader.load(start, index) for start in starts]], write)
                return []

            loop(b, blocks, 1, [], block)
            return []

        loop(b, number, together, [], body)

    done = zero
    for together in (4, 2, 1):
        number = b.and_(b.sub(rows.number, done), ir.Constant(I64, -together))
        some(done, number, together)
        done = b.add(done, number)


def write_scaled(
    e: Emitter, source: Any, target: Any, run: tuple[Any, Any], scaled: Callable[[Any], Any], adds: Any, streamed: Any
) -> None:
    """Write ``scaled(source[i])`` to ``target[i]`` for i from ``run[0]`` to ``run[1] - 1``.

    If ``adds``, the values are added; if ``streamed``, whole cache lines are written past the caches.
    """
    b, (begin, end), added = e.b, run, e.splat(adds)

    def smaller(first: Any, second: Any) -> Any:
        return b.select(b.icmp_signed("<", first, second), first, second)

    def some(start: Any, lanes: Any) -> None:
        mask, to = e.first_lanes(lanes), e.at(target, start, F32)
        value = scaled(e.masked_load(e.at(source, start, F32), F32, mask))
        before = e.masked_load(to, F32, b.and_(mask, added))
        e.masked_store(b.select(added, b.fadd(before, value), value), to, mask)

    def whole(start: Any, stop: Any, vectors: int, past: bool) -> None:
        def turn(index: Any, _: Any) -> list[Any]:
            places = [b.add(b.add(start, index), ir.Constant(I64, LANES * unit)) for unit in range(vectors)]
            found = [scaled(e.load(e.at(source, p, F32), F32, align=4)) for p in places]
            for p, value in zip(places, found):
                to = e.at(target, p, F32)
                if past:
                    e.stream(value, to)
                else:
                    before = e.masked_load(to, F32, added)
                    e.store(b.select(added, b.fadd(before, value), value), to, align=4)
            return []

        loop(b, b.sub(stop, start), LANES * vectors, [], turn)

    # The elements before the first whole cache line.
    zero = ir.Constant(I64, 0)
    address = b.ptrtoint(e.at(target, begin, F32), I64)
    head = b.and_(b.lshr(b.sub(zero, address), ir.Constant(I64, 2)), ir.Constant(I64, LANES - 1))
    head = b.select(streamed, smaller(head, b.sub(end, begin)), zero)
    with b.if_then(b.icmp_signed("!=", head, zero)):
        some(begin, head)
    inner = b.add(begin, head)
    pairs = b.add(inner, b.and_(b.sub(end, inner), ir.Constant(I64, -2 * LANES)))
    lines = b.add(inner, b.and_(b.sub(end, inner), ir.Constant(I64, -LANES)))
    with b.if_else(streamed) as (then, otherwise):
        for branch, past in ((then, True), (otherwise, False)):
            with branch:
                whole(inner, pairs, 2, past)
                whole(pairs, lines, 1, past)
    with b.if_then(b.icmp_signed("<", lines, end)):
        some(lines, b.sub(end, lines))


@vector_body()
def end_streams(e):
    """Order streamed stores before all later ones."""
    e.b.fence("seq_cst")
