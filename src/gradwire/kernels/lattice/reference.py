"""Lattices in plain PyTorch: what every other backend must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.kernels.group_index import Places
from gradwire.kernels.lattice.base import FAR, check_lattice
from gradwire.kernels.packing.reference import pack_words, unpack_words
from gradwire.kernels.philox import uniform_integers
from gradwire.kernels.table import GROUP_SIZE, SegmentTable

__all__ = ["ReferenceLattice"]

_WORD = 0xFFFFFFFF


class ReferenceLattice:
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
        if not table.groups:
            return 0
        where = Places(table)
        uniform = uniform_integers(where.group, where.key, round, stream).reshape(-1, GROUP_SIZE)
        t, _ = _scaled(x, where, inverse, uniform, shift)
        k = t.round().to(torch.int64)
        colour = k % colours
        pack_words(colour.reshape(-1), layout, out)
        return _check((k - colour) // colours, uniform)

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
        where = Places(table)
        uniform = uniform_integers(where.group, where.key, round, stream).reshape(-1, GROUP_SIZE)
        factor, total, checks = scale.detach()[where.segment, None], torch.zeros(()), []
        usable = torch.isfinite(factor)
        for number, (row, shift) in enumerate(zip(rows, shifts)):
            t, theta = _scaled(own, where, inverse, uniform, shift)
            colour = unpack_words(row, layout)[: uniform.numel()].reshape(-1, GROUP_SIZE).clamp(max=colours - 1)
            turn = ((t - colour.to(torch.float32)) * (1.0 / colours)).round().to(torch.int64)
            checks.append(_check(torch.where(usable, turn, 0), uniform))
            value = ((colour + colours * turn).to(torch.float32) + theta) * factor
            total = value if number == 0 else total + value
        found = torch.where(usable, total, factor)[where.inside]
        target, index = x.detach(), where.index[where.inside]
        target[index] = target[index] + found if accumulate else found
        return checks


def _scaled(
    x: torch.Tensor, where: Places, inverse: torch.Tensor, uniform: torch.Tensor, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give t and theta of every element."""
    values = torch.where(where.inside, x.detach()[where.index], 0.0)
    theta = ((uniform + shift) % (1 << 24)).to(torch.float32) * 2.0**-24 - 0.5
    t = values * inverse.detach()[where.segment, None] - theta
    return torch.where(t.abs() < FAR, t, 0.0), theta


def _check(turn: torch.Tensor, uniform: torch.Tensor) -> int:
    # Terms are below 2^23 * 2^25, so that 2^15 of them could be added; reduced one by one there is no limit.
    return int((turn * (2 * uniform + 1) & _WORD).sum()) & _WORD
