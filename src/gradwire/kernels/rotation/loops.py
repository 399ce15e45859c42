# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over the blocks of a rotation, with plain bodies. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.levels import simd as levels_simd
from gradwire.kernels.levels.loops import Scales, plain_write_levels
from gradwire.kernels.numba_core.compiled import STREAMED_GROUPS, Compiled, Noise, draw_of, either, kept, one_row
from gradwire.kernels.numba_core.philox import plain_five_words
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.loops import end_streams, pack, tile_groups, unpack, word_table
from gradwire.kernels.rotation import simd
from gradwire.kernels.rotation.blocks import MOST_BLOCK
from gradwire.kernels.table import LANES

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "974688160c41771d"


_u32, _f32 = np.uint32, np.float32


_TILE_GROUPS = 10
"""Groups of digits that are unpacked at a time, and fit the L1 cache beside a block of 4096 coordinates."""


@njit(nogil=True)
def _flip(bits, start, noise):
    """Change the signs of a block whose first element is number ``start`` of its parameter."""
    runs = min(2048, bits.size)
    for span in range(0, bits.size, runs):
        low = (start + span) % 2048
        for lane in range(16):
            words = plain_five_words(noise, (start + span) // 2048 * 16 + lane)
            for e in range(lane, runs, 16):
                word = words[(low + e) // 512]
                sign = _u32(_u32(word >> np.uint64((low + e) // 16 % 32)) << _u32(31))
                bits[span + e] = _u32(bits[span + e] ^ sign)


@njit(nogil=True)
def _step(values, h):
    for first in range(0, values.size, 2 * h):
        low, high = values[first : first + h], values[first + h : first + 2 * h]
        for j in range(h):
            u, v = low[j], high[j]
            low[j], high[j] = _f32(u + v), _f32(u - v)


@njit(nogil=True)
def plain_rotate_block(x, at, numel, start, factor, noise, z, place, size, room, streamed):
    coordinates = z[place : place + size]
    for e in range(size):
        coordinates[e] = _f32(x[at + e] * factor) if e < numel else _f32(0)
    _flip(coordinates.view(_u32), start, noise)
    h = 1
    while h < size:
        _step(coordinates, h)
        h *= 2


@njit(nogil=True)
def plain_rotate_block_back(z, place, size, start, factor, noise, x, at, numel, accumulate, room, streamed):
    coordinates = z[place : place + size]
    h = size // 2
    while h:
        _step(coordinates, h)
        h //= 2
    for e in range(size):
        coordinates[e] = _f32(coordinates[e] * factor)
    _flip(coordinates.view(_u32), start, noise)
    for e in range(numel):
        x[at + e] = _f32(x[at + e] + coordinates[e]) if accumulate else coordinates[e]


@njit(nogil=True)
def plain_nearest_digits(z, place, size, grid, digits, at):
    sums = np.zeros(16, np.float32)
    bits = z[place : place + size].view(_u32)
    for first in range(0, size, 16):
        for lane in range(16):
            magnitude = abs(z[place + first + lane])
            count = 0
            for edge in grid.edge:
                count += _f32(magnitude * _f32(16777216.0)) > edge
            sums[lane] = _f32(sums[lane] + _f32(magnitude * grid.values[grid.positive + count]))
            below = bits[first + lane] >> _u32(31)
            digits[at + first + lane] = grid.negative - count if below else grid.positive + count
    half = 8
    while half:
        for lane in range(half):
            sums[lane] = _f32(sums[lane] + sums[lane + half])
        half //= 2
    return sums[0]


@njit(nogil=True)
def plain_nearest_pairs(z, place, size, grid, base, out, at):
    digits = np.empty(size, np.uint16)
    kept = plain_nearest_digits(z, place, size, grid, digits, 0)
    for word in range(size // 2):
        first = word // 16 * 32 + word % 16
        out[at + word] = digits[first] + base * digits[first + 16]
    return kept


rotate_block = either(plain_rotate_block, simd.rotate_block)
rotate_block_back = either(plain_rotate_block_back, simd.rotate_block_back)
nearest_digits = either(plain_nearest_digits, simd.nearest_digits)
nearest_pairs = either(plain_nearest_pairs, simd.nearest_pairs)
write_levels = either(plain_write_levels, levels_simd.write_levels)


class RotationLoops(Compiled):
    """The operations of the family ``rotation``, compiled."""

    def rotate(self, x, table, factor, round, stream, z):
        values, factors, coordinates, draw = x.numpy(), factor.numpy(), z.numpy(), draw_of(round, stream)

        def work(begin: int, end: int) -> None:
            rotate_range(self.simd, values, table.columns, factors, draw, begin, end, coordinates)

        self.split(table.blocks, 1, table.size, work)

    def rotate_back(self, z, table, factor, round, stream, x, accumulate):
        values, factors, coordinates, draw = x.numpy(), factor.numpy(), z.numpy(), draw_of(round, stream)

        def work(begin: int, end: int) -> None:
            rotate_back_range(self.simd, coordinates, table.columns, factors, draw, begin, end, values, accumulate)

        self.split(table.blocks, 1, table.size, work)

    def encode_rotated(self, x, table, factor, grid, layout, round, stream, out, kept):
        values, factors, draw = x.numpy(), factor.numpy(), draw_of(round, stream)
        octets, inner, words = out.numpy(), kept.numpy(), word_table(layout)
        if layout.word_bytes > 1 or layout.digits != 2:
            # A word may hold digits of two blocks, so one thread packs all blocks.
            encode_rotated_range(
                self.simd, values, table.columns, factors, draw, grid.columns, words, table.size, octets, inner
            )
            return

        def work(begin: int, end: int) -> None:
            encode_pairs_range(
                self.simd, values, table.columns, factors, draw, grid.columns, layout.base, table.size, begin, end,
                octets, inner,
            )  # fmt: skip

        self.split(table.blocks, 1, table.size, work)
        octets[table.coordinates // 2 :] = layout.base // 2 * (1 + layout.base)

    def decode_rotated(self, words, table, scale, grid, layout, round, stream, x, accumulate):
        decode_rotated_range(
            self.simd, one_row(words), word_table(layout), table.columns, scale.numpy(), draw_of(round, stream),
            grid.columns, table.size, x.numpy(), accumulate,
        )  # fmt: skip


@njit(nogil=True)
def _noise(table, block, draw):
    return Noise(table.key[block, 0], table.key[block, 1], draw.round, draw.stream, 0)


@njit(nogil=True)
def _room(size):
    """Return memory for ``size`` values, aligned to a cache line: a vector in two lines takes twice as long."""
    room = np.empty(size + LANES, np.float32)
    skip = -(room.ctypes.data // 4) % LANES
    return room[skip : skip + size]


@njit(nogil=True)
def _many(table, begin, end):
    """Return whether blocks ``begin .. end`` have enough coordinates to write them past the caches."""
    return table.place[end] - table.place[begin] >= 80 * STREAMED_GROUPS


@njit(nogil=True)
def _move(values, begin, end):
    """Move ``values[begin:end]`` to the front, in parts without overlap, for which the compiler uses vectors."""
    for at in range(begin, end, begin):
        part = values[at : min(at + begin, end)]
        to = values[at - begin : at - begin + part.size]
        for i in range(part.size):
            to[i] = part[i]


@njit(nogil=True)
def _fill(x, at, numel, value, accumulate):
    for e in range(at, at + numel):
        x[e] = x[e] + value if accumulate else value


# The loops call bodies directly: by way of another function, inlined or not, a rotation takes a fifth longer.
@kept(DIGEST)
def rotate_range(simd, x, table, factor, draw, begin, end, z):
    """Rotate blocks ``begin .. end``."""
    prefer_wide()
    room, streamed = _room(MOST_BLOCK), _many(table, begin, end)
    for block in range(begin, end):
        size, f = table.place[block + 1] - table.place[block], factor[block]
        if f == 0:
            z[table.place[block] : table.place[block + 1]] = np.float32(0)
        else:
            rotate_block(
                simd, x, table.offset[block], table.numel[block], table.start[block], f, _noise(table, block, draw),
                z, table.place[block], size, room, streamed,
            )  # fmt: skip
    end_streams(simd)


@kept(DIGEST)
def rotate_back_range(simd, z, table, factor, draw, begin, end, x, accumulate):
    """Rotate blocks ``begin .. end`` back."""
    prefer_wide()
    room, streamed = _room(MOST_BLOCK), _many(table, begin, end) and not accumulate
    for block in range(begin, end):
        size, f = table.place[block + 1] - table.place[block], factor[block]
        if np.isfinite(f):
            rotate_block_back(
                simd, z, table.place[block], size, table.start[block], f, _noise(table, block, draw), x,
                table.offset[block], table.numel[block], accumulate, room, streamed,
            )  # fmt: skip
        else:
            _fill(x, table.offset[block], table.numel[block], f, accumulate)
    end_streams(simd)


@kept(DIGEST)
def encode_pairs_range(simd, x, table, factor, draw, grid, base, size, begin, end, out, inner):
    """Rotate blocks ``begin .. end`` and write their coordinates' digits, two in a byte."""
    prefer_wide()
    coordinates = _room(size)
    for block in range(begin, end):
        count, f = table.place[block + 1] - table.place[block], factor[block]
        if f == 0:
            coordinates[:count] = np.float32(0)
        else:
            rotate_block(
                simd, x, table.offset[block], table.numel[block], table.start[block], f, _noise(table, block, draw),
                coordinates, 0, count, coordinates, False,
            )  # fmt: skip
        inner[block] = nearest_pairs(simd, coordinates, 0, count, grid, base, out, table.place[block] // 2)


@kept(DIGEST)
def encode_rotated_range(simd, x, table, factor, draw, grid, layout, size, out, inner):
    """Rotate all blocks and pack their digits, block by block, so that coordinates and digits stay in the cache."""
    prefer_wide()
    whole = 80 * layout.digits  # digits of whole groups in whole words
    coordinates = _room(size)
    digits = np.empty(size + 2 * whole, np.uint16)
    waiting, group = 0, 0
    for block in range(factor.size):
        count, f = table.place[block + 1] - table.place[block], factor[block]
        if f == 0:
            coordinates[:count] = np.float32(0)
        else:
            rotate_block(
                simd, x, table.offset[block], table.numel[block], table.start[block], f, _noise(table, block, draw),
                coordinates, 0, count, coordinates, False,
            )  # fmt: skip
        inner[block] = nearest_digits(simd, coordinates, 0, count, grid, digits, waiting)
        waiting += count
        packed = waiting // whole * whole
        if packed:
            pack(simd, digits, packed // 80, layout, out, group)
            _move(digits, packed, waiting)
            waiting, group = waiting - packed, group + packed // 80
    if waiting:
        groups = (waiting + 79) // 80
        digits[waiting : 80 * groups] = layout.base // 2
        pack(simd, digits, groups, layout, out, group)


@kept(DIGEST)
def decode_rotated_range(simd, words, layout, table, scale, draw, grid, size, x, accumulate):
    """Unpack the digits of all blocks and rotate their levels back, block by block, so that they stay in the cache."""
    prefer_wide()
    tile = tile_groups(layout.digits, _TILE_GROUPS)
    groups = (table.place[scale.size] + 79) // 80
    digits = np.empty(80 * tile + 16 * layout.digits, np.float32)
    coordinates = _room(80 * tile + size)
    one = Scales(np.ones(1, np.float32), 0, 1 << 40, 0, 1 << 40)
    streamed = _many(table, 0, scale.size) and not accumulate
    group, waiting = 0, 0
    for block in range(scale.size):
        count, f = table.place[block + 1] - table.place[block], scale[block]
        while waiting < count:
            number = min(tile, groups - group)
            unpack(simd, words, 0, number, layout, group, digits)
            write_levels(simd, digits, 0, 80 * number, grid, one, coordinates, waiting, False, False)
            waiting, group = waiting + 80 * number, group + number
        if np.isfinite(f):
            rotate_block_back(
                simd, coordinates, 0, count, table.start[block], f, _noise(table, block, draw), x,
                table.offset[block], table.numel[block], accumulate, coordinates, streamed,
            )  # fmt: skip
        else:
            _fill(x, table.offset[block], table.numel[block], f, accumulate)
        _move(coordinates, count, waiting)
        waiting -= count
    end_streams(simd)
