"""1-bit SGD: one bit an element, two values a column, and error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradwire.exchange.method import Properties
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.feedback.waiting import momentum_beside_residual
from gradwire.methods.levels.level_compressor import check_blocks
from gradwire.methods.signs.sign_codec import SignCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class OneBit(ResidualAlgorithm):
    r"""1-bit SGD: one bit for each element's sign, the mean of each sign, and error feedback.

    With g_i worker i's gradient, e_i its residual, zero at first, and j a column::

        p_i = g_i + e_i        Q(p)_kj = mean of the p_lj >= 0 if p_kj >= 0 else mean of the p_lj < 0
        mean = (1 / N) sum_i Q(p_i)        e_i <- p_i - Q(p_i)

    A *column* holds the weights of one output: the elements of one index of the first dimension, a row of
    ``torch.nn.Linear``'s weight and a filter of a convolution (in memory order). A parameter with one dimension is a
    single column. With ``block_size``, blocks of that many elements are used instead of columns. A side without
    elements has the mean zero.

    Q is the least-squares choice for that partition: |Q(p)|^2 + |p - Q(p)|^2 = |p|^2, and the error of a column is at
    most that of :class:`ScaledSign` on it, 1 - 2/pi for a long Gaussian one.

    Every worker receives every worker's bits. The paper's alternative, where the owner of a stripe quantises the sum
    again with its own residual, is not implemented. For the uncompressed first steps of the paper use
    ``attach(..., warmup_steps=...)``. For momentum with a residual see :class:`EFSignSGD`.

    Args:
        block_size: Elements that share two means, a multiple of 16; None: a column, as in the paper.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: ``block_size`` or ``momentum`` is out of range.

    Wire: for columns (or blocks) of m elements a worker's payload has 1 + 64/m bits an element: float32 pairs, then
    bits (``docs/wire-format.md``). It is sent to N - 1 workers. On the scale where a float32 all-reduce takes 32 bits
    an element, that is N/2 (1 + 64/m) bits, or 2 + 128/m with four workers. Short columns are expensive (with four
    workers 4 bits at m = 64, 16.2 at m = 9): exclude such parameters with ``exclude``, or use blocks. No random numbers
    are drawn.

    Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014, sections 3.1 and 3.2.

    Example:
        >>> import torch, gradwire as gw
        >>> w = torch.tensor([[1.0, 3.0, -4.0], [2.0, 2.0, 2.0]])
        >>> gw.simulate([{"w": w}], gw.OneBit()).mean["w"]
        tensor([[ 2.,  2., -4.],
                [ 2.,  2.,  2.]])
    """

    block_size: int | None = None
    momentum: float = 0.0

    name: ClassVar[str] = "onebit"
    tag: ClassVar[int] = 19
    delta_formula: ClassVar[str | None] = "at least 1/m for columns or blocks of m, of g + e"
    properties: ClassVar[Properties] = Properties(
        summary="A bit an element and two means a column, with error feedback",
        paper="Seide et al., 1-bit SGD, Interspeech 2014",
        bit_stable=True,
        bits_per_element=2.0,
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
    )

    def __post_init__(self) -> None:
        check_blocks("OneBit", self.block_size, "parameter")
        object.__setattr__(self, "momentum", checked_momentum("OneBit", self.momentum))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            kernels=("signs",),
            on_device=True,
            scatters=True,
            unbiased=False,
        )

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        run = max((self._run(Parameter.of(name, p)) for name, p in parameters.items()), default=1)
        return momentum_beside_residual(self, optimizer, delta=1 / run)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SignCodec:
        length = [self._run(s.parameter) for s in segments]
        return SignCodec(kernels, segments, world_size, length=length, sides=2)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(SectionPlan(self, setting), setting)

    def _run(self, parameter: Parameter) -> int:
        """Return the number of elements of a parameter that share two means."""
        return self.block_size or _column(parameter)


def _column(parameter: Parameter) -> int:
    """Return the number of elements of a column."""
    shape = parameter.shape
    return max(1, parameter.numel // shape[0] if len(shape) > 1 and shape[0] else parameter.numel)
