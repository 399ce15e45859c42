"""What every backend offers for levels, and the checks that all of them make before memory is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.levels.grid import Grid
from gradwire.kernels.packing.layout import DigitLayout, digit_layout
from gradwire.kernels.table import GROUP_SIZE, LANES, SegmentTable

__all__ = [
    "WHOLE",
    "BlockTable",
    "LevelKernels",
    "check_dequantise",
    "check_quantise",
    "check_sum_digits",
    "packed_groups",
    "summed",
]

WHOLE = 1 << 40
"""The block size that makes one block of every parameter."""


class BlockTable:
    """Segments, and the blocks of ``block_size`` elements, anchored to the parameter, that share a scale.

    Args:
        table: The segments.
        block_size: A multiple of 16, so that 16 neighbours share a block.

    Attributes:
        first: Number of blocks that begin in, or reach into, the segments before each one, int64 ``[S + 1]``.
        blocks: Their number; a block cut by the end of a segment counts in each.
    """

    __slots__ = ("block_size", "blocks", "first", "phase", "table")

    def __init__(self, table: SegmentTable, block_size: int) -> None:
        if block_size < 1 or block_size % LANES:
            raise HyperparameterError(f"block_size {block_size}: a multiple of {LANES} is needed")
        self.table, self.block_size = table, block_size
        self.phase = table.start % block_size
        counts = np.where(table.numel > 0, -(-(self.phase + table.numel) // block_size), 0)
        self.first = np.zeros(len(table) + 1, np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.blocks = int(self.first[-1])

    def runs(self) -> SegmentTable:
        """Give the elements of each block, a segment each."""
        segment = np.repeat(np.arange(len(self.table)), np.diff(self.first))
        within = (np.arange(self.blocks) - self.first[segment]) * self.block_size - self.phase[segment]
        begin = np.maximum(within, 0)
        end = np.minimum(within + self.block_size, self.table.numel[segment])
        nothing = np.zeros(self.blocks, np.int64)
        return SegmentTable(self.table.offset[segment] + begin, end - begin, nothing, np.zeros((self.blocks, 2)))


class LevelKernels(Protocol):
    """Stochastic rounding of blocks to the levels of a grid, and back."""

    def quantise(
        self,
        x: torch.Tensor,
        blocks: BlockTable,
        inverse: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        round: int,
        stream: int,
        out: torch.Tensor,
    ) -> None:
        """Round all groups of ``x`` (float32) to digits of ``grid`` and pack them into ``out`` (uint8).

        ``inverse`` (float32 ``[blocks]``) is 2^24 over each block's scale, see
        :func:`gradwire.kernels.inverse_scale`. ``out`` has ``layout.packed_bytes(80 * groups)`` bytes. Elements past a
        segment's end are encoded as zeros.
        """
        ...

    def dequantise(
        self,
        words: torch.Tensor,
        blocks: BlockTable,
        scale: torch.Tensor,
        grid: Grid,
        layout: DigitLayout,
        x: torch.Tensor,
        accumulate: bool = False,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Write ``grid.values[digit] * scale`` (float32 ``[blocks]``) into ``x``, or add it.

        ``words`` hold the groups ``begin .. end``, all by default. A scale that is not finite is written itself. A
        digit that no encoder writes counts as the largest.
        """
        ...

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        """Add ``N`` rows of packed digits, uint8 ``[N, packed_groups(groups, layout)]``, digit by digit.

        The sums are packed into ``out`` (uint8) in the layout of :func:`summed`. Rows may be any distance apart. A
        digit that no encoder writes counts as the largest.
        """
        ...


def packed_groups(groups: int, layout: DigitLayout) -> int:
    """Bytes of the digits of whole groups."""
    return layout.packed_bytes(GROUP_SIZE * groups)


def summed(layout: DigitLayout, rows: int) -> DigitLayout:
    """Give the layout of sums of that many digits of ``layout``: base ``rows * (base - 1) + 1``."""
    return digit_layout(rows * (layout.base - 1) + 1)


def check_sum_digits(rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> DigitLayout:
    """Check the arguments of :meth:`LevelKernels.sum_digits`; return the layout of the sums."""
    size = packed_groups(groups, layout)
    fits = rows.dtype == torch.uint8 and rows.ndim == 2 and rows.shape[1] == size and rows.stride(0) >= 0
    if not fits or (size > 1 and rows.stride(1) != 1):
        raise HyperparameterError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)} and stride {rows.stride()}: uint8 rows of {size} "
            "neighbouring bytes are needed"
        )
    down = summed(layout, rows.shape[0])
    wanted = packed_groups(groups, down)
    if out.dtype != torch.uint8 or out.shape != (wanted,) or not out.is_contiguous():
        raise HyperparameterError(
            f"out is {out.dtype} of shape {tuple(out.shape)}: a contiguous vector of uint8 with {wanted} elements is "
            "needed"
        )
    return down


def check_quantise(
    x: torch.Tensor,
    blocks: BlockTable,
    inverse: torch.Tensor,
    grid: Grid,
    layout: DigitLayout,
    words: torch.Tensor,
    numbers: Sequence[int] = (0, 0),
    groups: tuple[int, int | None] = (0, None),
) -> int:
    """Check the arguments of either method; return the end of the groups."""
    begin, end = groups[0], blocks.table.groups if groups[1] is None else groups[1]
    if not 0 <= begin <= end <= blocks.table.groups:
        raise HyperparameterError(f"groups {begin}..{end} are outside 0..{blocks.table.groups}")
    wanted = (
        ("x", x, torch.float32, blocks.table.extent, True),
        ("scale", inverse, torch.float32, blocks.blocks, False),
        ("words", words, torch.uint8, packed_groups(end - begin, layout), False),
    )
    for name, tensor, dtype, numel, more in wanted:
        fits = tensor.numel() >= numel if more else tensor.numel() == numel
        if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous() or not fits:
            raise HyperparameterError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: a contiguous vector of {dtype} with {numel} "
                "elements is needed"
            )
    if layout.base != grid.base:
        raise HyperparameterError(f"digits of base {layout.base} cannot hold the {grid.base} levels of {grid!r}")
    if not (0 <= numbers[0] < 2**64 and 0 <= numbers[1] < 2**32):
        raise HyperparameterError(f"round {numbers[0]} or stream {numbers[1]} is outside its 64 or 32 bits")
    return end


check_dequantise = check_quantise
