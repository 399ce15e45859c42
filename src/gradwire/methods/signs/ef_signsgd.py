"""Scaled sign, and EF-signSGD: signs times the mean magnitude, without and with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.errors import HyperparameterError
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Method, Properties, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import WHOLE
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.levels.level_compressor import check_blocks
from gradwire.methods.signs.sign_codec import SignCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


LONGEST = 2.0**35
"""Number of elements that no parameter has: the kernels accept none so long."""


@dataclass(frozen=True, kw_only=True)
class ScaledSign(Compressor):
    r"""Scaled sign: one bit an element, and a float32 mean magnitude a block.

    For a block v of d values, with sign(0) = +1::

        C(v) = (|v|_1 / d) sign(v)                  mean = (1 / N) sum_i C(v_i)

    This is the multiple of sign(v) that is nearest to v. It is biased, and a contraction: |C(v) - v|^2 = (1 - phi)
    |v|^2 with phi = |v|_1^2 / (d |v|_2^2) from 1/d (a single value in d) to 1 (equal magnitudes: exact); 2/pi for a
    Gaussian. Without error feedback, as in :class:`EFSignSGD`, it generalises badly with small batches.

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
    tag: ClassVar[int] = 16
    delta_formula: ClassVar[str | None] = "1 / d"
    properties: ClassVar[Properties] = Properties(
        summary="Signs times the mean magnitude of each parameter",
        paper="Karimireddy et al., ICML 2019",
        bit_stable=True,
        bits_per_element=2.0,
    )

    def __post_init__(self) -> None:
        check_blocks(type(self).__name__, self.block_size, "parameter")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            kernels=("signs",),
            on_device=True,
            unbiased=False,
        )

    def delta_of(self, numel: int | None = None) -> float:
        """Return 1/d for blocks of d, attained by a single value; at least 2^-35, for the longest block."""
        longest = LONGEST if numel is None else max(1, numel)
        return 1 / min(longest, self.block_size or longest)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SignCodec:
        return SignCodec(kernels, segments, world_size, length=self.block_size or WHOLE, sides=1)


@dataclass(frozen=True, kw_only=True, init=False)
class EFSignSGD(ErrorFeedback):
    r"""EF-signSGD: the scaled sign with error feedback.

    With g_i worker i's gradient of a parameter (or block) of d elements, and e_i its residual, zero at first::

        p_i = g_i + e_i        mean = (1 / N) sum_i (|p_i|_1 / d) sign(p_i)        e_i <- p_i - (|p_i|_1 / d) sign(p_i)

    The paper's p = gamma g + e is in units of steps. Here residuals are in units of the gradient, which is the same for
    a constant learning rate gamma; they are not rescaled when it changes. Unlike :class:`SignSGD` the outcome is a
    mean.

    The algorithm of the paper has no momentum. With one scale for a whole parameter the residual of a real model grows
    to several times the length of the gradient and is applied in delayed bursts, with which an optimizer's momentum
    overshoots. Use ``torch.optim.SGD`` without momentum at a higher learning rate, or ``block_size=64``, which keeps
    the residual short, or ``momentum=0.9``, which each worker applies before compression, with none in the optimizer.
    ``docs/quantisers.md`` has the figures.

    Args:
        block_size: Elements d that share a scale, a multiple of 16; None: all of a parameter, as in the paper.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.
        decay: Share of the residual that is added to the next vector, see :class:`ErrorFeedback`.
        compressor: Another way to write the block size: ``ScaledSign(block_size=...)``.

    Raises:
        HyperparameterError: ``block_size``, ``momentum`` or ``decay`` is out of range, or ``compressor`` is not a
            :class:`ScaledSign` or has another block size.

    Reference: S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> first = gw.simulate(torch.tensor([[3.0, -1.0, -1.0, 3.0]]), "ef_signsgd")
        >>> first.mean, first.state["rank 0"]["residual/0"]
        (tensor([ 2., -2., -2.,  2.]), tensor([1., 1., 1., 1.]))
    """

    # The block size determines it. So the spec does not show it, and dataclasses.replace does not hand on the old one.
    compressor: Method = field(default_factory=ScaledSign, init=False, repr=False, kw_only=False)
    block_size: int | None = None

    name: ClassVar[str] = "ef_signsgd"
    properties: ClassVar[Properties] = Properties(
        summary="Scaled signs; what they leave out is added to the next gradient",
        paper="Karimireddy et al., ICML 2019",
        bit_stable=True,
        bits_per_element=2.0,
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
    )

    def __init__(
        self,
        compressor: Method | None = None,
        *,
        block_size: int | None = None,
        momentum: float = 0.0,
        decay: float = 1.0,
    ) -> None:
        given = ScaledSign() if compressor is None else compressor
        if not isinstance(given, ScaledSign):
            raise HyperparameterError(
                f"EFSignSGD: compressor is ScaledSign(block_size=...), not {given!r}: use ErrorFeedback for another"
            )
        check_blocks("EFSignSGD", block_size, "parameter")
        # Either of the two may be left at its default; if both are given they must agree.
        sizes = {size for size in (block_size, given.block_size) if size is not None}
        require(
            len(sizes) < 2,
            "EFSignSGD",
            f"block_size={block_size!r} and compressor={given!r} differ: leave compressor out",
        )
        object.__setattr__(self, "block_size", next(iter(sizes), None))
        object.__setattr__(self, "compressor", ScaledSign(block_size=self.block_size))
        object.__setattr__(self, "momentum", momentum)
        object.__setattr__(self, "decay", decay)
        self.__post_init__()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            on_device=True,
            unbiased_note=None,
        )
