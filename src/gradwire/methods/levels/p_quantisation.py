"""Block p-quantisation: random signs times the p-norm of each block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Properties, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid
from gradwire.methods.levels.level_compressor import LevelCodec, LevelCompressor, check_blocks
from gradwire.methods.levels.worst_case import even_constant

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


MOST_SUMMED = 4096
"""Longest block for p = 1. Probabilities are multiples of 2^-24, so that the mean of a value is off by up to d 2^-24
mean magnitudes."""


@dataclass(frozen=True, kw_only=True)
class PQuantisation(LevelCompressor):
    r"""Block p-quantisation: every value becomes 0 or plus or minus the p-norm of its block.

    For a block v of d values and independent xi_k ~ Bernoulli(|v_k| / |v|_p)::

        Q(v)_k = |v|_p sign(v_k) xi_k                mean = (1 / N) sum_i Q(v_i)

    Unbiased; E|Q(v) - v|^2 = sum_k |v_k| (|v|_p - |v_k|) = |v|_1 |v|_p - |v|_2^2 <= (1 / alpha_p - 1) |v|_2^2 with
    alpha_p = 1/d, 1/sqrt(d), 2/(1 + sqrt(d)) for p = 1, 2, infinity; on average |v|_1 / |v|_p values of a block are not
    zero: one, at most sqrt(d), at most d. So a larger p has less variance and a smaller p has fewer non-zero values,
    which take fewer bytes only with an entropy coder (:class:`Coded`). p = 2 is ``QSGD(levels=1)`` and p = infinity
    ``QSGDinf(levels=1)``, from the same draws.

    Args:
        p: 1, 2 or "inf" (``math.inf`` is the same).
        block_size: Values d that share a norm, a multiple of 16; None: all of a parameter. At most 4096 for p = 1.
        blocks: "parameter" or "model", as for :class:`QSGD`.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: float32 norms, then trits, five to a byte; every worker receives every worker's. Draws from the rank's stream.

    Reference: K. Mishchenko, E. Gorbunov, M. Takac, P. Richtarik, "Distributed Learning with Compressed Gradient
    Differences", 2019, definitions 1 and 2, lemma 1.

    Example:
        >>> import torch, gradwire as gw
        >>> mean = gw.simulate(torch.tensor([[3.0, 0.0, -4.0, 0.0]]), gw.PQuantisation(p=2)).mean
        >>> set(mean.tolist()) <= {-5.0, 0.0, 5.0}
        True
    """

    p: int | str = 2
    block_size: int | None = 64
    blocks: str = "parameter"

    name: ClassVar[str] = "p_quantisation"
    tag: ClassVar[int] = 26
    properties: ClassVar[Properties] = Properties(
        summary="Zero or the p-norm of its block for every value, at random without bias",
        paper="Mishchenko et al., DIANA, 2019",
        bit_stable=True,
        bits_per_element=2 * (1.6 + 32 / 64),
        stream="rank",
    )

    def __post_init__(self) -> None:
        given: object = "inf" if self.p == math.inf else self.p
        owner, known = "PQuantisation", not isinstance(given, bool) and given in (1, 2, "inf")
        require(known, owner, f"p is 1, 2 or 'inf', not {self.p!r}")
        object.__setattr__(self, "p", given if isinstance(given, str) else int(self.p))
        check_blocks(owner, self.block_size, self.blocks)
        require(
            self.p != 1 or (self.block_size is not None and self.block_size <= MOST_SUMMED),
            owner,
            f"with p=1 use a block_size of at most {MOST_SUMMED}, not {self.block_size!r}: one value of a "
            "block is not zero on average, and probabilities in longer blocks are too small for 24 random bits",
        )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # The 1-norm is computed by the kernels of signs.
            kernels=("moments", "levels", *(("signs",) if self.p == 1 else ())),
            on_device=True,
            omega_formula={1: "d - 1", 2: "sqrt(d) - 1", "inf": "(sqrt(d) - 1) / 2"}[self.p],
        )

    @property
    def norm(self) -> str:
        """Name of a block's norm, for codecs."""
        return "max" if self.p == "inf" else f"l{self.p}"

    def block_omega(self, numel: int) -> float:
        """Return 1 / alpha_p - 1, attained where all magnitudes are equal (p = 1, 2), or all but one (p = infinity)."""
        return even_constant(1, numel, self.norm)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        return LevelCodec(
            kernels, segments, world_size, seed, grid=Grid.even(1), norm=self.norm, block_size=self.block_size
        )
