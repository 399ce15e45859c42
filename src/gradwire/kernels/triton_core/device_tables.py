"""Tables of segments, blocks and grids as kernels read them: built once, and kept on each device.

A kernel's tile is made of groups, or of blocks, whichever segments they belong to: each has a row of its own with the
place of its first element, so that one launch serves all parameters of a bucket. Rows of groups take 16 to 28 bytes,
for 320 bytes of elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.levels.grid import BlockTable, Grid
from gradwire.kernels.levels.shared_random import SharedRandomGrid
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.signs.operations import RunTable
from gradwire.kernels.table import BLOCK_SIZE, GROUP_SIZE, LANES, PLANES, SegmentTable

_MOST = 1 << 30
"""Lengths are clamped to this: none matters that is longer than what they are compared with."""


class Groups(NamedTuple):
    """The groups of a table, ``[G]`` each, and its segments' keys.

    Attributes:
        at: Index in the vector of a group's first element, int64.
        room: How many elements it has, int32.
        number: Its number within its parameter, int32.
        segment: int32.
        key: The two words of each segment, int32 ``[S, 2]`` with the bits of uint32.
    """

    at: torch.Tensor
    room: torch.Tensor
    number: torch.Tensor
    segment: torch.Tensor
    key: torch.Tensor


class Blocks(NamedTuple):
    """Blocks of 4096 elements of segments, ``[B]`` each: ``at`` int64, ``room`` and ``segment`` int32.

    ``first`` (int32 ``[S + 1]``) is the number of blocks before each segment.
    """

    at: torch.Tensor
    room: torch.Tensor
    segment: torch.Tensor
    first: torch.Tensor


class Levels(NamedTuple):
    """``values``, ``edge`` and ``gap`` of a grid, float32; the last two have one element at least."""

    values: torch.Tensor
    edge: torch.Tensor
    gap: torch.Tensor


class RotatedBlocks(NamedTuple):
    """The blocks of one size of a rotation table, ``[B]`` each.

    ``block`` (int32) is their number in the table, ``at`` and ``place`` (int64) the index of the first element and of
    the first coordinate, ``room`` (int32) the number of elements, ``start`` (int64) the number of the first element in
    its parameter, ``key`` int32 ``[B, 2]``.
    """

    size: int
    block: torch.Tensor
    at: torch.Tensor
    place: torch.Tensor
    room: torch.Tensor
    start: torch.Tensor
    key: torch.Tensor


_kept: dict[tuple[int, str, str], Any] = {}


def _keep(owner: object, kind: str, device: torch.device, make: Callable[[], Any]) -> Any:
    """Return what was made for a table and a device before, or make it; it goes when the table goes."""
    key = (id(owner), kind, str(device))
    if key not in _kept:
        _kept[key] = make()
        weakref.finalize(owner, _kept.pop, key, None)
    return _kept[key]


def _on(device: torch.device, column: npt.NDArray[Any], dtype: Any) -> torch.Tensor:
    """Copy a column to a device."""
    return torch.from_numpy(np.array(column, dtype)).to(device)


def _words(key: npt.NDArray[np.uint32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(key).view(np.int32).copy()).to(device)


def _pieces(table: SegmentTable, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return segment, number within the segment, and elements, of all pieces of that size."""
    counts = -(-table.numel // size)
    segment = np.repeat(np.arange(len(table)), counts)
    own = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    return segment, own, np.minimum(table.numel[segment] - own * size, size)


def groups_of(table: SegmentTable, device: torch.device) -> Groups:
    """Return the groups of a table on a device."""

    def make() -> Groups:
        segment, own, room = _pieces(table, GROUP_SIZE)
        return Groups(
            _on(device, table.offset[segment] + own * GROUP_SIZE, np.int64),
            _on(device, room, np.int32),
            _on(device, table.start[segment] // GROUP_SIZE + own, np.int32),
            _on(device, segment, np.int32),
            _words(table.key, device),
        )

    found: Groups = _keep(table, "groups", device, make)
    return found


def blocks_of(table: SegmentTable, device: torch.device) -> Blocks:
    """Return the blocks of 4096 elements of a table on a device."""

    def make() -> Blocks:
        segment, own, room = _pieces(table, BLOCK_SIZE)
        first = np.concatenate([[0], np.cumsum(-(-table.numel // BLOCK_SIZE))])
        return Blocks(
            _on(device, table.offset[segment] + own * BLOCK_SIZE, np.int64),
            _on(device, room, np.int32),
            _on(device, segment, np.int32),
            _on(device, first, np.int32),
        )

    found: Blocks = _keep(table, "blocks", device, make)
    return found


def numel_of(table: SegmentTable, device: torch.device) -> torch.Tensor:
    """Return the number of elements of each segment, int64 ``[S]``."""
    found: torch.Tensor = _keep(table, "numel", device, lambda: _on(device, table.numel, np.int64))
    return found


def rows_of(blocks: BlockTable, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return where groups lie in blocks that share a scale, in rows of 16 elements.

    Returns:
        int32 ``[G]`` each: the row of a group's first element, counted from the beginning of its segment's first block;
        and the number of that block; and the rows of a block.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor, int]:
        segment, own, _ = _pieces(blocks.table, GROUP_SIZE)
        row = blocks.phase[segment] // LANES + own * PLANES
        length = min(blocks.block_size // LANES, 2**31 - 1)
        return _on(device, row, np.int32), _on(device, blocks.first[segment], np.int32), length

    found: tuple[torch.Tensor, torch.Tensor, int] = _keep(blocks, "rows", device, make)
    return found


def runs_of(runs: RunTable, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, of each group, the run of its first element, how many elements of that are left, and how long runs are.

    int32 ``[G]`` each; the last two at most 2^30, which is more than a group has.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        segment, own, _ = _pieces(runs.table, GROUP_SIZE)
        length = runs.length[segment]
        before = runs.phase[segment] + own * GROUP_SIZE
        return (
            _on(device, runs.first[segment] + before // length, np.int32),
            _on(device, np.minimum(length - before % length, _MOST), np.int32),
            _on(device, np.minimum(length, _MOST), np.int32),
        )

    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _keep(runs, "runs", device, make)
    return found


def rotated_blocks_of(table: RotationTable, device: torch.device) -> list[RotatedBlocks]:
    """Return the blocks of a rotation table on a device, by size."""

    def of_size(size: int) -> RotatedBlocks:
        block, columns = np.flatnonzero(table.sizes == size), table.columns
        return RotatedBlocks(
            size,
            _on(device, block, np.int32),
            _on(device, columns.offset[block], np.int64),
            _on(device, table.place[:-1][block], np.int64),
            _on(device, columns.numel[block], np.int32),
            _on(device, columns.start[block], np.int64),
            _words(columns.key[block], device),
        )

    found: list[RotatedBlocks] = _keep(
        table, "blocks", device, lambda: [of_size(size) for size in np.unique(table.sizes).tolist()]
    )
    return found


def levels_of(grid: Grid, device: torch.device) -> Levels:
    """Return the columns of a grid on a device."""

    def make() -> Levels:
        # At least one step, since kernels read the first even where there is none.
        edge, gap = (column if grid.steps else np.zeros(1) for column in (grid.edge, grid.gap))
        return Levels(*(_on(device, column, np.float32) for column in (grid.values, edge, gap)))

    found: Levels = _keep(grid, "levels", device, make)
    return found


def shared_values_of(grid: SharedRandomGrid, device: torch.device) -> torch.Tensor:
    """Return what digits stand for, float32 ``[H * base]``, the integer's values side by side."""
    found: torch.Tensor = _keep(grid, "values", device, lambda: _on(device, grid.values.reshape(-1), np.float32))
    return found


@cache
def powers_of(layout: DigitLayout, device: torch.device) -> torch.Tensor:
    """Return ``base^p`` for each digit of a word: int32 ``[digits]`` with the bits of uint32."""
    powers = np.array([layout.base**p for p in range(layout.digits)], np.uint32)
    return torch.from_numpy(powers.view(np.int32)).to(device)
