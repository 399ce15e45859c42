"""The codec of frequencies that are kept at random and made larger, so that the mean is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw, Summary
from gradwire.exchange.deferred_checks import Flag, all_hold
from gradwire.exchange.segments import Segment
from gradwire.kernels import FourierTable, SegmentTable, block_sizes
from gradwire.methods.atoms.atom_codec import AtomCodec
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.sparse.sparse_values import CastValues
from gradwire.methods.sparse.units import UnitTable
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["FourierAtomCodec"]


class FourierAtomCodec(AtomCodec):
    """Pairs of conjugate frequencies of blocks, and single real ones, kept with the best probabilities for a budget.

    A parameter's units are the real coefficients of all its blocks, then the pairs, two numbers each (see
    :class:`gradwire.kernels.FourierTable`). The mean is taken of coefficients, and transformed back once.

    Args:
        density: Share of the atoms kept on average.
        block_size: Elements of a block.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        density: float,
        block_size: int,
    ) -> None:
        self.waves = FourierTable([s.offset for s in segments], [s.numel for s in segments], block_size)
        places = list(zip(segments, self.waves.place.tolist(), self.waves.reals.tolist()))
        halves = [(Segment(s.parameter, at, 0, n), Segment(s.parameter, at + n, 0, s.numel - n)) for s, at, n in places]
        units = UnitTable([half for both in halves for half in both], [1, 2] * len(halves))
        drawn = SegmentTable(
            offset=units.first[:-1:2],
            numel=units.first[2::2] - units.first[:-1:2],
            start=[0] * len(segments),
            key=[parameter_key(seed, s.parameter.name, "atoms") for s in segments],
        )
        super().__init__(kernels, units, world_size, drawn=drawn, density=density, values=CastValues(torch.float32))
        self._elements = sign_table(segments)
        self._weights = torch.cat([_weights(s.numel, block_size) for s in segments] or [torch.empty(0)])

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        z = torch.empty(self.waves.coordinates)
        self.kernels.fourier(flat, self.waves, z)
        super().encode(z, summary, draw, out)

    def sizes(self, flat: torch.Tensor) -> torch.Tensor:
        found = []
        for real, pairs in zip(self.table.segments[::2], self.table.segments[1::2]):
            p, q = flat[pairs.offset : pairs.offset + pairs.numel].double().view(-1, 2).unbind(1)
            found += [flat[real.offset : real.offset + real.numel].abs(), (p * p + q * q).sqrt().float()]
        return torch.cat(found or [flat]) * self._weights

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        z = torch.empty(self.waves.coordinates)
        super().decode_rows(rows, summary, z)
        self.kernels.inverse_fourier(z, self.waves, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        z = torch.zeros(self.waves.coordinates)
        super().add_own(data, summary, weight, z)
        self.kernels.inverse_fourier(z, self.waves, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # Sums of finite coefficients may be beyond float32.
        return all_hold(self.kernels.finite(flat, self._elements))


def _weights(numel: int, block_size: int) -> torch.Tensor:
    """Return what makes magnitudes of coefficients those of unitary transforms, over ``sqrt(2 block_size)``.

    With that the size of an atom is not beyond the largest element.
    """
    sizes = np.array(block_sizes(numel, block_size), np.int64)
    share = np.sqrt(sizes / block_size)
    real = np.repeat(share / np.sqrt(2), np.minimum(sizes, 2))
    return torch.from_numpy(np.concatenate([real, np.repeat(share, np.maximum(sizes // 2 - 1, 0))])).float()
