# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of the loops over lines and words, and loads and stores of single words.

A line has 64 bytes. Bodies that take elements apart derive their width from the type of the array that holds values.
"""

from __future__ import annotations

import sys

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba import types

from gradwire.kernels.numba_core.vectors import I1, I8, I32, I64, Emitter, loop, vector, vector_body
from gradwire.kernels.patches.formats import (
    FIRST_FACTOR,
    FIRST_SHIFT,
    KEY,
    LINE_BYTES,
    SECOND_FACTOR,
    SECOND_SHIFT,
    THIRD_SHIFT,
)

_LITTLE = sys.byteorder == "little"
_LANES, _VECTORS = 8, 4
_COMPRESSING_LLVM = 19
_STREAM_AHEAD = 4096
"""Bytes ahead of which memory is fetched that is read from its start to its end."""

LINES_AHEAD = 24
"""Lines with changes ahead of which memory is fetched; so many numbers follow the last line's."""

FETCH_FROM = 4
"""Memory is fetched in order where one line in so many has changes.

It comes more than twice as fast in order as lines here and there do. The next block is fetched while changes of one
are decoded, when memory would be idle.
"""


def _u64(*kinds):
    return types.uint64(*kinds)


@vector_body(_u64)
def load_word(e, data, at):
    """Read the 8 bytes from byte ``at`` on, which need not be aligned, as a little-endian number.

    Both variants of the loops use it and :func:`store_word`: LLVM does not always make one load of eight.
    """
    word = e.b.load(e.b.bitcast(data.pointer(at, I8), I64.as_pointer()), align=1)
    return word if _LITTLE else e.b.bswap(word)


@vector_body(types.void)
def store_word(e, data, at, word):
    """Write a word to the 8 bytes from byte ``at`` on."""
    word = word if _LITTLE else e.b.bswap(word)
    e.b.store(word, e.b.bitcast(data.pointer(at, I8), I64.as_pointer()), align=1)


@vector_body(types.void)
def fetch(e, data, at):
    """Fetch the line of byte ``at`` into the caches."""
    e.prefetch(data.pointer(at, I8))


def _zero():
    return ir.Constant(I64, 0)


def _mixed(e, words):
    """Mix words to which their keys have been added."""
    b = e.b
    for shift, factor in ((FIRST_SHIFT, FIRST_FACTOR), (SECOND_SHIFT, SECOND_FACTOR)):
        words = b.mul(b.xor(words, e.shift_right(words, shift)), e.constant(factor, I64))
    return b.xor(words, e.shift_right(words, THIRD_SHIFT))


def _keys(e, key):
    """Return the keys of the words of a line, the first of which is ``key``."""
    return e.b.add(e.splat(key), e.constants([i * KEY % 2**64 for i in range(_LANES)], I64))


@vector_body(types.int64)
def changed_lines(e, old, new, at, first, count, lines):
    """Write the numbers of those of ``count`` lines that differ, the first of which is ``first``; return how many do.

    ``at`` is the byte of line 0.
    """
    b, e = e.b, Emitter(e.b, LINE_BYTES)
    begin = b.add(at, b.mul(first, ir.Constant(I64, LINE_BYTES)))
    sources = old.pointer(begin, I8), new.pointer(begin, I8)
    target = lines.pointer(0, I32)

    def body(index, carried):
        place = b.mul(index, ir.Constant(I64, LINE_BYTES))
        rows = [e.at(source, place, I8) for source in sources]
        for row in rows:
            e.prefetch(e.at(row, _STREAM_AHEAD, I8))
        different = b.icmp_unsigned("!=", *(e.load(row, I8) for row in rows))
        b.store(b.trunc(b.add(first, index), I32), e.at(target, carried[0], I32))
        found = b.icmp_unsigned("!=", e.mask_bits(different), _zero())
        return [b.add(carried[0], b.zext(found, I64))]

    return loop(b, count, 1, [_zero()], body)[0]


def _compress(e, value, pointer, mask):
    """Store the masked lanes side by side; what follows them, up to a vector's length, is overwritten."""
    kind = value.type
    name = f"v{kind.count}i{kind.element.width}"
    if llvm_version_info[0] >= _COMPRESSING_LLVM:
        # Compressed in a register first: compressing to memory is many times slower on some CPUs.
        undefined = ir.Constant(kind, ir.Undefined)
        e.store(e.call(f"llvm.experimental.vector.compress.{name}", kind, [value, mask, undefined]), pointer)
    else:
        e.call(f"llvm.masked.compressstore.{name}", ir.VoidType(), [value, pointer, mask])


@vector_body(types.UniTuple(types.int64, 2))
def take_changes(e, old, new, at, lines, number, key, advance, unused, index, before, after, count):
    """Take the elements that differ out of lines; return the elements taken so far, and the change of the sum of words.

    Args:
        at: Byte of line 0 in ``old`` and ``new``.
        lines: Numbers of the lines.
        number: Number of lines.
        key: Key of the first word of line 0.
        advance: Not 0: write each line over the old one.
        unused: An array of a line, which is written to otherwise.
        index: Gets the numbers of the elements, counted from line 0.
        before: Gets the old elements.
        after: Gets the new elements.
        count: Elements that the three arrays hold already.
    """
    width = before.dtype.bitwidth // 8
    element, lanes = ir.IntType(8 * width), LINE_BYTES // width
    b, e, words = e.b, Emitter(e.b, lanes), Emitter(e.b, _LANES)
    first, second = old.pointer(at, I8), new.pointer(at, I8)
    numbers, places, olds, news = (
        array.pointer(0, kind) for array, kind in ((lines, I32), (index, I32), (before, element), (after, element))
    )
    nowhere, advances = unused.pointer(0, I8), b.icmp_signed("!=", advance, _zero())
    group = min(16, lanes)
    iota = Emitter(b, group).constants(list(range(group)))

    def body(turn, carried):
        count, total = carried
        line = b.zext(b.load(e.at(numbers, turn, I32)), I64)
        place = b.mul(line, ir.Constant(I64, LINE_BYTES))
        target = e.at(first, place, I8)
        # Loaded once: others may write to the new weights meanwhile, and what is sent is what the base becomes.
        old_line, new_line = e.load(target, element), e.load(e.at(second, place, I8), element)
        mask = b.icmp_unsigned("!=", old_line, new_line)
        e.store(new_line, b.select(advances, target, nowhere))
        keys = _keys(words, b.add(key, b.mul(line, ir.Constant(I64, _LANES * KEY % 2**64))))
        sums = [_mixed(words, b.add(b.bitcast(part, vector(I64, _LANES)), keys)) for part in (new_line, old_line)]
        _compress(e, old_line, e.at(olds, count, element), mask)
        _compress(e, new_line, e.at(news, count, element), mask)
        bits = e.mask_bits(mask)
        begin = b.trunc(b.mul(line, ir.Constant(I64, lanes)), I32)
        for start in range(0, lanes, group):
            part = b.trunc(b.lshr(bits, ir.Constant(I64, start)), ir.IntType(group))
            number = b.add(e.splat(b.add(begin, ir.Constant(I32, start)), group), iota)
            chosen = b.bitcast(part, vector(I1, group))
            _compress(e, number, e.at(places, count, I32), chosen)
            count = b.add(count, e.count(chosen))
        return [count, b.add(total, b.sub(*sums))]

    count, total = loop(b, number, 1, [count, words.constant(0, I64)], body)
    return [count, words.reduce("add", total)]


def _moved_lines(e, base, at, lines, number, deltas, flips, ahead, stride, start, then):
    """Call ``then`` with the address, number, old and new bytes of each line that has changes."""
    width = deltas.dtype.bitwidth // 8
    element, lanes = ir.IntType(8 * width), LINE_BYTES // width
    b, e = e.b, Emitter(e.b, lanes)
    source, numbers, steps = base.pointer(at, I8), lines.pointer(0, I32), deltas.pointer(0, element)
    flips = e.splat(b.trunc(flips, element) if width < 8 else flips)
    streamed, following = b.icmp_signed("!=", stride, _zero()), base.pointer(ahead, I8)

    def ordered(value):
        return b.xor(value, b.and_(b.ashr(value, e.constant(8 * width - 1, element)), flips))

    def place_of(turn):
        line = b.zext(b.load(e.at(numbers, turn, I32)), I64)
        return line, e.at(source, b.mul(line, ir.Constant(I64, LINE_BYTES)), I8)

    def body(turn, carried):
        next_line = place_of(b.add(turn, ir.Constant(I64, LINES_AHEAD)))[1]
        e.prefetch(b.select(streamed, e.at(following, b.mul(turn, stride), I8), next_line))
        line, place = place_of(turn)
        old = e.load(place, element)
        step = e.load(e.at(steps, b.mul(turn, ir.Constant(I64, lanes)), element), element)
        return then(place, line, old, ordered(b.add(ordered(old), step)), carried)

    return loop(b, number, 1, start, body)


@vector_body(_u64)
def check_lines(e, base, at, lines, number, deltas, flips, ahead, stride, key, write, unused):
    """Return by how much changes of lines change the sum of words; write them if asked to.

    Args:
        at: Byte of line 0 in ``base``.
        lines: Numbers of the lines with changes, and ``LINES_AHEAD`` numbers more.
        number: Number of lines.
        deltas: For each of the lines the distances of its elements, 0 of those that stay.
        flips: Bits that are inverted in the ordered integer of an element whose uppermost bit is set.
        ahead: Byte of ``base`` from which on lines are fetched.
        stride: Bytes from one of them to the next; 0: fetch the next lines with changes instead.
        key: Key of the first word of line 0.
        write: Not 0: write the lines.
        unused: An array of a line, which is written to otherwise.
    """
    b, words = e.b, Emitter(e.b, _LANES)
    nowhere, writes = unused.pointer(0, I8), b.icmp_signed("!=", write, _zero())

    def then(place, line, old, new, carried):
        keys = _keys(words, b.add(key, b.mul(line, ir.Constant(I64, _LANES * KEY % 2**64))))
        sums = [_mixed(words, b.add(b.bitcast(part, vector(I64, _LANES)), keys)) for part in (new, old)]
        words.store(new, b.select(writes, place, nowhere))
        return [b.add(carried[0], b.sub(*sums))]

    start = [words.constant(0, I64)]
    return words.reduce("add", _moved_lines(e, base, at, lines, number, deltas, flips, ahead, stride, start, then)[0])


@vector_body(types.void)
def write_lines(e, base, at, lines, number, deltas, flips, ahead, stride):
    """Write changes of lines; see :func:`check_lines` for the arguments."""

    def then(place, line, old, new, carried):
        e.store(new, place)
        return []

    _moved_lines(e, base, at, lines, number, deltas, flips, ahead, stride, [], then)


@vector_body(_u64)
def sum_turns(e, data, turns, key):
    """Sum the mixed words of ``turns`` times 256 bytes; ``key`` is that of the first word."""
    b, e = e.b, Emitter(e.b, _LANES)
    source = data.pointer(0, I8)
    ahead = e.constant(_LANES * KEY % 2**64, I64)

    def body(index, carried):
        keys, sums = carried[0], carried[1:]
        row = e.at(source, b.mul(index, ir.Constant(I64, LINE_BYTES * _VECTORS)), I8)
        new = []
        for turn, total in enumerate(sums):
            line = e.at(row, LINE_BYTES * turn, I8)
            e.prefetch(e.at(line, _STREAM_AHEAD, I8))
            new.append(b.add(total, _mixed(e, b.add(e.load(line, I64), keys))))
            keys = b.add(keys, ahead)
        return [keys, *new]

    last = loop(b, turns, 1, [_keys(e, key), *[e.constant(0, I64)] * _VECTORS], body)[1:]
    return e.reduce("add", b.add(b.add(last[0], last[1]), b.add(last[2], last[3])))
