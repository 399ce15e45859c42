"""NUQSGD and natural dithering: exponentially spaced levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid
from gradwire.methods.levels.level_compressor import LevelCodec, LevelCompressor, check_blocks
from gradwire.methods.levels.worst_case import powers_constant, powers_formula

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


MOST_LEVELS = 100
"""Most levels. The smallest is then 2^-99; kernels could not distinguish smaller ones from zero."""


@dataclass(frozen=True, kw_only=True)
class NUQSGD(LevelCompressor):
    r"""NUQSGD: each block over its norm, rounded at random to powers of two.

    For a block v of d values with R = |v|_2 the magnitudes are 2^(1-s), ..., 1/4, 1/2, 1 (s = ``levels`` of them) and
    zero; r = |v_k| / R goes to one of its two neighbours l < h, to h with probability (r - l) / (h - l)::

        Q(v)_k = R sign(v_k) chosen                 mean = (1 / N) sum_i Q(v_i)

    Unbiased; E|Q(v) - v|^2 = R^2 sum_k (h_k - r_k) (r_k - l_k). With x = d / 4^(s-1) the relative variance is at most
    1/8 + 2x/9 if x < 81/16, else sqrt(x) - 1; ``omega`` is the exact supremum, for either norm, with or without a zero.
    The paper's s is one less.

    Args:
        levels: Number s of magnitudes above zero: 3 for three bits with a zero, 4 without.
        zero: True if zero is a level, as in the paper. The authors' program has no zero: a small value then becomes
            plus or minus the smallest level, which is useless on large blocks.
        norm: "l2" as in the paper, or "max".
        block_size: Values d that share a norm, a multiple of 16; None: all of a parameter.
        blocks: "parameter" or "model", as for :class:`QSGD`.

    Raises:
        HyperparameterError: a field is out of range.

    Reference: A. Ramezani-Kebrya et al., "NUQSGD: Provably Communication-efficient Data-parallel SGD via Nonuniform
    Quantization", JMLR 22(114), 2021, section 3. Natural dithering (Horvath et al., 2022) is the same operator.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.25, -0.5, 0.0]]), gw.NUQSGD(levels=3, norm="max")).mean
        tensor([ 1.0000,  0.2500, -0.5000,  0.0000])
    """

    levels: int = 7
    zero: bool = True
    norm: str = "l2"
    block_size: int | None = 512
    blocks: str = "parameter"

    name: ClassVar[str] = "nuqsgd"
    tag: ClassVar[int] = 4
    properties: ClassVar[Properties] = Properties(
        summary="Powers of two times each block's norm, rounded without bias",
        paper="Ramezani-Kebrya et al., NUQSGD, JMLR 2021",
        bit_stable=True,
        bits_per_element=2 * (4 + 32 / 512),
        stream="rank",
    )

    def __post_init__(self) -> None:
        require(
            is_whole(self.levels, 1, MOST_LEVELS),
            "NUQSGD",
            f"levels is the number s of magnitudes above zero, 1 to {MOST_LEVELS}, not {self.levels!r}",
        )
        require(isinstance(self.zero, bool), "NUQSGD", f"zero is True or False, not {self.zero!r}")
        require(self.norm in ("l2", "max"), "NUQSGD", f"norm is 'l2' or 'max', not {self.norm!r}")
        check_blocks("NUQSGD", self.block_size, self.blocks)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=("moments", "levels"),
            on_device=True,
            # With a zero, a bound just above ``omega``.
            omega_formula=powers_formula(self.norm) if self.zero else None,
        )

    def block_omega(self, numel: int) -> float:
        """Return the exact supremum."""
        return powers_constant(self.levels, numel, self.norm, self.zero)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        grid = Grid.symmetric([2.0 ** (j - self.levels) for j in range(1, self.levels + 1)], zero=self.zero)
        return LevelCodec(kernels, segments, world_size, seed, grid=grid, norm=self.norm, block_size=self.block_size)


@dataclass(frozen=True, kw_only=True)
class NaturalDithering(LevelCompressor):
    r"""Natural dithering: each block over its p-norm, rounded at random to 0, 2^(1-s), ..., 1/2, 1.

    For a block v of d values with R = |v|_p and l <= |v_k| / R <= h the neighbouring levels (s = ``levels``)::

        D(v)_k = R sign(v_k) h with probability (|v_k| / R - l) / (h - l), else R sign(v_k) l

    Unbiased; E|D(v) - v|^2 <= (1/8 + t min(1, t)) |v|^2 with t = d^(1/min(p, 2)) 2^(1-s) (theorem 7); ``omega`` is the
    exact supremum, which is lower. Its distribution is that of :class:`Natural` after :class:`QSGD` with 2^(s-1) even
    levels, so s natural levels have about the variance of 2^(s-1) even ones. It is the same operator as :class:`NUQSGD`
    with a zero.

    Args:
        levels: Number s of magnitudes above zero; 2s + 1 code values. The paper's experiments have 8.
        norm: "l2" (p = 2) or "max" (p = infinity).
        block_size: Values d that share a norm, a multiple of 16; None: all of a parameter, as in the paper.
        blocks: "parameter" or "model", as for :class:`QSGD`.

    Raises:
        HyperparameterError: a field is out of range.

    Reference: S. Horvath et al., MSML 2022, section 2, definition 2 and theorem 7.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.25, -0.5, 0.0]]), gw.NaturalDithering(norm="max")).mean
        tensor([ 1.0000,  0.2500, -0.5000,  0.0000])
    """

    levels: int = 8
    norm: str = "l2"
    block_size: int | None = None
    blocks: str = "parameter"

    name: ClassVar[str] = "naturaldithering"
    tag: ClassVar[int] = 24
    properties: ClassVar[Properties] = Properties(
        summary="Powers of two times each block's norm, rounded without bias",
        paper="Horvath et al., Natural Compression, MSML 2022",
        bit_stable=True,
        bits_per_element=2 * 32 / 7,
        stream="rank",
    )

    def __post_init__(self) -> None:
        require(
            is_whole(self.levels, 1, MOST_LEVELS),
            "NaturalDithering",
            f"levels is the number s of magnitudes above zero, 1 to {MOST_LEVELS}, not {self.levels!r}",
        )
        require(self.norm in ("l2", "max"), "NaturalDithering", f"norm is 'l2' or 'max', not {self.norm!r}")
        check_blocks("NaturalDithering", self.block_size, self.blocks)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=("moments", "levels"),
            on_device=True,
            omega_formula=powers_formula(self.norm),
        )

    def block_omega(self, numel: int) -> float:
        """Return the exact supremum, the same as that of :class:`NUQSGD` with a zero."""
        return powers_constant(self.levels, numel, self.norm)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        grid = Grid.symmetric([2.0 ** (j - self.levels) for j in range(1, self.levels + 1)])
        return LevelCodec(kernels, segments, world_size, seed, grid=grid, norm=self.norm, block_size=self.block_size)
