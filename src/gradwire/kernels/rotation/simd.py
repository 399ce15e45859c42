# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of rotations. ``loops.py`` calls them.

A block is processed in *groups* of sixteen neighbouring vectors, which stay in registers for eight steps: four within
each vector and four between vectors. The other steps are done on up to sixteen vectors from different groups.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gradwire.kernels.levels.grid import UNIT
from gradwire.kernels.numba_core.philox import PhiloxVectors
from gradwire.kernels.numba_core.vectors import F32, I8, I16, I32, Emitter, loop, vector, vector_body
from gradwire.kernels.rotation.steps import AHEAD, GROUP, NUMBER, between, lanes, steps_down, steps_up
from gradwire.kernels.table import LANES

_GROUP_NUMEL = GROUP * LANES
_SPAN_GROUPS = 8  # groups whose signs are in the words of 16 Philox blocks: two in a word


def _groups(e: Emitter, start: Any, vectors: Any, noise: Any, use: Callable[[Any, list[Any]], None]) -> None:
    """Call ``use(first, signs)`` for each group: its first vector, and for each vector the sign bits to change."""
    b = e.b
    room = cgutils.alloca_once(b, ir.ArrayType(vector(I32, LANES), 4))
    words_at = b.bitcast(room, I32.as_pointer())
    # Groups are numbered within the parameter; the block has the groups first .. last.
    first = b.sdiv(start, NUMBER(_GROUP_NUMEL))
    last = b.add(first, b.sdiv(vectors, NUMBER(GROUP)))
    span = b.sdiv(first, NUMBER(_SPAN_GROUPS))
    spans = b.sub(b.sdiv(b.add(last, NUMBER(_SPAN_GROUPS - 1)), NUMBER(_SPAN_GROUPS)), span)
    fields = {"key0": noise.key0, "key1": noise.key1, "round": noise.round, "stream": noise.stream}

    def one_span(index: Any, _: Any) -> list[Any]:
        here = b.add(span, index)
        source = PhiloxVectors(e, SimpleNamespace(**fields, block=b.mul(here, NUMBER(LANES))))
        for number, word in enumerate(source.words(source.products())[0]):
            e.store(word, e.at(words_at, LANES * number, I32), align=4)
        low, high = b.mul(here, NUMBER(_SPAN_GROUPS)), b.mul(b.add(here, NUMBER(1)), NUMBER(_SPAN_GROUPS))
        begin = b.select(b.icmp_signed("<", low, first), first, low)
        end = b.select(b.icmp_signed("<", last, high), last, high)

        def one_group(t: Any, _: Any) -> list[Any]:
            group = b.add(begin, t)
            within = b.sub(group, low)
            word = e.load(e.at(words_at, b.mul(b.lshr(within, NUMBER(1)), NUMBER(LANES)), I32), I32, align=4)
            # The lower half of the word is for the first of its two groups. The group's half is moved to the upper one.
            shift = b.mul(b.sub(NUMBER(1), b.and_(within, NUMBER(1))), NUMBER(GROUP))
            word = b.shl(word, e.splat(b.trunc(shift, I32)))
            signs = [b.and_(e.shift_left(word, 15 - v), e.constant(0x80000000)) for v in range(GROUP)]
            use(b.mul(b.sub(group, first), NUMBER(GROUP)), signs)
            return []

        loop(b, b.sub(end, begin), 1, [], one_group)
        return []

    loop(b, spans, 1, [], one_span)


def _flipped(e: Emitter, value: Any, signs: Any) -> Any:
    return e.b.bitcast(e.b.xor(e.b.bitcast(value, vector(I32, LANES)), signs), vector(F32, LANES))


@vector_body()
def rotate_block(e, x, at, numel, start, factor, noise, z, place, size, room, streamed):
    """Write the coordinates of the block of ``numel`` elements from ``x[at]`` on to ``z[place : place + size]``.

    ``streamed`` writes them past the caches; ``room``, aligned to a cache line, holds them before.
    """
    b, factors = e.b, e.splat(factor)
    source, result = x.pointer(at, F32), z.pointer(place, F32)
    vectors = b.sdiv(size, NUMBER(LANES))
    streamed = b.and_(streamed, b.and_(e.is_aligned(result), b.icmp_signed(">", vectors, NUMBER(GROUP))))
    target = b.select(streamed, room.pointer(0, F32), result)

    def use(first: Any, signs: list[Any]) -> None:
        begin = b.mul(first, NUMBER(LANES))
        there, here = e.at(source, begin, F32), e.at(target, begin, F32)
        left = b.sub(numel, begin)
        partial = b.icmp_signed("<", left, NUMBER(_GROUP_NUMEL))
        with b.if_then(partial):

            def masked(k: Any, _: Any) -> list[Any]:
                at = b.mul(k, NUMBER(LANES))
                value = e.masked_load(e.at(there, at, F32), F32, e.first_lanes(b.sub(left, at)))
                e.store(value, e.at(here, at, F32), align=4)
                return []

            loop(b, NUMBER(GROUP), 1, [], masked)
        pointer = b.select(partial, here, there)
        values = []
        for k, sign in enumerate(signs):
            at = e.at(pointer, LANES * k, F32)
            e.prefetch(e.at(at, AHEAD, F32), first=False)
            value = _flipped(e, b.fmul(e.load(at, F32, align=4), factors), sign)
            values.append(lanes(e, value, (1, 2, 4, 8)))
        for k, value in enumerate(between(e, values, (1, 2, 4, 8))):
            e.store(value, e.at(here, LANES * k, F32), align=4)

    _groups(e, start, vectors, noise, use)
    steps_up(e, target, result, vectors, streamed)


@vector_body()
def rotate_block_back(e, z, place, size, start, factor, noise, x, at, numel, accumulate, room, streamed):
    """Write the block with the coordinates ``z[place : place + size]`` to ``x[at : at + numel]``, or add it.

    ``streamed`` writes past the caches. ``room`` is scratch memory for ``size`` values.
    """
    b, factors = e.b, e.splat(factor)
    target = x.pointer(at, F32)
    vectors = b.sdiv(size, NUMBER(LANES))
    streamed = b.and_(streamed, e.is_aligned(target))
    source = steps_down(e, z.pointer(place, F32), room.pointer(0, F32), vectors)

    def use(first: Any, signs: list[Any]) -> None:
        begin = b.mul(first, NUMBER(LANES))
        here, there = e.at(source, begin, F32), e.at(target, begin, F32)
        left = b.sub(numel, begin)
        values = [e.load(e.at(here, LANES * k, F32), F32, align=4) for k in range(GROUP)]
        values = [lanes(e, value, (8, 4, 2, 1)) for value in between(e, values, (8, 4, 2, 1))]
        values = [_flipped(e, b.fmul(value, factors), sign) for value, sign in zip(values, signs)]
        with b.if_else(b.icmp_signed("<", left, NUMBER(_GROUP_NUMEL))) as (partial, whole):
            with partial:
                for k, value in enumerate(values):
                    e.store(value, e.at(here, LANES * k, F32), align=4)

                def masked(k: Any, _: Any) -> list[Any]:
                    at = b.mul(k, NUMBER(LANES))
                    to, mask = e.at(there, at, F32), e.first_lanes(b.sub(left, at))
                    value, before = e.load(e.at(here, at, F32), F32, align=4), e.masked_load(to, F32, mask)
                    e.masked_store(b.select(accumulate, b.fadd(before, value), value), to, mask)
                    return []

                loop(b, NUMBER(GROUP), 1, [], masked)
            with whole, b.if_else(accumulate) as (adds, writes):
                with adds:
                    for k, value in enumerate(values):
                        to = e.at(there, LANES * k, F32)
                        e.store(b.fadd(e.load(to, F32, align=4), value), to, align=4)
                with writes, b.if_else(streamed) as (past, stays):
                    with past:
                        for k, value in enumerate(values):
                            e.stream(value, e.at(there, LANES * k, F32))
                    with stays:
                        for k, value in enumerate(values):
                            e.store(value, e.at(there, LANES * k, F32), align=4)

    _groups(e, start, vectors, noise, use)


class _Nearest:
    """Rounds coordinates to the nearest levels of a grid, and sums the products of magnitudes and levels."""

    unit = 4  # vectors side by side: each comparison depends on the last

    def __init__(self, e: Emitter, grid: Any) -> None:
        self.e, self.grid, b = e, grid, e.b
        self.levels = grid.values.pointer(grid.positive, F32)
        self._edges = grid.edge.pointer(0, F32)
        # A digit is plus + count, or minus - count, which is ~count + (minus + 1).
        self._plus = e.splat(b.trunc(grid.positive, I32))
        self._shift = e.splat(b.trunc(b.add(b.sub(grid.negative, grid.positive), NUMBER(1)), I32))

    def edge(self, k: Any) -> Any:
        """Load the end of step ``k`` on the scale of magnitudes; dividing it by 2^24 is exact."""
        b = self.e.b
        return b.fmul(b.load(self.e.at(self._edges, k, F32)), ir.Constant(F32, 1 / UNIT))

    def digits(self, values: list[Any], counts: list[Any]) -> list[Any]:
        """Return the digits of values, given the number of steps that each has passed."""
        e, b, digits = self.e, self.e.b, []
        for value, count in zip(values, counts):
            below = b.ashr(b.bitcast(value, vector(I32, LANES)), e.constant(31))
            first = b.add(self._plus, b.and_(self._shift, below))
            digits.append(b.add(b.xor(count, below), first))
        return digits

    def rounded(
        self,
        source: Any,
        size: Any,
        search: Callable[[list[Any]], tuple[list[Any], list[Any]]],
        write: Callable[[Any, list[Any]], None],
    ) -> Any:
        """Call ``write(first, digits)`` for all coordinates, :attr:`unit` vectors at a time; return the sum.

        ``search`` returns the levels of magnitudes, and the numbers of steps that they have passed.
        """
        e, b, unit = self.e, self.e.b, self.unit

        def some(index: Any, totals: list[Any]) -> list[Any]:
            first = b.mul(index, NUMBER(LANES * unit))
            values = [e.load(e.at(source, b.add(first, NUMBER(LANES * k)), F32), F32, align=4) for k in range(unit)]
            magnitudes = [e.lanewise("fabs", value) for value in values]
            levels, counts = search(magnitudes)
            total = totals[0]
            for magnitude, level in zip(magnitudes, levels):
                total = b.fadd(total, b.fmul(magnitude, level))
            write(first, self.digits(values, counts))
            return [total]

        (total,) = loop(b, b.sdiv(size, NUMBER(LANES * unit)), 1, [e.constant(0.0, F32)], some)
        half = LANES // 2
        while half:
            partner = e.shuffle(total, total, [(lane + half) % LANES for lane in range(LANES)])
            total = b.fadd(total, partner)
            half //= 2
        return b.extract_element(total, ir.Constant(I32, 0))


@vector_body(types.float32)
def nearest_digits(e, z, place, size, grid, digits, at):
    """Write the digits of a block to ``digits[at]`` on; return the sum of ``|z| Q(|z|)``."""
    b, nearest = e.b, _Nearest(e, grid)
    target = digits.pointer(at, I16)
    lowest, none = e.splat(b.load(nearest.levels)), e.constant(0)

    def search(magnitudes: list[Any]) -> tuple[list[Any], list[Any]]:
        unit = len(magnitudes)

        def step(k: Any, carried: list[Any]) -> list[Any]:
            edge = e.splat(nearest.edge(k))
            level = e.splat(b.load(e.at(nearest.levels, b.add(k, NUMBER(1)), F32)))
            passed = [b.fcmp_ordered(">", m, edge) for m in magnitudes]
            chosen = [b.select(p, level, c) for p, c in zip(passed, carried[:unit])]
            counts = [b.add(c, b.zext(p, vector(I32, LANES))) for p, c in zip(passed, carried[unit:])]
            return [*chosen, *counts]

        found = loop(b, grid.steps, 1, [lowest] * unit + [none] * unit, step)
        return found[:unit], found[unit:]

    def write(first: Any, found: list[Any]) -> None:
        for k, digit in enumerate(found):
            to = e.at(target, b.add(first, NUMBER(LANES * k)), I16)
            e.store(b.trunc(digit, vector(I16, LANES)), to, align=2)

    return nearest.rounded(z.pointer(place, F32), size, search, write)


@vector_body(types.float32)
def nearest_pairs(e, z, place, size, grid, base, out, at):
    """Write the digits of a block, two in a byte, to ``out[at]`` on; return the sum of ``|z| Q(|z|)``.

    The grid has four to seven steps, which are found by binary search in registers.
    """
    b, nearest = e.b, _Nearest(e, grid)
    target, bases = out.pointer(at, I8), e.splat(b.trunc(base, I32))
    edges, levels = (ir.Constant(vector(F32, 8), ir.Undefined) for _ in range(2))
    for k in range(8):
        there = b.icmp_signed("<", NUMBER(k), grid.steps)
        step = b.select(there, NUMBER(k), NUMBER(0))
        edge = b.select(there, nearest.edge(step), ir.Constant(F32, float("inf")))
        reached = b.select(b.icmp_signed("<=", NUMBER(k), grid.steps), NUMBER(k), grid.steps)
        level = b.load(e.at(nearest.levels, reached, F32))
        edges = b.insert_element(edges, edge, ir.Constant(I32, k))
        levels = b.insert_element(levels, level, ir.Constant(I32, k))
    low, middle, high = (e.splat(b.extract_element(edges, ir.Constant(I32, k))) for k in (1, 3, 5))

    def search(magnitudes: list[Any]) -> tuple[list[Any], list[Any]]:
        chosen, counts = [], []
        for m in magnitudes:
            upper = b.fcmp_ordered(">", m, middle)
            count = b.select(upper, e.constant(4), e.constant(0))
            passed = b.fcmp_ordered(">", m, b.select(upper, high, low))
            count = b.select(passed, b.add(count, e.constant(2)), count)
            passed = b.fcmp_ordered(">", m, e.permute(edges, count))
            count = b.select(passed, b.add(count, e.constant(1)), count)
            chosen.append(e.permute(levels, count))
            counts.append(count)
        return chosen, counts

    def write(first: Any, digits: list[Any]) -> None:
        for k in range(0, len(digits), 2):
            word = b.add(digits[k], b.mul(digits[k + 1], bases))
            to = e.at(target, b.add(b.lshr(first, NUMBER(1)), NUMBER(LANES * k // 2)), I8)
            e.store(b.trunc(word, vector(I8, LANES)), to)

    return nearest.rounded(z.pointer(place, F32), size, search, write)
