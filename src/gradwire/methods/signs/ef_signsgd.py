"""EF-signSGD: scaled signs with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import Method, Properties, require
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.levels.level_compressor import check_blocks
from gradwire.methods.signs.scaledsign import ScaledSign

__all__ = ["EFSignSGD"]


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(ErrorFeedback):
    r"""EF-signSGD: what the scaled sign leaves out is added to the next gradient.

    With g_i worker i's gradient of a parameter (or block) of d elements, and e_i its residual, zero at first::

        p_i = g_i + e_i        mean = (1 / N) sum_i (|p_i|_1 / d) sign(p_i)        e_i <- p_i - (|p_i|_1 / d) sign(p_i)

    The paper's p = gamma g + e holds steps; here residuals are in units of the gradient, the same for a constant
    learning rate gamma, and without a rescaling when it changes. Unlike :class:`SignSGD` the outcome is a mean.

    The algorithm of the paper has no momentum. With one scale for a whole parameter the residual of a real model grows
    to several times the length of the gradient and arrives as delayed bursts. Beside them, an optimizer's momentum
    overshoots: use ``torch.optim.SGD`` without momentum at a higher learning rate, or ``block_size=64``, which keeps
    the residual short, or ``momentum=0.9``, which each worker applies before compression, with none in the optimizer.
    ``docs/quantisers.md`` has the figures.

    Args:
        block_size: Elements d that share a scale, a multiple of 16; None: all of a parameter, as in the paper.
        momentum: Applied before compression, as :class:`ErrorFeedback` describes; above 0 the optimizer must have
            none.
        compressor: Another way to write the block size: ``ScaledSign(block_size=...)``.

    Raises:
        HyperparameterError: ``block_size`` or ``momentum`` is out of range, or ``compressor`` is no
            :class:`ScaledSign`, or one of another block size.

    Reference: S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> first = gw.simulate(torch.tensor([[3.0, -1.0, -1.0, 3.0]]), "ef_signsgd")
        >>> first.mean, first.state["rank 0"]["residual/0"]
        (tensor([ 2., -2., -2.,  2.]), tensor([1., 1., 1., 1.]))
    """

    # Decided by the block size, so that the spec does not show it.
    compressor: Method = field(default_factory=ScaledSign, repr=False, kw_only=False)
    block_size: int | None = None

    name: ClassVar[str] = "ef_signsgd"
    on_device: ClassVar[bool] = True
    unbiased_note: ClassVar[str | None] = None
    properties: ClassVar[Properties] = Properties(
        summary="Scaled signs; what they leave out is added to the next gradient",
        paper="Karimireddy et al., ICML 2019",
        bit_stable=True,
        bits_per_element=2.0,
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        given = self.compressor
        if not isinstance(given, ScaledSign):
            raise HyperparameterError(
                f"EFSignSGD: compressor is ScaledSign(block_size=...), not {given!r}: use ErrorFeedback for another"
            )
        check_blocks("EFSignSGD", self.block_size, "parameter")
        # One of the two may be left at its default; a size that was given twice must be the same.
        sizes = {size for size in (self.block_size, given.block_size) if size is not None}
        require(
            len(sizes) < 2,
            "EFSignSGD",
            f"block_size={self.block_size!r} and compressor={given!r} differ: leave compressor out",
        )
        object.__setattr__(self, "block_size", next(iter(sizes), None))
        object.__setattr__(self, "compressor", ScaledSign(block_size=self.block_size))
        super().__post_init__()
