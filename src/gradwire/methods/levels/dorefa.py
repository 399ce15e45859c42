"""DoReFa: evenly spaced levels without a zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid
from gradwire.methods.levels.level_compressor import LevelCodec, LevelCompressor, check_blocks
from gradwire.methods.levels.worst_case import odd_constant

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


MOST_BITS = 8
"""The largest width in the paper's experiments; a coder takes bytes."""


@dataclass(frozen=True, kw_only=True)
class DoReFa(LevelCompressor):
    r"""DoReFa-Net's k-bit gradients: each block over its largest magnitude, rounded with noise of one step.

    For a block v of d values with M = max_k |v_k|, n = 2^``bits`` - 1 and independent sigma_k, uniform in
    (-1/2, 1/2)::

        quantise(x) = round(n x) / n
        Q(v)_k = 2 M (quantise(v_k / (2 M) + 1/2 + sigma_k / n) - 1/2)          mean = (1 / N) sum_i Q(v_i)

    Rounding a number y after adding noise of one step is stochastic rounding: round(y + sigma) = floor(y + u) with
    u = sigma + 1/2, which is floor(y) + 1 with probability frac(y). Here y = n (v_k / M + 1) / 2 lies between 0 and n,
    which are both levels, so no result is out of range and nothing is clipped.

    There are 2^bits levels M j / n with odd j = -n, -n + 2, ..., n. Zero is not a level: a value below M / n becomes
    M / n or -M / n, and zero becomes either with the same probability. Unbiased; E|Q(v) - v|^2 = M^2 sum_k (h_k - r_k)
    (r_k - l_k), r = v / M between neighbouring levels l and h, at most (d - 1) / n^2 times |v|^2, attained by a block
    of one value and zeros. The largest value of a block is exact.

    The paper rounds the gradient of each layer's *output* in the backward pass, with a maximum for each sample, so that
    convolutions can be computed on bits. Here the gradient of a parameter is rounded before the exchange, with a
    maximum for each block or parameter.

    Args:
        bits: Bits k of a level, 1 to 8. Packed they take 1, 2, 3.2, 4, 5.33, 6.4, 8 and 8 bits.
        block_size: Values d that share a maximum, a multiple of 16; None: all of a parameter.
        blocks: "parameter" or "model", as for :class:`QSGD`.

    Raises:
        HyperparameterError: a field is out of range.

    Reference: S. Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low Bitwidth
    Gradients", arXiv 1606.06160, 2016, section 2.5, equation 12; 6 bits are those of its AlexNet.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[3.0, 1.0, -3.0, -1.0]]), gw.DoReFa(bits=2)).mean
        tensor([ 3.,  1., -3., -1.])
    """

    bits: int = 6
    block_size: int | None = 512
    blocks: str = "parameter"

    name: ClassVar[str] = "dorefa"
    tag: ClassVar[int] = 9
    properties: ClassVar[Properties] = Properties(
        summary="2^bits evenly spaced levels of each block's maximum, zero not among them, rounded without bias",
        paper="Zhou et al., DoReFa-Net, 2016, section 2.5",
        bit_stable=True,
        bits_per_element=2 * (6.4 + 32 / 512),
        stream="rank",
    )

    def __post_init__(self) -> None:
        require(is_whole(self.bits, 1, MOST_BITS), "DoReFa", f"bits is 1 to {MOST_BITS}, not {self.bits!r}")
        check_blocks("DoReFa", self.block_size, self.blocks)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=("moments", "levels"),
            on_device=True,
            omega_formula="(d - 1) / (2^bits - 1)^2",
            worst_step=2 / self.steps,
        )

    @property
    def steps(self) -> int:
        """Number n of steps between the lowest and the highest level."""
        return (1 << self.bits) - 1

    def block_omega(self, numel: int) -> float:
        """Return the exact supremum."""
        return odd_constant(self.steps, numel)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        magnitudes = [j / self.steps for j in range(1, self.steps + 1, 2)]
        grid = Grid.symmetric(magnitudes, zero=False)
        return LevelCodec(kernels, segments, world_size, seed, grid=grid, norm="max", block_size=self.block_size)
