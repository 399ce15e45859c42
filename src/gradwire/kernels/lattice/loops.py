# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over groups for lattices, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from gradwire.kernels.lattice import simd
from gradwire.kernels.numba_core.compiled import (
    TILE_GROUPS,
    Compiled,
    draw_of,
    either,
    find_segment,
    kept,
    next_piece,
    noise_at,
    rows_of,
)
from gradwire.kernels.numba_core.philox import plain_five_words
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.loops import pack, tile_groups, unpack, word_table
from gradwire.kernels.table import GROUP_SIZE

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "005930f756d19efe"


_f32, _i32, _u16 = np.float32, np.int32, np.uint16
_STEP = _f32(2.0**-24)


_ROWS_TILE_GROUPS = 12
"""Groups of each row that are unpacked at a time: 30 KiB for eight rows."""
_WORD = 0xFFFFFFFF


@njit(nogil=True)
def _scaled(value, inverse, uniform, shift):
    theta = _f32(_f32(_f32(_i32((uniform + shift) & _i32(0xFFFFFF))) * _STEP) - _f32(0.5))
    t = _f32(_f32(value * inverse) - theta)
    if not abs(t) < _f32(1 << 23):
        t = _f32(0)
    return t, theta


@njit(nogil=True)
def _turned(check, turn, uniform):
    """Return the check after adding a turn."""
    return _i32(check + _i32(turn * _i32(_i32(uniform * _i32(2)) + _i32(1))))


@njit(nogil=True)
def plain_lattice_colours(x, first, count, inverse, bits, shift, noise, digits, at, checks):
    mask = _i32((1 << bits) - 1)
    for group in range((count + 79) // 80):
        for lane in range(16):
            for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = x[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                t, _ = _scaled(value, inverse, uniform, shift)
                k = _i32(np.rint(t))
                digits[at + e] = _u16(k & mask)
                checks[lane] = _turned(checks[lane], _i32(k >> bits), uniform)


@njit(nogil=True)
def plain_lattice_sums(own, x, first, count, side, colours, at, noise, checks, accumulate):
    part = _f32(1.0 / (1 << colours.bits))
    for group in range((count + 79) // 80):
        for lane in range(16):
            for plane, word in enumerate(plain_five_words(noise, 16 * group + lane)):
                e = 80 * group + 16 * plane + lane
                value = own[first + e] if e < count else _f32(0)
                uniform = _i32(word >> np.uint64(8))
                total = _f32(0)
                for row in range(colours.shifts.size):
                    t, theta = _scaled(value, side.inverse, uniform, colours.shifts[row])
                    colour = _i32(colours.digits[row * colours.distance + at + e])
                    turn = _i32(np.rint(_f32(_f32(t - _f32(colour)) * part)))
                    checks[16 * row + lane] = _turned(checks[16 * row + lane], turn, uniform)
                    k = _i32(colour + _i32(turn << colours.bits))
                    found = _f32(_f32(_f32(k) + theta) * side.scale)
                    total = found if row == 0 else _f32(total + found)
                if e < count:
                    x[first + e] = _f32(x[first + e] + total) if accumulate else total


lattice_colours = either(plain_lattice_colours, simd.lattice_colours)
lattice_sums = either(plain_lattice_sums, simd.lattice_sums)


class Sides(NamedTuple):
    """1 / s and s, the side of the lattice: of each segment, or of one segment."""

    inverse: Any
    scale: Any


class Colours(NamedTuple):
    """Colours (float32) of neighbouring groups of all rows, ``distance`` apart, and the shifts of their senders."""

    digits: Any
    distance: int
    shifts: Any
    bits: int


class LatticeLoops(Compiled):
    """The operations of the family ``lattice``, compiled."""

    def lattice_encode(self, x, table, inverse, layout, round, stream, shift, out, check):
        values, words, factors, digits = x.numpy(), out.numpy(), inverse.numpy(), word_table(layout)
        draw = draw_of(round, stream)
        checks: list[npt.NDArray[np.int32]] = []

        def work(begin: int, end: int) -> None:
            own = np.zeros(16, np.int32)
            checks.append(own)
            lattice_encode_range(
                self.simd, values, table.columns, factors, np.int32(shift), draw, (begin, end), digits, words, own
            )

        self.split(table.groups, layout.digits, GROUP_SIZE, work)
        check[0] = int(sum(part.sum(dtype=np.int64) for part in checks)) & _WORD

    def lattice_mean(self, rows, table, inverse, scale, layout, round, stream, shifts, own, x, accumulate, checks):
        payloads, number, values, target = rows_of(rows), rows.shape[0], own.numpy(), x.numpy()
        sides, digits = Sides(inverse.numpy(), scale.numpy()), word_table(layout)
        draw, dithers = draw_of(round, stream), np.array(shifts, np.int32)
        parts: list[npt.NDArray[np.int32]] = []

        def work(begin: int, end: int) -> None:
            ours = np.zeros(16 * number, np.int32)
            parts.append(ours)
            lattice_mean_range(
                self.simd, payloads, digits, values, target, table.columns, sides, (draw, dithers),
                (begin, end, accumulate), ours,
            )  # fmt: skip

        self.split(table.groups, layout.digits, GROUP_SIZE * number, work)
        total = np.sum([part.reshape(number, 16).sum(1, dtype=np.int64) for part in parts], axis=0)
        checks.numpy()[:] = total & _WORD


@njit(nogil=True)
def _bits(layout):
    """Return the number of bits of a colour; the base is a power of two."""
    bits = 0
    while 1 << bits < layout.base:
        bits += 1
    return bits


@kept(DIGEST)
def lattice_encode_range(simd, x, table, inverse, shift, draw, groups, layout, out, checks):
    """Encode ``groups = (begin, end)``, and add to ``checks`` (int32 ``[16]``)."""
    prefer_wide()
    (begin, end), bits = groups, _bits(layout)
    tile = tile_groups(layout.digits, TILE_GROUPS)
    digits = np.empty(80 * tile + 16 * layout.digits, np.uint16)
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment = piece.segment
            lattice_colours(
                simd, x, piece.at, piece.numel, inverse[segment], bits, shift, noise_at(table, piece, draw), digits,
                80 * (group - tile_begin), checks,
            )  # fmt: skip
            group = piece.stop
        pack(simd, digits, tile_end - tile_begin, layout, out, tile_begin)


@kept(DIGEST)
def lattice_mean_range(simd, rows, layout, own, x, table, sides, draws, groups, checks):
    """Decode ``groups = (begin, end, accumulate)`` of all rows, and add to ``checks`` (int32 ``[16 * number]``).

    ``draws`` holds the shared draw and the rows' shifts.
    """
    prefer_wide()
    (begin, end, accumulate), (draw, shifts) = groups, draws
    tile = tile_groups(layout.digits, _ROWS_TILE_GROUPS)
    distance = 80 * tile + 16 * layout.digits
    colours = Colours(np.empty(rows.number * distance, np.float32), distance, shifts, _bits(layout))
    segment = find_segment(table, begin)
    for tile_begin in range(begin, end, tile):
        group, tile_end = tile_begin, min(end, tile_begin + tile)
        for row in range(rows.number):
            part = colours.digits[row * distance : (row + 1) * distance]
            unpack(simd, rows, row, tile_end - tile_begin, layout, tile_begin, part)
        while group < tile_end:
            piece = next_piece(table, segment, group, tile_end)
            segment = piece.segment
            at, count, side = piece.at, piece.numel, Sides(sides.inverse[segment], sides.scale[segment])
            if np.isfinite(side.scale):
                lattice_sums(
                    simd, own, x, at, count, side, colours, 80 * (group - tile_begin), noise_at(table, piece, draw),
                    checks, accumulate,
                )  # fmt: skip
            else:
                for i in range(at, at + count):
                    x[i] = x[i] + side.scale if accumulate else side.scale
            group = piece.stop
