"""Tables of segments, blocks and grids in the form that Triton kernels read, stored once on each device.

A kernel's tile consists of groups, or of blocks, of any segments. Each group has a row of its own with the place of its
first element, so that one launch processes all parameters of a bucket. A row takes 16 to 28 bytes, for 320 bytes of
elements.
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
"""Bound to which lengths are clamped; it exceeds all numbers that they are compared with."""


class Groups(NamedTuple):
    """The groups of a table, ``[G]`` each, and its segments' keys.

    Attributes:
        at: Index in the vector of a group's first element, int64.
        room: Number of elements of a group, int32.
        number: Number of a group within its parameter, int32.
        segment: Segment of a group, int32.
        key: The two words of each segment's key, int32 ``[S, 2]`` with the bits of uint32.
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
    """``values``, ``edge`` and ``gap`` of a grid, float32; the last two have at least one element."""

    values: torch.Tensor
    edge: torch.Tensor
    gap: torch.Tensor


class RotatedBlocks(NamedTuple):
    """The blocks of one size of a rotation table, ``[B]`` each.

    ``block`` (int32) is their number in the table; ``at`` and ``place`` (int64) are the indices of the first element
    and of the first coordinate; ``room`` (int32) is the number of elements, ``start`` (int64) the index of the first
    element in its parameter, and ``key`` the key, int32 ``[B, 2]``.
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
    """Return the object stored for a table and a device, or make and store it until the table is deleted."""
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
    """Return the segment, the number within it, and the number of elements of all pieces of ``size`` elements."""
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
    """Return the places of groups in blocks that share a scale, in rows of 16 elements.

    Returns:
        The row of each group's first element, counted from the beginning of its segment's first block, and the number
        of that block, int32 ``[G]`` each; and the number of rows of a block.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor, int]:
        segment, own, _ = _pieces(blocks.table, GROUP_SIZE)
        row = blocks.phase[segment] // LANES + own * PLANES
        length = min(blocks.block_size // LANES, 2**31 - 1)
        return _on(device, row, np.int32), _on(device, blocks.first[segment], np.int32), length

    found: tuple[torch.Tensor, torch.Tensor, int] = _keep(blocks, "rows", device, make)
    return found


def runs_of(runs: RunTable, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each group, the run of its first element, the run's remaining elements, and the length of runs.

    They are int32 ``[G]`` each. The last two are at most 2^30, more than the elements of a group.
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
        # At least one step, since kernels read the first even if there is none.
        edge, gap = (column if grid.steps else np.zeros(1) for column in (grid.edge, grid.gap))
        return Levels(*(_on(device, column, np.float32) for column in (grid.values, edge, gap)))

    found: Levels = _keep(grid, "levels", device, make)
    return found


def shared_values_of(grid: SharedRandomGrid, device: torch.device) -> torch.Tensor:
    """Return the values of digits, float32 ``[H * base]``, those of one integer side by side."""
    found: torch.Tensor = _keep(grid, "values", device, lambda: _on(device, grid.values.reshape(-1), np.float32))
    return found


@cache
def powers_of(layout: DigitLayout, device: torch.device) -> torch.Tensor:
    """Return ``base^p`` for each digit of a word: int32 ``[digits]`` with the bits of uint32."""
    powers = np.array([layout.base**p for p in range(layout.digits)], np.uint32)
    return torch.from_numpy(powers.view(np.int32)).to(device)
