# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over the blocks of a rotation. See ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.levels.loops import Scales
from gradwire.kernels.numba_core.compiled import STREAMED_GROUPS, Compiled, one_row
from gradwire.kernels.numba_core.overloads import either, kept
from gradwire.kernels.numba_core.segments import Noise, draw_of
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.divisions import word_table
from gradwire.kernels.packing.loops import end_streams, pack, tile_groups, unpack
from gradwire.kernels.rotation.blocks import MOST_BLOCK
from gradwire.kernels.table import LANES

__all__ = [
    "RotationLoops",
    "decode_rotated_range",
    "encode_pairs_range",
    "encode_rotated_range",
    "rotate_back_range",
    "rotate_range",
]

# Of all that this is compiled from: what Numba keeps on disk is kept under this name (``make digests``).
DIGEST = "816c6d4d999b97be"

_TILE_GROUPS = 10
"""Groups of digits that are unpacked at a time: with them, a block of 4096 coordinates fills the L1 cache."""

rotate_block = either("rotate_block", "rotation.scalar", "rotation.simd")
rotate_block_back = either("rotate_block_back", "rotation.scalar", "rotation.simd")
nearest_digits = either("nearest_digits", "rotation.scalar", "rotation.simd")
nearest_pairs = either("nearest_pairs", "rotation.scalar", "rotation.simd")
write_levels = either("write_levels", "levels.scalar", "levels.simd")


class RotationLoops(Compiled):
    """The operations of rotations."""

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
            # Blocks need not end where words do, so that one thread packs them all.
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
    """Return memory for so many values that begins with a cache line: vectors that lie in two take twice as long."""
    room = np.empty(size + LANES, np.float32)
    skip = -(room.ctypes.data // 4) % LANES
    return room[skip : skip + size]


@njit(nogil=True)
def _many(table, begin, end):
    """Return whether blocks ``begin .. end`` are so many that they are better written past the caches."""
    return table.place[end] - table.place[begin] >= 80 * STREAMED_GROUPS


@njit(nogil=True)
def _move(values, begin, end):
    """Move values to the front, in parts that do not overlap: for others the compiler has no vectors."""
    for at in range(begin, end, begin):
        part = values[at : min(at + begin, end)]
        to = values[at - begin : at - begin + part.size]
        for i in range(part.size):
            to[i] = part[i]


@njit(nogil=True)
def _fill(x, at, numel, value, accumulate):
    for e in range(at, at + numel):
        x[e] = x[e] + value if accumulate else value


# The bodies stand in the loops themselves: in a function between, inlined or not, a rotation takes a fifth longer.
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
    """Rotate all blocks and pack their coordinates' digits; a block, and what is not yet packed, stay in the cache."""
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
    """Unpack the digits of all blocks and rotate their levels back; what is in hand stays in the cache."""
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
