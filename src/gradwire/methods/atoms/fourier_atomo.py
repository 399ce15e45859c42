"""Fourier ATOMO: frequencies of blocks, kept at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw, Summary
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.deferred_checks import Flag, all_hold
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import FourierTable, SegmentTable, block_sizes
from gradwire.methods.atoms.atom_codec import AtomCodec
from gradwire.methods.rotations.eden import check_rotation
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.sparse.sparse_values import CastValues, UnitTable
from gradwire.methods.sparse.top_k import check_density
from gradwire.methods.wrappers.wrapper import pieces
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


class FourierAtomCodec(AtomCodec):
    """Codec of conjugate pairs and real frequencies of blocks, kept with the best probabilities for a budget.

    A parameter's units are the real coefficients of all its blocks, then the pairs, two numbers each (see
    :class:`gradwire.kernels.FourierTable`). The mean of coefficients is computed, and transformed back once.

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
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._weights = torch.cat([_weights(s.numel, block_size) for s in segments] or [nothing])

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        z = torch.empty(self.waves.coordinates, dtype=torch.float32, device="cpu")
        self.kernels.fourier(flat, self.waves, z)
        super().encode(z, summary, draw, out)

    def sizes(self, flat: torch.Tensor) -> torch.Tensor:
        found, at = torch.empty(len(self._weights), dtype=torch.float32, device="cpu"), 0
        for real, pairs in zip(self.table.segments[::2], self.table.segments[1::2]):
            torch.abs(flat[real.offset : real.offset + real.numel], out=found[at : at + real.numel])
            at += real.numel
            for a, b in pieces([(pairs.offset, pairs.offset + pairs.numel)]):
                # The square of a float32 may be out of its range.
                p, q = flat[a:b].double().square_().view(-1, 2).unbind(1)
                found[at : at + len(p)].copy_((p + q).sqrt_())
                at += len(p)
        return found.mul_(self._weights)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        z = torch.empty(self.waves.coordinates, dtype=torch.float32, device="cpu")
        super().decode_rows(rows, summary, z)
        self.kernels.inverse_fourier(z, self.waves, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        z = torch.zeros(self.waves.coordinates, dtype=torch.float32, device="cpu")
        super().add_own(data, summary, weight, z)
        self.kernels.inverse_fourier(z, self.waves, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # Sums of finite coefficients may exceed float32.
        return all_hold(self.kernels.finite(flat, self._elements))


def _weights(numel: int, block_size: int) -> torch.Tensor:
    """Return factors that give magnitudes of unitary transforms, over ``sqrt(2 block_size)``.

    With these no atom is larger than the largest element.
    """
    sizes = np.array(block_sizes(numel, block_size), np.int64)
    share = np.sqrt(sizes / block_size)
    real = np.repeat(share / np.sqrt(2), np.minimum(sizes, 2))
    return torch.from_numpy(np.concatenate([real, np.repeat(share, np.maximum(sizes // 2 - 1, 0))])).float()


@dataclass(frozen=True, kw_only=True)
class FourierATOMO(Compressor):
    r"""ATOMO with frequencies as atoms, each kept at random and divided by its probability.

    A parameter, in memory order, is cut into blocks of b elements: ``block_size``, and smaller powers of two at its
    end. X is the unitary discrete Fourier transform of a block. Since the block is real, X_{b-k} is the conjugate of
    X_k: the two are one atom, and the real frequencies 0 and b/2 are one atom each. The atoms are orthonormal::

        x = sum_i lambda_i a_i     lambda = sqrt(2) |X_k| for pairs, |X_k| for real ones
        Q(x) = sum_i (lambda_i t_i / p_i) a_i     p_i = min(1, lambda_i / c)     sum_i p_i = s

    with independent t_i, 1 with the probability p_i and else 0. All blocks of a parameter use the same c. Unbiased,
    except for rounding in the float32 transform; the variance, sum_i lambda_i^2 (1 / p_i - 1), is the least of all p
    with that sum.

    Use it for vectors with few frequencies, such as smooth ones. The energy of single large elements is spread over all
    frequencies, so for these :class:`ATOMO` has less variance.

    Blocks are used because a transform whose length is a power of two can be computed in a specified order of sums,
    with roots of unity that need no mathematical library. So all ranks decode the same bits on any machine, whatever
    the layout of the buckets. A block also stays in a core's cache.

    Args:
        density: Share of the atoms that is kept on average, above 0 to 1; at least one atom of each parameter. A block
            has b/2 + 1 atoms: b/2 - 1 pairs, which take two numbers each, and two real frequencies, which take one. So
            about the same share of the numbers is sent.
        block_size: Elements of a block, a power of two from 256 to 32768.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: a sparse section (``docs/wire-format.md``). The number of atoms is random. Draws from the rank's stream.

    Reference: H. Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS 2018,
    algorithm 1 and theorem 5; the abstract names the Fourier decomposition as an example.

    Example:
        >>> import math, torch, gradwire as gw
        >>> x = torch.cos(torch.arange(256.0) * (2 * math.pi * 3 / 256)).reshape(1, 256)
        >>> torch.allclose(gw.simulate(x, gw.FourierATOMO(density=0.01)).mean, x[0], atol=1e-4)
        True
    """

    density: float = 0.01
    block_size: int = 4096

    name: ClassVar[str] = "fourier_atomo"
    tag: ClassVar[int] = 44
    properties: ClassVar[Properties] = Properties(
        summary="Frequencies of blocks kept at random with the probabilities of the least variance",
        paper="Wang et al., ATOMO, NeurIPS 2018",
        bit_stable=True,
        bits_per_element=0.01 * (64 + 8.14),
        stream="rank",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("FourierATOMO", self.density))
        check_rotation("FourierATOMO", self.block_size)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            kernels=("fourier", "moments", "signs", "ternary", "selection", "indices"),
            unbiased=True,
            omega_formula="a / s - 1, a atoms",
        )

    def omega_of(self, numel: int | None = None) -> float | None:
        """Return the variance of the worst vector, whose atoms have equal magnitudes."""
        if numel is None:
            return 1 / self.density - 1
        atoms = sum(b // 2 + 1 for b in block_sizes(max(1, numel), self.block_size))
        return max(0.0, atoms / max(1.0, self.density * atoms) - 1)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> FourierAtomCodec:
        return FourierAtomCodec(kernels, segments, world_size, seed, density=self.density, block_size=self.block_size)
