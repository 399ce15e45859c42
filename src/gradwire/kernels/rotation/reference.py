"""Rotations in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.packing.reference import pack_digits, unpack_digits
from gradwire.kernels.philox import philox
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.table import GROUP_SIZE, LANES

__all__ = ["decode_rotated", "encode_rotated", "rotate", "rotate_back"]


def rotate(
    x: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, z: torch.Tensor
) -> None:  # fmt: skip
    for size, blocks, place in _by_size(table):
        index, inside = _elements(table, size, blocks)
        used = inside & (factor[blocks, None] != 0)
        values = torch.where(used, x[index] * factor[blocks, None], 0.0)
        rotated = _transform(_flip(values, table, size, blocks, round, stream), ascending=True)
        z[place] = torch.where(factor[blocks, None] != 0, rotated, 0.0)


def rotate_back(
    z: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, x: torch.Tensor,
    accumulate: bool,
) -> None:  # fmt: skip
    for size, blocks, place in _by_size(table):
        index, inside = _elements(table, size, blocks)
        f = factor[blocks, None]
        values = _flip(_transform(z[place], ascending=False) * f, table, size, blocks, round, stream)
        values = torch.where(torch.isfinite(f), values, f)[inside]
        where = index[inside]
        x[where] = x[where] + values if accumulate else values
    z.fill_(torch.nan)


def encode_rotated(
    x: torch.Tensor, table: RotationTable, factor: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, out: torch.Tensor, kept: torch.Tensor,
) -> None:  # fmt: skip
    z = torch.empty(table.coordinates)
    rotate(x, table, factor, round, stream, z)
    magnitude = z.abs()
    count = torch.zeros(z.shape, dtype=torch.int64)
    for edge in grid.edge:
        count += magnitude * torch.tensor(UNIT, dtype=torch.float32) > torch.tensor(edge)
    digits = torch.where(torch.signbit(z), grid.negative - count, grid.positive + count)
    groups = -(-len(z) // GROUP_SIZE)
    whole = torch.full((GROUP_SIZE * groups,), layout.base // 2)
    whole[: len(z)] = digits
    pack_digits(whole, layout, out)
    products = magnitude * torch.from_numpy(grid.values.copy())[grid.positive + count]
    for _, blocks, place in _by_size(table):
        total = torch.zeros(len(blocks), LANES)
        for row in products[place].reshape(len(blocks), -1, LANES).unbind(1):
            total = total + row
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        kept[blocks] = total[:, 0]


def decode_rotated(
    words: torch.Tensor, table: RotationTable, scale: torch.Tensor, grid: Grid, layout: DigitLayout, round: int,
    stream: int, x: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    digits = unpack_digits(words, layout, -(-table.coordinates // GROUP_SIZE)).reshape(-1)[: table.coordinates]
    rotate_back(torch.from_numpy(grid.values.copy())[digits], table, scale, round, stream, x, accumulate)


def _by_size(table: RotationTable) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return the blocks of each size: the size, their numbers, and the indices of their coordinates."""
    found = []
    for size in np.unique(table.sizes).tolist():
        blocks = torch.from_numpy(np.flatnonzero(table.sizes == size))
        place = torch.from_numpy(table.place[:-1].copy())[blocks, None] + torch.arange(size)
        found.append((size, blocks, place))
    return found


def _elements(table: RotationTable, size: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index in the vector of each element of blocks of one size, and whether there is such an element."""
    offset, numel = (torch.from_numpy(c.copy())[blocks, None] for c in (table.columns.offset, table.columns.numel))
    within = torch.arange(size).expand(len(blocks), size)
    return offset + torch.minimum(within, numel - 1), within < numel


def _flip(
    values: torch.Tensor, table: RotationTable, size: int, blocks: torch.Tensor, round: int, stream: int
) -> torch.Tensor:  # fmt: skip
    """Change signs at random."""
    start = torch.from_numpy(table.columns.start.copy())[blocks, None]
    key = torch.from_numpy(table.columns.key.astype(np.int64))[blocks]
    element = start + torch.arange(size)
    low, high, last = (torch.tensor(word & 0xFFFFFFFF) for word in (round, round >> 32, stream))
    block = (16 * (element // 2048) + element % 16) & 0xFFFFFFFF
    words = torch.stack(philox((block, low, high, last), (key[:, :1], key[:, 1:])))
    word = words.gather(0, (element // 512 % 4)[None])[0]
    return torch.where(word >> (element // 16 % 32) & 1 == 1, -values, values)


def _transform(values: torch.Tensor, ascending: bool) -> torch.Tensor:
    """Multiply rows by the Walsh-Hadamard matrix, step by step."""
    rows, size = values.shape
    steps = [1 << k for k in range(size.bit_length() - 1)]
    for h in steps if ascending else steps[::-1]:
        pairs = values.reshape(rows, -1, 2, h)
        values = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
    return values.reshape(rows, size)
