# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over segments and groups. They decide what lies where; *bodies* do the arithmetic.

Every driver's first argument says which bodies serve it: ``True`` the explicit-vector ones, ``None`` the plain ones.
The *type* decides, when the driver is compiled, so that one source gives both variants and either is cached on disk.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload

__all__ = ["decode_range", "encode_range", "moments_range", "pack_run", "sum_range", "unpack_run"]

TILE_GROUPS = 40
"""Groups decoded before they are scaled and stored: 12.5 KiB of int32, well within the L1 cache."""

_VECTOR_HOMES = {"block_maximum", "block_sums", "encode_full", "encode_partial"}


def _either(name: str) -> Any:
    """Make a function whose body is the explicit-vector or the plain one of that name."""

    def body(variant, *arguments):
        raise NotImplementedError("called from compiled code only")

    @overload(body)
    def choose(variant, *arguments):
        # Imported here, so that a machine on which the vector modules fail can still run the plain ones.
        if isinstance(variant, types.NoneType):
            home = "cpu_plain"
        else:
            home = "cpu_vector_floats" if name in _VECTOR_HOMES else "cpu_vector_digits"
        chosen = getattr(import_module(f"gradwire.kernels.{home}"), name)

        def call(variant, *arguments):
            return chosen(*arguments)

        return call

    return body


block_maximum = _either("block_maximum")
block_sums = _either("block_sums")
encode_full = _either("encode_full")
encode_partial = _either("encode_partial")
sum_to_digits = _either("sum_to_digits")
sum_to_words = _either("sum_to_words")
pack_blocks = _either("pack_blocks")
unpack_blocks = _either("unpack_blocks")
decode_groups = _either("decode_groups")
decode_partial = _either("decode_partial")


@njit(nogil=True, cache=True)
def moments_range(variant, x, offset, numel, begin, end, max_abs, mean, std, scratch):
    """Compute the moments of segments ``begin .. end``. ``scratch`` (float64 ``[3]``) turns bits into numbers."""
    double_bits = scratch.view(np.int64)
    single = scratch[2:].view(np.float32)
    single_bits = scratch[2:].view(np.int32)
    for segment in range(begin, end):
        at, rest = offset[segment], numel[segment]
        size = rest
        first, second = 0.0, 0.0
        largest = np.int32(0)
        while rest > 0:
            count = min(rest, 4096)
            bits = block_maximum(variant, x, at, count, 4096)
            largest = max(largest, bits)
            if bits >= 0x7F800000:
                break
            exponent = max((bits >> 23) - 127, -104)
            single_bits[0] = np.int32((23 - exponent + 127) << 23)
            s1, s2 = block_sums(variant, x, at, count, single[0], 4096)
            double_bits[0] = np.int64(exponent - 23 + 1023) << 52
            double_bits[1] = np.int64(2 * (exponent - 23) + 1023) << 52
            first += np.float64(s1) * scratch[0]
            second += np.float64(s2) * scratch[1]
            at += count
            rest -= count
        if largest >= 0x7F800000:
            largest = np.int32(0x7F800000)
            first, second = 0.0, 0.0
        average = first / max(size, 1)
        variance = second / max(size, 1) - average * average
        single_bits[0] = largest
        max_abs[segment] = single[0]
        mean[segment] = average
        std[segment] = np.sqrt(max(variance, 0.0))


@njit(nogil=True, cache=True)
def encode_range(
    variant,
    x,
    offset,
    numel,
    start,
    key,
    first_group,
    limit,
    inverse,
    round,
    stream,
    begin,
    end,
    segment,
    out,
):
    """Encode groups ``begin .. end``, the first of which lies in ``segment``, into ``out``."""
    group = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        within = group - first_group[segment]
        stop = min(end, first_group[segment + 1]) - first_group[segment]
        whole = max(min(stop, numel[segment] // 80) - within, 0)
        at = offset[segment] + 80 * within
        block = (start[segment] // 80 + within) * 16
        to = 16 * (group - begin)
        low, high, k0, k1 = limit[segment], inverse[segment], key[segment, 0], key[segment, 1]
        if whole > 0:
            encode_full(variant, x, at, low, high, k0, k1, round, stream, block, out, to, whole, 2560)
        if within + whole < stop:
            at += 80 * whole
            count = numel[segment] - 80 * (within + whole)
            encode_partial(
                variant,
                x,
                at,
                low,
                high,
                k0,
                k1,
                round,
                stream,
                block + 16 * whole,
                out,
                to + 16 * whole,
                count,
            )
        group += stop - within


@njit(nogil=True)
def _pack(variant, digits, blocks, per_word, base, word_bytes, out, first):
    if word_bytes == 1:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint8(0), out, first)
    elif word_bytes == 2:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint16(0), out, first)
    else:
        pack_blocks(variant, digits, blocks, per_word, base, np.uint32(0), out, first)


@njit(nogil=True)
def _unpack(variant, words, first, blocks, per_word, base, word_bytes, reciprocal, values):
    if word_bytes == 1:
        unpack_blocks(variant, words, first, np.uint8(0), blocks, per_word, base, reciprocal, values)
    elif word_bytes == 2:
        unpack_blocks(variant, words, first, np.uint16(0), blocks, per_word, base, reciprocal, values)
    else:
        unpack_blocks(variant, words, first, np.uint32(0), blocks, per_word, base, reciprocal, values)


@njit(nogil=True, cache=True)
def sum_range(variant, rows, stride, number, begin, end, base, per_word, word_bytes, out):
    """Sum bytes ``begin .. end`` of the rows, a whole number of ``16 * per_word``, unless they are the last."""
    if per_word == 5 and word_bytes == 2:
        for first in range(begin, end, 1024):
            sum_to_words(variant, rows, first, stride, number, min(1024, end - first), base, out, 2 * first)
        return
    # Five planes of 16 digits a group, per_word planes a block: a multiple of per_word groups makes whole blocks.
    tile = per_word * max(1, 64 // per_word) * 16
    digits = np.empty(5 * tile + 16 * per_word, np.uint16)
    for first in range(begin, end, tile):
        length = min(tile, end - first)
        sum_to_digits(variant, rows, first, stride, number, length, digits)
        blocks = -(-5 * length // (16 * per_word))
        digits[5 * length : blocks * 16 * per_word] = np.uint16(base // 2)
        _pack(variant, digits, blocks, per_word, base, word_bytes, out, first // per_word * 5 * word_bytes)


@njit(nogil=True, cache=True)
def pack_run(variant, values, base, per_word, word_bytes, out):
    """Pack a run of int32 values in ``[-(base // 2), base // 2]``."""
    block = 16 * per_word
    tile = block * max(1, 4096 // block)
    digits = np.empty(tile, np.uint16)
    for first in range(0, values.size, tile):
        part = values[first : first + tile]
        blocks = -(-part.size // block)
        for i in range(part.size):
            digits[i] = np.uint16(part[i] + base // 2)
        digits[part.size : blocks * block] = np.uint16(base // 2)
        _pack(variant, digits, blocks, per_word, base, word_bytes, out, first // per_word * word_bytes)


@njit(nogil=True, cache=True)
def unpack_run(variant, words, base, per_word, word_bytes, reciprocal, out):
    """Undo ``pack_run``."""
    block = 16 * per_word
    tile = block * max(1, 4096 // block)
    values = np.empty(tile, np.int32)
    for first in range(0, out.size, tile):
        part = out[first : first + tile]
        blocks = -(-part.size // block)
        _unpack(
            variant,
            words,
            first // per_word * word_bytes,
            blocks,
            per_word,
            base,
            word_bytes,
            reciprocal,
            values,
        )
        part[:] = values[: part.size]


@njit(nogil=True)
def _decode_direct(variant, words, first, groups, count, base, word_bytes, reciprocals, scale, x, at):
    """Decode ``groups`` groups of five-digit words, the last of which may lack elements, to ``x[at : at + count]``."""
    whole = count // 80
    left = count - 80 * whole
    if word_bytes == 1:
        decode_groups(variant, words, first, np.uint8(0), whole, base, reciprocals, scale, x, at)
        if left:
            first, at = first + 16 * whole, at + 80 * whole
            decode_partial(variant, words, first, np.uint8(0), left, base, reciprocals, scale, x, at)
    else:
        decode_groups(variant, words, first, np.uint16(0), whole, base, reciprocals, scale, x, at)
        if left:
            first, at = first + 32 * whole, at + 80 * whole
            decode_partial(variant, words, first, np.uint16(0), left, base, reciprocals, scale, x, at)


@njit(nogil=True)
def _add(floats, count, x, at):
    """Add decoded floats to ``x[at : at + count]``."""
    target, source = x[at : at + count], floats[:count]
    for i in range(target.size):
        target[i] += source[i]


@njit(nogil=True, cache=True)
def decode_range(
    variant, words, base, per_word, word_bytes, reciprocal, reciprocals, offset, numel, first_group, scale, begin, end,
    skip, segment, x, accumulate,
):  # fmt: skip
    """Decode groups ``begin .. end``; the words of ``begin`` are at group ``skip`` of ``words``.

    Words of five digits go straight to ``x``, or through a small buffer if they are to be added; others are unpacked to
    integers a tile at a time. (Stores past the caches, from such a buffer, were measured slower: 1.04 against 0.78 of a
    memcpy, since computing and writing then take turns.)
    """
    five = per_word == 5 and word_bytes <= 2
    # A multiple of per_word groups makes whole blocks of words, so tiles may start at any such group.
    tile = TILE_GROUPS if five else per_word * max(1, TILE_GROUPS // per_word)
    integers = np.empty(16 * per_word if five else 80 * tile + 16 * per_word, np.int32)
    floats = np.empty(80 * tile, np.float32)
    group, tile_end = begin, begin
    tile_begin = begin
    while group < end:
        while first_group[segment + 1] <= group:
            segment += 1
        if group == tile_end:
            tile_begin, tile_end = group, min(end, group + tile)
            if not five:
                position = (skip + group - begin) * 5 // per_word * 16 * word_bytes
                blocks = -(-5 * (tile_end - group) // per_word)
                _unpack(variant, words, position, blocks, per_word, base, word_bytes, reciprocal, integers)
        stop = min(tile_end, first_group[segment + 1])
        if five and not accumulate:
            # Straight to x: no buffer, hence no tiles.
            stop = min(end, first_group[segment + 1])
            tile_end = stop
        within = group - first_group[segment]
        at = offset[segment] + 80 * within
        count = min(80 * (stop - group), numel[segment] - 80 * within)
        factor = scale[segment]
        if not np.isfinite(factor):
            for i in range(at, at + count):
                x[i] = x[i] + factor if accumulate else factor
        elif five:
            first = (skip + group - begin) * 16 * word_bytes
            groups = stop - group
            if accumulate:
                _decode_direct(variant, words, first, groups, count, base, word_bytes, reciprocals, factor, floats, 0)
                _add(floats, count, x, at)
            else:
                _decode_direct(variant, words, first, groups, count, base, word_bytes, reciprocals, factor, x, at)
        else:
            source = integers[80 * (group - tile_begin) : 80 * (group - tile_begin) + count]
            target = floats[:count] if accumulate else x[at : at + count]
            for i in range(target.size):
                target[i] = np.float32(source[i]) * factor
            if accumulate:
                _add(floats, count, x, at)
        group = stop
