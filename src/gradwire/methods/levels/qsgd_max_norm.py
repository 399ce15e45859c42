"""QSGD with scales that all workers share, so that digits add up to integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs.base import Draw, SummableCodec, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid, packed_groups, summed
from gradwire.methods.levels.level_compressor import LevelCodec, LevelSummary, as_levels
from gradwire.methods.levels.qsgd import EvenLevels

if TYPE_CHECKING:
    from gradwire.kernels import Coder, Kernels


MOST_SUM = 32767
"""Largest s N: sums of N digits of base 2s + 1 are stored in 16 bits."""


LONG = 4096
"""Least elements of a block to fill it in one call, which is five times as fast as repeating its scale."""


class SharedLevelCodec(LevelCodec, SummableCodec):
    """Codec of even levels with scales that are maxima over all ranks: payloads are digits, and their exact sums.

    If ranks have v_i steps in a block with scale R, its mean is ``float32(sum v_i) / float32(s N) * R``, with the same
    bits from shards or from all rows. Blocks may cross shards.

    A share is a whole number of words of digits and of sums: ``grain`` groups are.

    Args:
        levels: Number s of magnitudes above zero.
        owner: Name of the method in errors.

    Raises:
        IncompatibleError: s N is above :data:`MOST_SUM`.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        levels: int,
        block_size: int | None,
        owner: str,
        purpose: str = "levels",
    ) -> None:
        if levels * world_size > MOST_SUM:
            raise IncompatibleError(
                f"{owner}: sums over {world_size} workers of {levels} levels either side of zero need more than 16 "
                f"bits; with that many workers use at most levels={MOST_SUM // world_size}"
            )
        super().__init__(
            kernels, segments, world_size, seed, grid=Grid.even(levels), norm="max", block_size=block_size,
            purpose=purpose,
        )  # fmt: skip
        self.side_bytes = 0
        self.sums = Grid.even(levels * world_size)
        self.sum_layout = summed(self.layout, world_size)
        self._find_grain()

    def use_coder(self, coder: Coder) -> None:
        super().use_coder(coder)
        self._find_grain()  # That of the digits in bytes.

    def _find_grain(self) -> None:
        self.grain = math.lcm(*(d // math.gcd(5, d) for d in (self.layout.digits, self.sum_layout.digits)))

    def summarise(self, flat: torch.Tensor) -> LevelSummary:
        summary = super().summarise(flat)
        return replace(summary, shared=summary.scale)

    def spread(self, summary: LevelSummary, out: torch.Tensor) -> None:
        """Write the scale of every element of the segments, joined, into ``out``."""
        scales, lengths = self._scales(summary), torch.from_numpy(self.runs.numel.copy())
        if len(scales) * LONG < out.numel():
            for part, scale in zip(out.split(lengths.tolist()), scales):
                part.fill_(scale)
        else:
            out.copy_(torch.repeat_interleave(scales, lengths, output_size=out.numel()))

    def mean_bytes(self, units: int) -> int:
        return packed_groups(units, self.sum_layout)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        inverse = self.kernels.inverse_scale(self._scales(as_levels(summary)))
        self.kernels.quantise(
            flat, self.blocks, inverse, self.grid, self.layout, draw.round, draw.stream, self._digits(out)
        )

    def reduce(self, rows: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        # Rows of a shard: the number of groups is computed from their size.
        groups = rows.shape[1] // self.layout.block_bytes * self.layout.digits // 5
        self.kernels.sum_digits(rows, groups, self.layout, out)

    def decode_mean(self, data: torch.Tensor, summary: Summary, begin: int, end: int, flat: torch.Tensor) -> None:
        scale = self._scales(as_levels(summary))
        words = data[: self.mean_bytes(end - begin)]
        self.kernels.dequantise(words, self.blocks, scale, self.sums, self.sum_layout, flat, begin=begin, end=end)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = torch.empty(self.mean_bytes(self.units), dtype=torch.uint8, device=rows.device)
        self.kernels.sum_digits(rows, self.units, self.layout, total)
        self.decode_mean(total, summary, 0, self.units, flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(self._scales(as_levels(summary)))


@dataclass(frozen=True, kw_only=True)
class QSGDMaxNorm(EvenLevels):
    r"""QSGD with the maximum over all workers as a shared scale, so that integers add up.

    For a block of d values, v_i worker i's, s = ``levels`` and independent uniform u_ik::

        R = max_i max_k |v_ik|      a_ik = s |v_ik| / R      z_ik = sign(v_ik) (floor(a_ik) + [u_ik < frac(a_ik)])
        mean_k = (R / (s N)) sum_i z_ik                      (an exact integer sum, 2sN + 1 levels on the way back)

    Unbiased; worker i's variance is (R / s)^2 sum_k p (1 - p) with p = frac(a_ik), at most
    min(d R^2 / (4 s^2), R |v_i|_1 / s). A shared scale multiplies the variance of a worker whose own maximum is R_i by
    up to (R / R_i)^2. In return both directions are narrow, and traffic grows with N only by the width of the sums.
    With one worker this is :class:`QSGDinf`; with ``levels=1`` and ``block_size=None`` it has the distribution of
    TernGrad without clipping.

    Args:
        levels: Number s of magnitudes above zero. The paper's b bits are s = 2^b - 1. With N workers, s N is at most
            32767.
        block_size: Values that share a scale, a multiple of 16; None: all of a parameter.
        blocks: "parameter" or "model", as for :class:`QSGD`. The paper's single scale for the whole gradient is
            ``block_size=None, blocks="model"``.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached to so many workers that the sums overflow.

    Wire: first the float32 scales, by a maximum over workers; then packed digits of base 2s + 1, and their sums of base
    2sN + 1 on the way back (``docs/wire-format.md``). Draws from the rank's stream.

    Reference: S. Vineeth, "Unbiased Single-scale and Multi-scale Quantizers for Distributed Optimization",
    arXiv 2109.12497, 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, -1.0]]), gw.QSGDMaxNorm(levels=2)).mean
        tensor([ 0.5000,  0.5000, -0.5000])
    """

    levels: int = 15
    block_size: int | None = None

    norm: ClassVar[str] = "max"
    name: ClassVar[str] = "qsgdmaxnorm"
    tag: ClassVar[int] = 20
    properties: ClassVar[Properties] = Properties(
        summary="Evenly spaced levels of a maximum over all workers, exact integer sums",
        paper="Vineeth, Quantization for Distributed Optimization, 2021",
        bit_stable=True,
        bits_per_element=(16 / 3 + 8) / 2,
        stream="rank",
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            re_encoding=False,
            on_device=True,
            shares_scales=True,
            omega_formula="min(d r^2 / (4 s^2), sqrt(d) r / s), r = shared scale over the worker's norm",
        )

    def block_omega(self, numel: int) -> None:
        """Return None: another worker's scale may be any number of times a worker's own."""
        return None

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SharedLevelCodec:
        return SharedLevelCodec(
            kernels, segments, world_size, seed, levels=self.levels, block_size=self.block_size, owner="QSGDMaxNorm"
        )
