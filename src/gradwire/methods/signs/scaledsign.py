"""Scaled sign: signs times the mean magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.kernels import WHOLE
from gradwire.methods.levels.level_compressor import check_blocks
from gradwire.methods.signs.sign_codec import SignCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["LONGEST", "ScaledSign"]

LONGEST = 2.0**35
"""No parameter has as many elements: the kernels take no longer one."""


@dataclass(frozen=True, kw_only=True)
class ScaledSign(Compressor):
    r"""Scaled sign: one bit an element, and the mean magnitude of each block.

    For a block v of d values, with sign(0) = +1::

        C(v) = (|v|_1 / d) sign(v)                  mean = (1 / N) sum_i C(v_i)

    Of all multiples of sign(v) this is the nearest to v. Biased, and a contraction: |C(v) - v|^2 = (1 - phi) |v|^2 with
    phi = |v|_1^2 / (d |v|_2^2) from 1/d (a single value in d) to 1 (equal magnitudes: exact); 2/pi for a Gaussian.
    Alone it generalises badly at small batches; :class:`EFSignSGD` feeds back what it leaves out.

    Args:
        block_size: Values d that share a scale, a multiple of 16; None: all of a parameter, as in the paper.

    Raises:
        HyperparameterError: ``block_size`` is out of range.

    Wire: float32 scales, then bits, 80 elements in ten bytes (``docs/wire-format.md``); every worker receives every
    worker's. Draws nothing.

    Reference: S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, section 4 and lemma 8.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[3.0, -1.0, -1.0, 3.0]]), gw.ScaledSign()).mean
        tensor([ 2., -2., -2.,  2.])
    """

    block_size: int | None = None

    name: ClassVar[str] = "scaledsign"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 16
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    kernels: ClassVar[tuple[str, ...]] = ("signs",)
    unbiased: ClassVar[bool] = False
    delta_formula: ClassVar[str | None] = "1 / d"
    properties: ClassVar[Properties] = Properties(
        summary="Signs times the mean magnitude of each parameter",
        paper="Karimireddy et al., ICML 2019",
        bit_stable=True,
        bits_per_element=2.0,
    )

    def __post_init__(self) -> None:
        check_blocks(type(self).__name__, self.block_size, "parameter")

    def delta_of(self, numel: int | None = None) -> float:
        """Return 1/d for blocks of d, attained by a single value; at least 2^-35, for the longest that kernels take."""
        longest = LONGEST if numel is None else max(1, numel)
        return 1 / min(longest, self.block_size or longest)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SignCodec:
        return SignCodec(kernels, segments, world_size, length=self.block_size or WHOLE, sides=1)
