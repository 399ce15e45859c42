"""QSGDMaxNorm: evenly spaced levels of a scale that all workers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.methods.levels.qsgd import EvenLevels
from gradwire.methods.levels.shared_levels import SharedLevelCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["QSGDMaxNorm"]


@dataclass(frozen=True, kw_only=True)
class QSGDMaxNorm(EvenLevels):
    r"""QSGD with the largest maximum of all workers as everybody's scale, so that integers add up.

    For a block of d values, v_i worker i's, s = ``levels`` and independent uniform u_ik::

        R = max_i max_k |v_ik|      a_ik = s |v_ik| / R      z_ik = sign(v_ik) (floor(a_ik) + [u_ik < frac(a_ik)])
        mean_k = (R / (s N)) sum_i z_ik                      (an exact integer sum, 2sN + 1 levels on the way back)

    Unbiased; worker i's variance is (R / s)^2 sum_k p (1 - p) with p = frac(a_ik), at most
    min(d R^2 / (4 s^2), R |v_i|_1 / s). Sharing costs a worker whose own maximum is R_i up to (R / R_i)^2 of variance;
    for it both directions are narrow, and traffic does not grow with N but by the width of the sums. With one worker
    this is :class:`QSGDinf`, with ``levels=1`` and ``block_size=None`` TernGrad without clipping, in law.

    Args:
        levels: Number s of magnitudes above zero. The paper's b bits are s = 2^b - 1. With N workers s N is at most
            32767.
        block_size: Values that share a scale, a multiple of 16; None: all of a parameter.
        blocks: "parameter" or "model", as for :class:`QSGD`. The paper's single scale for the whole gradient is
            ``block_size=None, blocks="model"``.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached to more workers than the sums of so many levels have room for.

    Wire: digits of base 2s + 1 up, of base 2sN + 1 down, packed; the float32 scales by a maximum over the workers
    before (``docs/wire-format.md``). Draws from the rank's stream.

    Reference: S. Vineeth, "Quantization for Distributed Optimization", arXiv 2109.12497, 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, -1.0]]), gw.QSGDMaxNorm(levels=2)).mean
        tensor([ 0.5000,  0.5000, -0.5000])
    """

    levels: int = 15
    block_size: int | None = None

    norm: ClassVar[str] = "max"
    name: ClassVar[str] = "qsgdmaxnorm"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 20
    collectives: ClassVar[tuple[str, ...]] = ("two_shot", "all_gather")
    re_encoding: ClassVar[bool] = False
    properties: ClassVar[Properties] = Properties(
        summary="Evenly spaced levels of a maximum over all workers, exact integer sums",
        paper="Vineeth, Quantization for Distributed Optimization, 2021",
        bit_stable=True,
        bits_per_element=(16 / 3 + 8) / 2,
        stream="rank",
    )

    @property
    def omega_formula(self) -> str | None:  # type: ignore[override]
        """A bound that depends on the other workers."""
        return "min(d r^2 / (4 s^2), sqrt(d) r / s), r = shared scale over the worker's norm"

    def block_omega(self, numel: int) -> None:
        """Return None: another worker's scale may be any number of times a worker's own."""
        return None

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SharedLevelCodec:
        return SharedLevelCodec(
            kernels, segments, world_size, seed, levels=self.levels, block_size=self.block_size, owner="QSGDMaxNorm"
        )
