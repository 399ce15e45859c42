"""Lattices by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.lattice import loops
from gradwire.kernels.lattice.base import check_lattice
from gradwire.kernels.numba_core.compiled import Compiled, joined, segment_of
from gradwire.kernels.packing.divisions import float_divisions
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["CpuLattice"]

_WORD = 0xFFFFFFFF


class CpuLattice(Compiled):
    """See :class:`gradwire.kernels.lattice.base.LatticeKernels` for what each method computes."""

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
        layout = check_lattice(x, table, inverse, colours, round, stream, out[None], [shift])
        variant, values, words = self._variant("lattice"), x.detach().numpy(), out.numpy()
        factors = inverse.detach().numpy()
        checks: list[npt.NDArray[np.int32]] = []

        def work(begin: int, end: int) -> None:
            own = np.zeros(16, np.int32)
            checks.append(own)
            loops.lattice_encode_range(
                variant, values, table.offset, table.numel, table.start, table.key, table.first_group, factors,
                colours.bit_length() - 1, np.int32(shift), np.uint64(round), np.uint32(stream), begin, end,
                segment_of(table, begin), layout.digits, layout.word_bytes, words, own,
            )  # fmt: skip

        self._split(table.groups, layout.digits, GROUP_SIZE, work)
        return int(sum(part.sum(dtype=np.int64) for part in checks)) & _WORD

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
        layout = check_lattice(own, table, inverse, colours, round, stream, rows, shifts)
        check_lattice(x, table, scale, colours, round, stream, rows, shifts)
        number, (flat, stride) = len(rows), joined(rows)
        variant, values, target = self._variant("lattice"), own.detach().numpy(), x.detach().numpy()
        factors, scales = inverse.detach().numpy(), scale.detach().numpy()
        checks: list[npt.NDArray[np.int32]] = []
        low, power, reciprocals = float_divisions(layout)

        def work(begin: int, end: int) -> None:
            ours = np.zeros(16 * number, np.int32)
            checks.append(ours)
            loops.lattice_mean_range(
                variant, flat, stride, number, values, target, table.offset, table.numel, table.start, table.key,
                table.first_group, factors, scales, accumulate, colours.bit_length() - 1, np.array(shifts, np.int32),
                np.uint64(round), np.uint32(stream), begin, end, segment_of(table, begin), layout.digits,
                layout.word_bytes, low, power, reciprocals, ours,
            )  # fmt: skip

        self._split(table.groups, layout.digits, GROUP_SIZE * number, work)
        total = np.sum([part.reshape(number, 16).sum(1, dtype=np.int64) for part in checks], axis=0)
        return [int(one) & _WORD for one in total]
