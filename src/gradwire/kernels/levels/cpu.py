"""Levels by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import math

import numpy as np
import torch

from gradwire.kernels.cpu_shared import Compiled
from gradwire.kernels.digits import DigitLayout
from gradwire.kernels.divisions import divisions
from gradwire.kernels.levels import drivers
from gradwire.kernels.levels.base import BlockTable, check_dequantise, check_quantise, check_sum_digits
from gradwire.kernels.levels.grid import Grid

__all__ = ["CpuLevels"]


class CpuLevels(Compiled):
    """See :class:`gradwire.kernels.levels.base.LevelKernels` for what each method computes."""

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
        check_quantise(x, blocks, inverse, grid, layout, out, (round, stream))
        t = blocks.table
        if not t.groups:
            return
        drivers.quantise_range(
            self._variant("levels"), x.detach().numpy(), t.offset, t.numel, t.start, t.key, t.first_group, blocks.first,
            blocks.phase, blocks.block_size, inverse.detach().numpy(), grid.edge, grid.gap, grid.steps, grid.positive,
            grid.negative, grid.signed, grid.uniform, np.uint64(round), np.uint32(stream), 0, t.groups, 0, layout.base,
            layout.digits, layout.word_bytes, out.numpy(),
        )  # fmt: skip

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
        end = check_dequantise(x, blocks, scale, grid, layout, words, groups=(begin, end))
        t = blocks.table
        if begin == end:
            return
        segment = int(np.searchsorted(t.first_group, begin, side="right")) - 1
        reciprocal, _ = divisions(layout)
        drivers.dequantise_range(
            self._variant("levels"),
            words.numpy(), layout.base, layout.digits, layout.word_bytes, reciprocal, t.offset, t.numel,
            t.first_group, blocks.first, blocks.phase, blocks.block_size, scale.detach().numpy(), grid.values,
            grid.uniform, begin, end, segment, x.detach().numpy(), accumulate,
        )  # fmt: skip

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        down = check_sum_digits(rows, groups, layout, out)
        number, size = rows.shape
        if not groups:
            return
        stride = rows.stride(0) if number > 1 else size
        flat = rows.as_strided(((number - 1) * stride + size,), (1,)).numpy()
        reciprocal, _ = divisions(layout)
        drivers.sum_digits_range(
            self._variant("levels"),
            flat, stride, number, groups, layout.base, layout.digits, layout.word_bytes, reciprocal,
            down.base, down.digits, down.word_bytes, math.lcm(layout.digits, down.digits), out.numpy(),
        )  # fmt: skip
