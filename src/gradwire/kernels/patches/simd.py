# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Explicit-vector bodies of the loops over words, and loads and stores of single words. ``loops.py`` calls them."""

from __future__ import annotations

import sys

from llvmlite import ir
from numba import types

from gradwire.kernels.numba_core.vectors import I8, I64, Emitter, loop, vector_body
from gradwire.kernels.patches.formats import (
    FIRST_FACTOR,
    FIRST_SHIFT,
    KEY,
    SECOND_FACTOR,
    SECOND_SHIFT,
    THIRD_SHIFT,
)

_LITTLE = sys.byteorder == "little"
_LANES, _VECTORS = 8, 4
_WORDS = 64


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
def prefetch(e, data, at):
    """Fetch the line of byte ``at`` into the caches."""
    e.prefetch(data.pointer(at, I8))


@vector_body(_u64)
def changed_words(e, old, new, at):
    """Return which of 64 words of 8 bytes differ, from byte ``at`` on, as the bits of one word."""
    first, second = (e.load(array.pointer(at, I8), I64, _WORDS) for array in (old, new))
    return e.mask_bits(e.b.icmp_unsigned("!=", first, second))


@vector_body(_u64)
def sum_turns(e, data, turns, key):
    """Sum the mixed words of ``turns`` times 256 bytes; ``key`` is that of the first word."""
    b, e = e.b, Emitter(e.b, _LANES)
    source = data.pointer(0, I8)
    start = b.add(e.splat(key), e.constants([i * KEY % 2**64 for i in range(_LANES)], I64))
    ahead = e.constant(_LANES * KEY % 2**64, I64)

    def body(index, carried):
        keys, sums = carried[0], carried[1:]
        row = e.at(source, b.mul(index, ir.Constant(I64, 8 * _LANES * _VECTORS)), I8)
        new = []
        for turn, total in enumerate(sums):
            mixed = b.add(e.load(e.at(row, _LANES * turn, I64), I64), keys)
            for shift, factor in ((FIRST_SHIFT, FIRST_FACTOR), (SECOND_SHIFT, SECOND_FACTOR)):
                mixed = b.mul(b.xor(mixed, e.shift_right(mixed, shift)), e.constant(factor, I64))
            new.append(b.add(total, b.xor(mixed, e.shift_right(mixed, THIRD_SHIFT))))
            keys = b.add(keys, ahead)
        return [keys, *new]

    last = loop(b, turns, 1, [start, *[e.constant(0, I64)] * _VECTORS], body)[1:]
    return e.reduce("add", b.add(b.add(last[0], last[1]), b.add(last[2], last[3])))
