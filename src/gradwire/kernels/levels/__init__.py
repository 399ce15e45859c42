"""Stochastic rounding of blocks to any levels, packed."""

from gradwire.kernels.levels.base import WHOLE, BlockTable, LevelKernels, packed_groups, summed
from gradwire.kernels.levels.grid import Grid

__all__ = ["WHOLE", "BlockTable", "Grid", "LevelKernels", "packed_groups", "summed"]
