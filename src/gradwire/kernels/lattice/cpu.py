"""Lattices by Numba, in the two variants of :mod:`gradwire.kernels.cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire.kernels.cpu_shared import Compiled
from gradwire.kernels.divisions import float_divisions
from gradwire.kernels.lattice import drivers
from gradwire.kernels.lattice.base import check_lattice
from gradwire.kernels.table import SegmentTable

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
        checks = np.zeros(16, np.int32)
        drivers.lattice_encode_all(
            self._variant("lattice"),
            x.detach().numpy(), table.offset, table.numel, table.start, table.key, table.first_group,
            inverse.detach().numpy(), colours.bit_length() - 1, np.int32(shift), np.uint64(round), np.uint32(stream),
            layout.digits, layout.word_bytes, out.numpy(), checks,
        )  # fmt: skip
        return int(checks.sum(dtype=np.int64)) & _WORD

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
        if not table.groups:
            return [0] * len(shifts)
        number, size = rows.shape
        stride = rows.stride(0) if number > 1 else size
        flat = rows.as_strided(((number - 1) * stride + size,), (1,)).numpy()
        checks = np.zeros((number, 16), np.int32)
        low, power, reciprocals = float_divisions(layout)
        drivers.lattice_mean_all(
            self._variant("lattice"),
            flat, stride, number, own.detach().numpy(), x.detach().numpy(), table.offset, table.numel,
            table.start, table.key, table.first_group, inverse.detach().numpy(), scale.detach().numpy(), accumulate,
            colours.bit_length() - 1, np.array(shifts, np.int32), np.uint64(round), np.uint32(stream), layout.digits,
            layout.word_bytes, low, power, reciprocals, checks.reshape(-1),
        )  # fmt: skip
        return [int(lanes.sum(dtype=np.int64)) & _WORD for lanes in checks]
