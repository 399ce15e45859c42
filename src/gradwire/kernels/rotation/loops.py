# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops over the blocks of a rotation. See ``ternary/loops.py`` for the rules."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.kernels.levels.loops import Scales
from gradwire.kernels.numba_core.compiled import TILE_GROUPS, Compiled, one_row
from gradwire.kernels.numba_core.overloads import either, kept
from gradwire.kernels.numba_core.segments import Noise, draw_of
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.packing.divisions import word_table
from gradwire.kernels.packing.loops import pack, tile_groups, unpack

__all__ = ["RotationLoops", "decode_rotated_range", "encode_rotated_range", "rotate_back_range", "rotate_range"]

# Of all that this is compiled from: what Numba keeps on disk is kept under this name (``make digests``).
DIGEST = "bd5c8887309963b8"

rotate_block = either("rotate_block", "rotation.scalar", "rotation.simd")
rotate_block_back = either("rotate_block_back", "rotation.scalar", "rotation.simd")
nearest_digits = either("nearest_digits", "rotation.scalar", "rotation.simd")
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
        # Blocks need not end where words do, so that one thread packs them all.
        encode_rotated_range(
            self.simd, x.numpy(), table.columns, factor.numpy(), draw_of(round, stream), grid.columns,
            word_table(layout), table.size, out.numpy(), kept.numpy(),
        )  # fmt: skip

    def decode_rotated(self, words, table, scale, grid, layout, round, stream, x, accumulate):
        decode_rotated_range(
            self.simd, one_row(words), word_table(layout), table.columns, scale.numpy(), draw_of(round, stream),
            grid.columns, table.size, x.numpy(), accumulate,
        )  # fmt: skip


@njit(nogil=True)
def _noise(table, block, draw):
    return Noise(table.key[block, 0], table.key[block, 1], draw.round, draw.stream, 0)


@njit(nogil=True)
def _rotate(simd, x, table, block, factor, draw, z, place):
    size = table.place[block + 1] - table.place[block]
    if factor == 0:
        z[place : place + size] = np.float32(0)
    else:
        rotate_block(
            simd, x, table.offset[block], table.numel[block], table.start[block], factor, _noise(table, block, draw),
            z, place, size,
        )  # fmt: skip


@njit(nogil=True)
def _rotate_back(simd, z, place, table, block, factor, draw, x, accumulate):
    at, numel, size = table.offset[block], table.numel[block], table.place[block + 1] - table.place[block]
    if np.isfinite(factor):
        rotate_block_back(
            simd, z, place, size, table.start[block], factor, _noise(table, block, draw), x, at, numel, accumulate
        )
    else:
        for e in range(at, at + numel):
            x[e] = x[e] + factor if accumulate else factor


@kept(DIGEST)
def rotate_range(simd, x, table, factor, draw, begin, end, z):
    """Rotate blocks ``begin .. end``."""
    prefer_wide()
    for block in range(begin, end):
        _rotate(simd, x, table, block, factor[block], draw, z, table.place[block])


@kept(DIGEST)
def rotate_back_range(simd, z, table, factor, draw, begin, end, x, accumulate):
    """Rotate blocks ``begin .. end`` back."""
    prefer_wide()
    for block in range(begin, end):
        _rotate_back(simd, z, table.place[block], table, block, factor[block], draw, x, accumulate)


@kept(DIGEST)
def encode_rotated_range(simd, x, table, factor, draw, grid, layout, size, out, inner):
    """Rotate all blocks and pack their coordinates' digits; a block, and what is not yet packed, stay in the cache."""
    prefer_wide()
    tile = tile_groups(layout.digits, TILE_GROUPS)
    coordinates = np.empty(size, np.float32)
    digits = np.empty(80 * tile + size + 16 * layout.digits + 80, np.uint16)
    waiting, group = 0, 0
    for block in range(factor.size):
        count = table.place[block + 1] - table.place[block]
        _rotate(simd, x, table, block, factor[block], draw, coordinates, 0)
        inner[block] = nearest_digits(simd, coordinates, 0, count, grid, digits, waiting)
        waiting += count
        packed = 0
        while waiting - packed >= 80 * tile:
            pack(simd, digits[packed:], tile, layout, out, group)
            packed, group = packed + 80 * tile, group + tile
        if packed:
            digits[: waiting - packed] = digits[packed:waiting]
            waiting -= packed
    if waiting:
        groups = (waiting + 79) // 80
        digits[waiting : 80 * groups] = layout.base // 2
        pack(simd, digits, groups, layout, out, group)


@kept(DIGEST)
def decode_rotated_range(simd, words, layout, table, scale, draw, grid, size, x, accumulate):
    """Unpack the digits of all blocks and rotate their levels back."""
    prefer_wide()
    tile = tile_groups(layout.digits, TILE_GROUPS)
    groups = (table.place[scale.size] + 79) // 80
    digits = np.empty(80 * tile + 16 * layout.digits, np.float32)
    coordinates = np.empty(80 * tile + size, np.float32)
    one = Scales(np.ones(1, np.float32), 0, 1 << 40, 0, 1 << 40)
    block, waiting = 0, 0
    for group in range(0, groups, tile):
        number = min(tile, groups - group)
        unpack(simd, words, 0, number, layout, group, digits)
        write_levels(simd, digits, 0, 80 * number, grid, one, coordinates, waiting, False, False)
        waiting += 80 * number
        done = 0
        while block < scale.size:
            count = table.place[block + 1] - table.place[block]
            if waiting - done < count:
                break
            _rotate_back(simd, coordinates, done, table, block, scale[block], draw, x, accumulate)
            block, done = block + 1, done + count
        if done:
            coordinates[: waiting - done] = coordinates[done:waiting]
            waiting -= done
