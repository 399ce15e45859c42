"""Rotations of blocks, also into packed digits, and back: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_vector
from gradwire.kernels.levels.grid import UNIT, Grid
from gradwire.kernels.levels.operations import check_base, packed_groups
from gradwire.kernels.packing.layout import DigitLayout, pack_digits, unpack_digits
from gradwire.kernels.philox import philox
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.table import GROUP_SIZE, LANES


class RotationOperations(Front):
    """The operations of the family ``rotation``.

    A block x of b elements, filled up with zeros, has the coordinates ``H D x``. D changes signs at random, and H is
    the Walsh-Hadamard matrix: H[j, k] = (-1)^(number of ones in the bitwise and of j and k). So R = H D / sqrt(b) is
    orthogonal, and D H / sqrt(b) is its inverse.

    Sums are float32, in the usual order of the fast transform: for h = 1, 2, 4, ... b / 2, and in the inverse from
    b / 2 down, the values at j and j + h, j without the bit h, become their sum and their difference. The sign of
    element e of a parameter is bit ``e // 16 % 32`` of Philox's word ``e // 512 % 4``, from block
    ``16 (e // 2048) + e % 16``.
    """

    def rotate(
        self, x: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, z: torch.Tensor
    ) -> None:
        """Write the coordinates ``H D (factor x)`` of all blocks into ``z`` (float32).

        ``factor`` is float32 ``[blocks]``. Where it is 0, all coordinates are 0, even if elements are not finite.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("factor", factor, torch.float32, table.blocks)
        check_vector("z", z, torch.float32, table.coordinates)
        check_draw(round, stream)
        family = self._serve("rotation")
        if table.blocks:
            family.rotate(x.detach(), table, factor.detach(), round, stream, z)

    def rotate_back(
        self,
        z: torch.Tensor,
        table: RotationTable,
        factor: torch.Tensor,
        round: int,
        stream: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write ``factor D H z`` of all blocks into ``x`` (float32), or add it; ``z`` is overwritten.

        ``factor`` is float32 ``[blocks]``: 1 / b inverts :meth:`rotate`. Where it is not finite, the factor itself is
        written.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("factor", factor, torch.float32, table.blocks)
        check_vector("z", z, torch.float32, table.coordinates)
        check_draw(round, stream)
        family = self._serve("rotation")
        if table.blocks:
            family.rotate_back(z, table, factor.detach(), round, stream, x.detach(), accumulate)

    def encode_rotated(
        self,
        x: torch.Tensor,
        table: RotationTable,
        factor: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        round: int,
        stream: int,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate all blocks, round their coordinates z to the nearest level Q(z), and pack the digits into ``out``.

        ``factor`` is as for :meth:`rotate`. ``out`` (uint8) has room for the digits of whole groups of 80 coordinates.

        Returns:
            ``<z, Q(z)>`` of each block, float32 ``[blocks]``. Products are added in float32: lane j of sixteen adds
            those of the coordinates j, 16 + j, ... in order, then lanes 8, 4, 2 and 1 apart are added.

        Raises:
            HyperparameterError: ``grid`` rounds at random, or compares values with their sign.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("factor", factor, torch.float32, table.blocks)
        check_vector("out", out, torch.uint8, packed_groups(_groups(table), layout))
        _check_grid(grid, layout)
        check_draw(round, stream)
        kept, family = torch.zeros(table.blocks, device=x.device, dtype=torch.float32), self._serve("rotation")
        if table.blocks:
            family.encode_rotated(x.detach(), table, factor.detach(), grid, layout, round, stream, out, kept)
        return kept

    def decode_rotated(
        self,
        words: torch.Tensor,
        table: RotationTable,
        scale: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        round: int,
        stream: int,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        """Write ``scale D H Q`` of all blocks into ``x`` (float32), or add it; Q are the levels of packed digits.

        ``scale`` is float32 ``[blocks]``. Where it is not finite, the scale itself is written. A digit that no encoder
        writes counts as the largest.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("scale", scale, torch.float32, table.blocks)
        check_vector("words", words, torch.uint8, packed_groups(_groups(table), layout))
        _check_grid(grid, layout)
        check_draw(round, stream)
        family = self._serve("rotation")
        if table.blocks:
            family.decode_rotated(words, table, scale.detach(), grid, layout, round, stream, x.detach(), accumulate)


def _groups(table: RotationTable) -> int:
    return -(-table.coordinates // GROUP_SIZE)


def _check_grid(grid: Grid, layout: DigitLayout) -> None:
    check_base(grid, layout)
    if grid.signed or bool(grid.gap.any()):
        raise HyperparameterError(f"{grid!r} does not round to the nearest of levels that are the same below zero")


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
    z = torch.empty(table.coordinates, dtype=torch.float32, device="cpu")
    rotate(x, table, factor, round, stream, z)
    magnitude = z.abs()
    count = torch.zeros(z.shape, dtype=torch.int64, device="cpu")
    scaled = magnitude * torch.tensor(UNIT, dtype=torch.float32, device="cpu")
    for edge in torch.tensor(grid.edge, dtype=torch.float32, device="cpu"):
        count += scaled > edge
    digits = torch.where(torch.signbit(z), grid.negative - count, grid.positive + count)
    groups = -(-len(z) // GROUP_SIZE)
    whole = torch.full((GROUP_SIZE * groups,), layout.base // 2, dtype=torch.int64, device="cpu")
    whole[: len(z)] = digits
    pack_digits(whole, layout, out)
    products = magnitude * torch.from_numpy(grid.values.copy())[grid.positive + count]
    for _, blocks, place in _by_size(table):
        total = torch.zeros(len(blocks), LANES, dtype=torch.float32, device="cpu")
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
    """Return the blocks of each size: size, numbers of the blocks, and indices of their coordinates."""
    found = []
    for size in np.unique(table.sizes).tolist():
        blocks = torch.from_numpy(np.flatnonzero(table.sizes == size))
        place = torch.from_numpy(table.place[:-1].copy())[blocks, None] + torch.arange(size, device="cpu")
        found.append((size, blocks, place))
    return found


def _elements(table: RotationTable, size: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for blocks of one size, the index in the vector of each element, and a mask of existing elements."""
    offset, numel = (torch.from_numpy(c.copy())[blocks, None] for c in (table.columns.offset, table.columns.numel))
    within = torch.arange(size, device="cpu").expand(len(blocks), size)
    return offset + torch.minimum(within, numel - 1), within < numel


def _flip(
    values: torch.Tensor, table: RotationTable, size: int, blocks: torch.Tensor, round: int, stream: int
) -> torch.Tensor:  # fmt: skip
    """Change signs at random."""
    start = torch.from_numpy(table.columns.start.copy())[blocks, None]
    key = torch.from_numpy(table.columns.key.astype(np.int64))[blocks]
    element = start + torch.arange(size, device="cpu")
    low, high, last = (torch.tensor(word & 0xFFFFFFFF, device="cpu") for word in (round, round >> 32, stream))
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
