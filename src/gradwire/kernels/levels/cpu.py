"""Levels by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.digits import DigitLayout
from gradwire.kernels.divisions import divisions
from gradwire.kernels.levels import drivers
from gradwire.kernels.levels.base import BlockTable, check_dequantise, check_quantise
from gradwire.kernels.levels.grid import Grid

__all__ = ["CpuLevels"]


class CpuLevels:
    """See :class:`gradwire.kernels.levels.base.LevelKernels` for what each method computes."""

    _variant: bool | None

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
            self._variant, x.detach().numpy(), t.offset, t.numel, t.start, t.key, t.first_group, blocks.first,
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
    ) -> None:
        check_dequantise(x, blocks, scale, grid, layout, words)
        t = blocks.table
        if not t.groups:
            return
        reciprocal, _ = divisions(layout)
        drivers.dequantise_range(
            self._variant, words.numpy(), layout.base, layout.digits, layout.word_bytes, reciprocal, t.offset, t.numel,
            t.first_group, blocks.first, blocks.phase, blocks.block_size, scale.detach().numpy(), grid.values,
            grid.uniform, 0, t.groups, 0, x.detach().numpy(), accumulate,
        )  # fmt: skip
