"""What every backend offers for lattices, and the checks that all of them make before memory is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.levels.base import packed_groups
from gradwire.kernels.packing.layout import DigitLayout, digit_layout
from gradwire.kernels.table import SegmentTable

__all__ = ["FAR", "LatticeKernels", "check_lattice", "dither_shifts"]

FAR = float(1 << 23)
"""Points are numbered below this, so that float32 holds the numbers and their neighbours."""


class LatticeKernels(Protocol):
    r"""Points s (k + theta) with integer k of a cubic lattice of side s, an offset theta an element.

    With ``u`` an element's 24-bit uniform integer and ``shift`` the sender's::

        theta = ((u + shift) mod 2^24) / 2^24 - 1/2       (exact in float32)
        t = fl(fl(x * inverse) - theta)                   0 where |t| is not below 2^23
        k = round(t), to even;   colour = k mod q;   turn = (k - colour) / q
        check = sum over elements of turn * (2 u + 1)     modulo 2^32
    """

    def lattice_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shift: int,
        out: torch.Tensor,
    ) -> int:
        """Pack the colours of all groups of ``x`` (float32) into ``out`` (uint8), base q; return the check.

        ``inverse`` (float32 ``[S]``) is 1 / s, or 0 for a segment of which nothing is to be said.
        """
        ...

    def lattice_mean(
        self,
        rows: torch.Tensor,
        table: SegmentTable,
        inverse: torch.Tensor,
        scale: torch.Tensor,
        colours: int,
        round: int,
        stream: int,
        shifts: Sequence[int],
        own: torch.Tensor,
        x: torch.Tensor,
        accumulate: bool = False,
    ) -> list[int]:
        """Write the sum over rows, in their order, of ``fl(k + theta) * scale`` into ``x``, or add it.

        ``k`` is the number of the row's colour next to the element of ``own``, which may be ``x`` itself::

            turn = round((t - colour) / q),   k = colour + q * turn

        A colour that no encoder writes counts as the largest.
        ``rows`` are uint8 ``[N, bytes]``, any distance apart; ``shifts`` those of their senders. A scale that is not
        finite is written itself. Returns each row's check, of the turns as found here.
        """
        ...


def dither_shifts(world_size: int) -> list[int]:
    """Give each rank's shift: offsets evenly apart, so that the errors of equal vectors cancel in the mean."""
    return [(rank << 24) // world_size for rank in range(world_size)]


def check_lattice(
    x: torch.Tensor,
    table: SegmentTable,
    inverse: torch.Tensor,
    colours: int,
    round: int,
    stream: int,
    rows: torch.Tensor,
    shifts: Sequence[int],
) -> DigitLayout:
    """Check the arguments of either method, an output being a single row; return the layout of colours."""
    if x.dtype != torch.float32 or x.ndim != 1 or not x.is_contiguous() or x.numel() < table.extent:
        raise HyperparameterError(
            f"x is {x.dtype} of shape {tuple(x.shape)}: a contiguous vector of float32 with at least {table.extent} "
            "elements is needed"
        )
    if inverse.dtype != torch.float32 or inverse.shape != (len(table),) or not inverse.is_contiguous():
        raise HyperparameterError(f"{len(table)} segments need as many float32 scales, not {tuple(inverse.shape)}")
    if not 4 <= colours <= 1 << 15 or colours & (colours - 1):
        raise HyperparameterError(f"colours={colours}: a power of two from 4 to {1 << 15} is needed")
    layout = digit_layout(colours)
    size = packed_groups(table.groups, layout)
    fits = rows.dtype == torch.uint8 and rows.shape == (len(shifts), size) and rows.stride(0) >= 0
    if not fits or (size > 1 and rows.stride(1) != 1):
        raise HyperparameterError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)}: {len(shifts)} uint8 rows of {size} neighbouring bytes "
            "are needed"
        )
    if not (0 <= round < 2**64 and 0 <= stream < 2**32 and all(0 <= s < 1 << 24 for s in shifts)):
        raise HyperparameterError(f"round {round}, stream {stream} or a shift is outside its 64, 32 or 24 bits")
    return layout
