# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of rotations. A program rotates one block, whose halves of each step are split off and joined.

Signs are changed by flipping a bit: Triton's minus subtracts from zero, which would lose the sign of a zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.levels.triton import count_steps
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.triton import aligned, digit, pack_digits
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.table import GROUP_SIZE, LANES
from gradwire.kernels.triton_core.device_tables import levels_of, powers_of, rotated_blocks_of
from gradwire.kernels.triton_core.integers import philox
from gradwire.kernels.triton_core.launch import cdiv, launch, tile, word_arguments

_ELEMENTS = 1024
_BLOCKS = 4
_UNIT = tl.constexpr(UNIT)


@triton.jit
def _flip(value, start, key0, key1, low, high, stream, SIZE: tl.constexpr):
    """Change signs at random. ``start`` is a multiple of the block's size.

    The four words of a counter hold the signs of every 16th of 2048 elements.
    """
    if SIZE >= 2048:
        own = tl.arange(0, SIZE // 2048)[:, None] * 16 + tl.arange(0, 16)[None, :]
        w0, w1, w2, w3 = philox((start // 2048 * 16 + own).to(tl.int32), low, high, stream, key0, key1)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(SIZE // 2048, 16, 4).trans(0, 2, 1)
        words = words.expand_dims(2) >> tl.arange(0, 32).to(tl.uint32)[None, None, :, None]
        word = words.reshape(SIZE)
    else:
        number = start + tl.arange(0, SIZE)
        w0, w1, w2, w3 = philox((number // 2048 * 16 + number % 16).to(tl.int32), low, high, stream, key0, key1)
        which = number // 512 % 4
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        word = word >> (number // 16 % 32).to(tl.uint32)
    return (value.to(tl.uint32, bitcast=True) ^ (word << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _step(value, SIZE: tl.constexpr, H: tl.constexpr):
    """Replace the values at j and j + H, j without the bit H, by their sum and their difference."""
    pairs = value.reshape(SIZE // (2 * H), 2, H).trans(0, 2, 1)
    one, other = tl.split(pairs)
    return tl.join(one + other, one - other).trans(0, 2, 1).reshape(SIZE)


@triton.jit(do_not_specialize=["low", "high", "stream"])
def _rotate(
    x, factor, blocks, at, places, room, starts, key, low, high, stream, z, SIZE: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    element = tl.arange(0, SIZE)
    scale = tl.broadcast_to(tl.load(factor + tl.load(blocks + program)), [SIZE])
    used = (element < tl.load(room + program)) & (scale != 0.0)
    value = tl.load(x + tl.load(at + program) + element, mask=used, other=0.0)
    value = tl.where(used, value * scale, 0.0)
    key0 = tl.load(key + 2 * program)
    key1 = tl.load(key + 2 * program + 1)
    value = _flip(value, tl.load(starts + program), key0, key1, low, high, stream, SIZE)
    for step in tl.static_range(STEPS):
        value = _step(value, SIZE, 1 << step)
    tl.store(z + tl.load(places + program) + element, tl.where(scale != 0.0, value, 0.0))


def rotate(
    x: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, z: torch.Tensor
) -> None:  # fmt: skip
    for size, *columns in rotated_blocks_of(table, x.device):
        launch(
            _rotate, len(columns[0]), x, factor, *columns, *word_arguments(round, stream), z, SIZE=size,
            STEPS=size.bit_length() - 1, num_warps=_warps(size),
        )  # fmt: skip


@triton.jit(do_not_specialize=["low", "high", "stream"])
def _rotate_back(
    z, factor, blocks, at, places, room, starts, key, low, high, stream, x, SIZE: tl.constexpr, STEPS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    element = tl.arange(0, SIZE)
    scale = tl.broadcast_to(tl.load(factor + tl.load(blocks + program)), [SIZE])
    value = tl.load(z + tl.load(places + program) + element)
    for step in tl.static_range(STEPS):
        value = _step(value, SIZE, SIZE >> (step + 1))
    key0 = tl.load(key + 2 * program)
    key1 = tl.load(key + 2 * program + 1)
    value = _flip(value * scale, tl.load(starts + program), key0, key1, low, high, stream, SIZE)
    infinite = (scale.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    value = tl.where(infinite, scale, value)
    inside = element < tl.load(room + program)
    here = x + tl.load(at + program) + element
    if ADD:
        value = tl.load(here, mask=inside, other=0.0) + value
    tl.store(here, value, mask=inside)


def rotate_back(
    z: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, x: torch.Tensor,
    accumulate: bool,
) -> None:  # fmt: skip
    for size, *columns in rotated_blocks_of(table, x.device):
        launch(
            _rotate_back, len(columns[0]), z, factor, *columns, *word_arguments(round, stream), x, SIZE=size,
            STEPS=size.bit_length() - 1, ADD=accumulate, num_warps=_warps(size),
        )  # fmt: skip


def _warps(size: int) -> int:
    """Return the number of warps for a block: 16 coordinates for each thread, with 4 to 32 warps."""
    return min(max(size // 512, 4), 32)


@triton.jit(do_not_specialize=["coordinates", "padded", "steps", "positive", "negative", "middle"])
def _nearest(
    z, edge, gap, values, steps, positive, negative, middle, coordinates, padded, out, SEARCH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = place < coordinates
    value = tl.load(z + place, mask=known, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    count = count_steps(magnitude * _UNIT, edge, gap, steps, 0.0, SEARCH)
    found = tl.where(known, tl.where(bits < 0, negative - count, positive + count), middle)
    tl.store(out + place, found.to(tl.uint16), mask=place < padded)
    tl.store(z + place, magnitude * tl.load(values + positive + count), mask=known)


@triton.jit(do_not_specialize=["number"])
def _lanes(products, blocks, places, number, sums, SIZE: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    known = program < number
    begin = tl.load(places + program, mask=known, other=0) + lane
    total = tl.zeros([TILE, 16], tl.float32)
    for row in range(SIZE // 16):
        total += tl.load(products + begin + row * 16, mask=known, other=0.0)
    tl.store(sums + tl.load(blocks + program, mask=known, other=0) * 16 + lane, total, mask=known & (lane < 16))


def encode_rotated(
    x: torch.Tensor, table: RotationTable, factor: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, out: torch.Tensor, kept: torch.Tensor,
) -> None:  # fmt: skip
    z = torch.empty(table.coordinates, device=x.device, dtype=torch.float32)
    rotate(x, table, factor, round, stream, z)
    padded, levels = cdiv(table.coordinates, GROUP_SIZE) * GROUP_SIZE, levels_of(grid, x.device)
    digits = torch.empty(padded, dtype=torch.uint16, device=x.device)
    # The kernel overwrites the coordinates with their products with the levels.
    launch(
        _nearest, cdiv(padded, tile(_ELEMENTS)), z, levels.edge, levels.gap, levels.values, grid.steps, grid.positive,
        grid.negative, layout.base // 2, table.coordinates, padded, digits, SEARCH=grid.steps.bit_length(),
        TILE=tile(_ELEMENTS),
    )  # fmt: skip
    pack_digits(digits, layout, out)
    sums = torch.empty((table.blocks, LANES), device=x.device, dtype=torch.float32)
    for size, block, _, place, *_ in rotated_blocks_of(table, x.device):
        number = len(block)
        launch(_lanes, cdiv(number, tile(_BLOCKS)), z, block, place, number, sums, SIZE=size, TILE=tile(_BLOCKS))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    kept.copy_(sums[:, 0])


@triton.jit(do_not_specialize=["coordinates"])
def _levels(
    words, powers, values, coordinates, z, BASE: tl.constexpr, DIGITS: tl.constexpr, BYTES: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    lane = tl.arange(0, 16)[None, :]
    place = row.to(tl.int64) * 16 + lane
    known = place < coordinates
    found = digit(words, row, lane, known, powers, 0, 1, BASE, DIGITS, BYTES, WHOLE, True)
    tl.store(z + place, tl.load(values + found), mask=known)


def decode_rotated(
    words: torch.Tensor, table: RotationTable, scale: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    z, size = torch.empty(table.coordinates, device=x.device, dtype=torch.float32), tile(_ELEMENTS // LANES)
    launch(
        _levels, cdiv(cdiv(table.coordinates, LANES), size), words, powers_of(layout, x.device),
        levels_of(grid, x.device).values, table.coordinates, z,
        BASE=layout.base, DIGITS=layout.digits, BYTES=layout.word_bytes, WHOLE=aligned(words, layout), TILE=size,
    )  # fmt: skip
    rotate_back(z, table, scale, round, stream, x, accumulate)
