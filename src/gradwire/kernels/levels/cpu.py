"""Levels by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

import math

import numpy as np
import torch

from gradwire.kernels.levels import loops
from gradwire.kernels.levels.base import BlockTable, check_dequantise, check_quantise, check_sum_digits
from gradwire.kernels.levels.grid import Grid
from gradwire.kernels.numba_core.compiled import Compiled, joined, segment_of
from gradwire.kernels.packing.divisions import float_divisions
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.table import GROUP_SIZE

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
        t, variant = blocks.table, self._variant("levels")
        values, factors, words = x.detach().numpy(), inverse.detach().numpy(), out.numpy()

        def work(begin: int, end: int) -> None:
            loops.quantise_range(
                variant, values, t.offset, t.numel, t.start, t.key, t.first_group, blocks.first, blocks.phase,
                blocks.block_size, factors, grid.edge, grid.gap, grid.steps, grid.positive, grid.negative, grid.signed,
                grid.uniform, np.uint64(round), np.uint32(stream), begin, end, begin, segment_of(t, begin),
                layout.base, layout.digits, layout.word_bytes, words,
            )  # fmt: skip

        self._split(t.groups, layout.digits, GROUP_SIZE, work)

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
        t, variant = blocks.table, self._variant("levels")
        low, power, reciprocals = float_divisions(layout)
        packed, factors, target = words.numpy(), scale.detach().numpy(), x.detach().numpy()

        def work(first: int, last: int) -> None:
            loops.dequantise_range(
                variant, packed, layout.base, layout.digits, layout.word_bytes, low, power, reciprocals, t.offset,
                t.numel, t.first_group, blocks.first, blocks.phase, blocks.block_size, factors, grid.values,
                grid.uniform, begin + first, begin + last, first, segment_of(t, begin + first), target, accumulate,
            )  # fmt: skip

        self._split(end - begin, layout.digits, GROUP_SIZE, work)

    def sum_digits(self, rows: torch.Tensor, groups: int, layout: DigitLayout, out: torch.Tensor) -> None:
        down = check_sum_digits(rows, groups, layout, out)
        number, (flat, stride), words = len(rows), joined(rows), out.numpy()
        low, power, reciprocals = float_divisions(layout)
        variant, both = self._variant("levels"), math.lcm(layout.digits, down.digits)

        def work(begin: int, end: int) -> None:
            loops.sum_digits_range(
                variant, flat, stride, number, begin, end, layout.base, layout.digits, layout.word_bytes, low, power,
                reciprocals, down.base, down.digits, down.word_bytes, both, words,
            )  # fmt: skip

        self._split(groups, both, GROUP_SIZE * number, work)
