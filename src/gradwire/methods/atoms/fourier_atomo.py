"""ATOMO on frequencies: the pairs of blocks' spectra kept at random with the best probability for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.kernels import block_sizes
from gradwire.methods.atoms.fourier_atoms import FourierAtomCodec
from gradwire.methods.rotations.eden import check_rotation
from gradwire.methods.sparse.top_k import check_density

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["FourierATOMO"]


@dataclass(frozen=True, kw_only=True)
class FourierATOMO(Compressor):
    r"""ATOMO with frequencies as atoms: each kept at random, and what is kept made larger by as much.

    A parameter, in memory order, is cut into blocks of b elements, ``block_size`` and at its end smaller powers of two.
    X is the unitary discrete Fourier transform of a block. Since the block is real, X_{b-k} is the conjugate of X_k:
    the two are one atom, and the frequencies 0 and b/2, which are real, are one each. So the atoms are orthonormal::

        x = sum_i lambda_i a_i     lambda = sqrt(2) |X_k| for pairs, |X_k| for real ones
        Q(x) = sum_i (lambda_i t_i / p_i) a_i     p_i = min(1, lambda_i / c)     sum_i p_i = s

    with independent t_i, 1 with the probability p_i and else 0. One c serves all blocks of a parameter. Unbiased, but
    for the rounding of a float32 transform; the variance, sum_i lambda_i^2 (1 / p_i - 1), is the least of all p with
    that sum.

    It pays for vectors with few frequencies, such as smooth ones. Where single elements stick out, their energy is
    spread over all frequencies, and :class:`ATOMO` has less variance.

    Why blocks, and not the whole parameter: a transform whose length is a power of two can be made in a stated order of
    sums, with roots of unity that need no mathematical library. So all ranks decode the same bits on any machine,
    whatever the layout of the buckets. A block also stays in a core's cache.

    Args:
        density: Share of the atoms that is kept on average, above 0 to 1; at least one of a parameter. An atom counts
            as one, whether it is a pair, which travels as two numbers, or a real frequency, which travels as one. A
            block has b/2 + 1 atoms, so that about the same share of the numbers is sent.
        block_size: Elements of a block, a power of two from 256 to 32768.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: a sparse section (``docs/wire-format.md``). The number of atoms depends on the draws. Draws from the rank's
    stream.

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
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    cut: ClassVar[int] = 1 << 40
    kernels: ClassVar[tuple[str, ...]] = ("fourier", "moments", "signs", "ternary", "selection", "indices")
    unbiased: ClassVar[bool] = True
    omega_formula: ClassVar[str | None] = "a / s - 1, a atoms"
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

    def omega_of(self, numel: int | None = None) -> float | None:
        """Return the variance of the worst vector, whose atoms have equal magnitudes."""
        if numel is None:
            return 1 / self.density - 1
        atoms = sum(b // 2 + 1 for b in block_sizes(max(1, numel), self.block_size))
        return max(0.0, atoms / max(1.0, self.density * atoms) - 1)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> FourierAtomCodec:
        return FourierAtomCodec(kernels, segments, world_size, seed, density=self.density, block_size=self.block_size)
