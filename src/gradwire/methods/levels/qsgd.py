"""QSGD: evenly spaced levels, scaled by the Euclidean norm or the maximum of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid
from gradwire.methods.levels.level_compressor import LevelCodec, LevelCompressor, check_blocks
from gradwire.methods.levels.worst_case import even_constant

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


MOST_LEVELS = 32767
"""Largest s: digits of base 2s + 1 are stored in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class EvenLevels(LevelCompressor):
    """Base of methods with the levels j / s of a block's scale."""

    levels: int
    block_size: int | None = 512
    blocks: str = "parameter"

    norm: ClassVar[str]

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require(
            is_whole(self.levels, 1, MOST_LEVELS),
            owner,
            f"levels is the number s of magnitudes above zero, 1 to {MOST_LEVELS}, not {self.levels!r}",
        )
        check_blocks(owner, self.block_size, self.blocks)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=("moments", "levels"),
            # One step, 1 / s of the scale, if the scale is a maximum. For the Euclidean norm this is a bound, at most
            # 1 / s^4 above the constant.
            omega_formula="(sqrt(1 + (d - 1) / s^2) - 1) / 2"
            if self.norm == "max"
            else "d / (4 * s^2) if d <= 4 * s^2 else sqrt(d) / s - 1",
            worst_step=1 / self.levels if self.norm == "max" else None,
        )

    def block_omega(self, numel: int) -> float | None:
        """Return the exact supremum."""
        return even_constant(self.levels, numel, self.norm)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        return LevelCodec(
            kernels, segments, world_size, seed, grid=Grid.even(self.levels), norm=self.norm, block_size=self.block_size
        )


@dataclass(frozen=True, kw_only=True)
class QSGD(EvenLevels):
    r"""QSGD: blocks divided by their Euclidean norm and rounded at random to s evenly spaced magnitudes.

    For a block v of d values with R = |v|_2, s = ``levels`` and independent uniform u_k::

        a_k = s |v_k| / R        l_k = floor(a_k) + [u_k < a_k - floor(a_k)]
        Q(v)_k = R sign(v_k) l_k / s                mean = (1 / N) sum_i Q(v_i)

    Unbiased; E|Q(v) - v|^2 = (R / s)^2 sum_k p_k (1 - p_k) <= min(d / s^2, sqrt(d) / s) |v|^2, p_k = frac(a_k);
    ``omega`` is the exact supremum, at most d / (4 s^2) where d <= 4 s^2, else sqrt(d) / s - 1. About s (s + sqrt(d))
    values of a block are not zero. With few levels on large blocks the variance is large: with s = 7 and d = 8192 about
    nine times the signal. The paper's experiments use :class:`QSGDinf`.

    Args:
        levels: Number s of magnitudes above zero; 2s + 1 code values. The paper's "4 bits" are 16.
        block_size: Values d that share a norm, a multiple of 16; None: all of a parameter.
        blocks: "parameter": cut from each parameter's start. "model": cut from all compressed parameters joined in
            the order of ``named_parameters``; the exchange then begins when all gradients are computed.

    Raises:
        HyperparameterError: ``levels`` or ``block_size`` is out of range, or ``blocks`` is neither "parameter" nor
            "model".

    Wire: float32 norms, then digits of base 2s + 1, packed (``docs/wire-format.md``); every worker receives every
    worker's. With ``collective="two_shot"``, which needs a block size, the owner of a share of the elements rounds the
    mean to the same levels once more. An entropy coder (:class:`Coded`) takes 5.33 bits at s = 16 and d = 512 to about
    2. Draws from the rank's stream.

    Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NIPS 2017, section 3.1, lemma 3.1.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[3.0, 0.0, -4.0, 0.0]]), gw.QSGD(levels=5)).mean
        tensor([ 3.,  0., -4.,  0.])
    """

    levels: int = 16

    norm: ClassVar[str] = "l2"
    name: ClassVar[str] = "qsgd"
    tag: ClassVar[int] = 2
    properties: ClassVar[Properties] = Properties(
        summary="Evenly spaced levels of each block's Euclidean norm, rounded without bias",
        paper="Alistarh et al., QSGD, NIPS 2017",
        bit_stable=True,
        bits_per_element=2 * (16 / 3 + 32 / 512),
        stream="rank",
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            on_device=True,
        )


@dataclass(frozen=True, kw_only=True)
class QSGDinf(EvenLevels):
    r"""QSGD scaled by the maximum: blocks divided by their largest magnitude and rounded to s even magnitudes.

    This is :class:`QSGD` with R = max_k |v_k|. The largest value of a block is exact. The relative variance is at most
    (sqrt(1 + (d - 1) / s^2) - 1) / 2, attained by one value at the maximum and all others at the same magnitude below
    R / s; for Gaussian blocks of 512 it is 1.61, 0.200 and 0.037 at s = 1, 3 and 7. With ``levels=1`` and
    ``block_size=None`` this is TernGrad without clipping and with each worker's own scaler.

    Args:
        levels: Number s of magnitudes above zero; 2s + 1 code values: 7 for four bits, 3 for three.
        block_size: Values d that share a maximum, a multiple of 16; None: all of a parameter.
        blocks: "parameter" or "model", as for :class:`QSGD`.

    Raises:
        HyperparameterError: ``levels`` or ``block_size`` is out of range, or ``blocks`` is neither "parameter" nor
            "model".

    Reference: D. Alistarh et al., NIPS 2017, section 4 ("we normalise by the maximum"); A. Ramezani-Kebrya et al.,
    JMLR 2021, call it QSGDinf.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.5, -1.0, 0.0]]), gw.QSGDinf(levels=2)).mean
        tensor([ 1.0000,  0.5000, -1.0000,  0.0000])
    """

    levels: int = 7

    norm: ClassVar[str] = "max"
    name: ClassVar[str] = "qsgdinf"
    tag: ClassVar[int] = 3
    properties: ClassVar[Properties] = Properties(
        summary="Evenly spaced levels of each block's maximum, rounded without bias",
        paper="Alistarh et al., QSGD, NIPS 2017, section 4",
        bit_stable=True,
        bits_per_element=2 * (4 + 32 / 512),
        stream="rank",
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            on_device=True,
        )
