"""EF-signSGD: scaled signs with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gradwire.algorithms.error_feedback import ErrorFeedback
from gradwire.compressors import ScaledSign
from gradwire.methods import Method, Properties

__all__ = ["EFSignSGD"]


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(ErrorFeedback):
    r"""EF-signSGD: what the scaled sign leaves out is added to the next gradient.

    With g_i worker i's gradient of a parameter of d elements, and e_i its residual, zero at first::

        p_i = g_i + e_i        mean = (1 / N) sum_i (|p_i|_1 / d) sign(p_i)        e_i <- p_i - (|p_i|_1 / d) sign(p_i)

    The paper's p = gamma g + e holds steps; here residuals are in units of the gradient, the same for a constant
    learning rate gamma, and without a rescaling when it changes. Unlike :class:`SignSGD` the outcome is a mean: the
    learning rate is that of SGD, momentum and weight decay are the optimizer's.

    Args:
        compressor: The operator; ``ScaledSign(block_size=...)`` gives smaller blocks a scale each.

    Raises:
        HyperparameterError: ``compressor`` is no operator on one vector, or no contraction.

    Reference: S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> first = gw.simulate(torch.tensor([[3.0, -1.0, -1.0, 3.0]]), "ef_signsgd")
        >>> first.mean, first.state["rank 0"]["residual/0"]
        (tensor([ 2., -2., -2.,  2.]), tensor([1., 1., 1., 1.]))
    """

    compressor: Method = field(default_factory=ScaledSign)

    name: ClassVar[str] = "ef_signsgd"
    properties: ClassVar[Properties] = Properties(
        summary="Scaled signs; what they leave out is added to the next gradient",
        paper="Karimireddy et al., ICML 2019",
        unbiased=False,
        bit_stable=True,
        bits_per_element=2.0,
        delta="|p|_1^2 / (d |p|_2^2), at least 1/d for parameters of d; 2/pi for a Gaussian",
        state="a residual per parameter and rank",
    )
