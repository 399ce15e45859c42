"""Rotations of blocks and back, and rotated blocks in digits."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_draw, check_vector
from gradwire.kernels.levels.grid import Grid
from gradwire.kernels.levels.operations import check_base, packed_groups
from gradwire.kernels.packing.layout import DigitLayout
from gradwire.kernels.rotation.blocks import RotationTable
from gradwire.kernels.table import GROUP_SIZE

__all__ = ["RotationOperations"]


class RotationOperations(Front):
    """The family ``rotation``.

    A block x of b elements, zeros behind those that it lacks, has the coordinates ``H D x``: D changes signs at random
    and H is the Walsh-Hadamard matrix, H[j, k] = (-1)^(number of ones in the binary j and k). So R = H D / sqrt(b) is
    orthogonal, and D H / sqrt(b) its inverse.

    Sums are float32, in the order of the transform's textbook form: for h = 1, 2, 4, ... b / 2, and on the way back
    from b / 2 down, the values at j and j + h, j without the bit h, become their sum and their difference. The sign of
    the element that is number e in its parameter is bit ``e // 16 % 32`` of Philox's word ``e // 512 % 4``, from block
    ``16 (e // 2048) + e % 16``.
    """

    def rotate(
        self, x: torch.Tensor, table: RotationTable, factor: torch.Tensor, round: int, stream: int, z: torch.Tensor
    ) -> None:
        """Write the coordinates ``H D (factor x)`` of all blocks into ``z`` (float32).

        ``factor`` is float32 ``[blocks]``. Where it is 0, so are the coordinates, whatever the elements.
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
        """Write ``factor D H z`` of all blocks into ``x`` (float32), or add it; ``z`` is left spoilt.

        ``factor`` is float32 ``[blocks]``: 1 / b undoes :meth:`rotate`. Where it is not finite, it is written itself.
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

        ``factor`` is as for :meth:`rotate`, and ``out`` uint8 of the digits of whole groups of 80 coordinates.

        Returns:
            ``<z, Q(z)>`` of each block, float32 ``[blocks]``. Products are added in float32: lane j of sixteen takes
            the coordinates j, 16 + j, ... in order, then lanes 8, 4, 2 and 1 apart are added.

        Raises:
            HyperparameterError: ``grid`` rounds at random, or not by magnitude.
        """
        check_vector("x", x, torch.float32, table.extent, at_least=True)
        check_vector("factor", factor, torch.float32, table.blocks)
        check_vector("out", out, torch.uint8, packed_groups(_groups(table), layout))
        _check_grid(grid, layout)
        check_draw(round, stream)
        kept, family = torch.zeros(table.blocks, device=x.device), self._serve("rotation")
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

        ``scale`` is float32 ``[blocks]``. Where it is not finite, it is written itself. A digit that no encoder writes
        counts as the largest.
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
