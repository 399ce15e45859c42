"""1-bit SGD: a bit an element, two values a column, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.algorithms.error_feedback import Feedback
from gradwire.codecs import SignCodec
from gradwire.compressors import ScaledSign
from gradwire.methods import Properties
from gradwire.protocols.bucket_plan import Algorithm, BucketPlan, PlanSetting, SectionPlan
from gradwire.segments import Parameter, Segment

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["OneBit"]


@dataclass(frozen=True, kw_only=True)
class OneBit(Algorithm):
    r"""1-bit SGD: which side of zero an element lies on, the mean of each side, and error feedback.

    With g_i worker i's gradient, e_i its residual, zero at first, and j a column::

        p_i = g_i + e_i        Q(p)_kj = mean of the p_lj >= 0 if p_kj >= 0 else mean of the p_lj < 0
        mean = (1 / N) sum_i Q(p_i)        e_i <- p_i - Q(p_i)

    A *column* is what feeds one output: elements of one index of the first dimension, a row of ``torch.nn.Linear``'s
    weight and a filter of a convolution (as they lie in memory). A parameter with one dimension is a single column. A
    side without an element has the mean zero.

    Q is the least-squares choice for that partition: |Q(p)|^2 + |p - Q(p)|^2 = |p|^2, and the error of a column is at
    most that of :class:`ScaledSign` on it, 1 - 2/pi for a long Gaussian one.

    Every worker receives every worker's bits. The paper's other way, where the owner of a stripe quantises the sum
    again with a residual of its own, is not offered. Unquantised steps at the beginning, which the paper needs, are
    ``attach(..., warmup_steps=...)``.

    Wire: 1 + 64/m bits an element for columns of m: float32 pairs, then bits (``docs/wire-format.md``). Short columns
    are wasteful (2 bits at m = 64, 8 at m = 9): leave such parameters out with ``exclude``. Draws nothing.

    Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014, sections 3.1 and 3.2.

    Example:
        >>> import torch, gradwire as gw
        >>> w = torch.tensor([[1.0, 3.0, -4.0], [2.0, 2.0, 2.0]])
        >>> gw.simulate([{"w": w}], gw.OneBit()).mean["w"]
        tensor([[ 2.,  2., -4.],
                [ 2.,  2.,  2.]])
    """

    name: ClassVar[str] = "onebit"
    needs_loss_scale: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("residual",)
    tag: ClassVar[int] = 19
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    kernels: ClassVar[tuple[str, ...]] = ("signs",)
    properties: ClassVar[Properties] = Properties(
        summary="A bit an element and two means a column, with error feedback",
        paper="Seide et al., 1-bit SGD, Interspeech 2014",
        unbiased=False,
        bit_stable=True,
        bits_per_element=2.0,
        delta="at least 1/m for columns of m; 2/pi for a long Gaussian one",
        state="a residual per parameter and rank",
    )

    @property
    def innermost(self) -> ScaledSign:
        """Any operator for the same protocol: nothing of it is used where everything travels in float32."""
        return ScaledSign()

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SignCodec:
        length = [_column(s.parameter) for s in segments]
        return SignCodec(kernels, segments, world_size, length=length, sides=2)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return Feedback(SectionPlan(self, setting), setting.segments)


def _column(parameter: Parameter) -> int:
    """Elements of a column."""
    shape = parameter.shape
    return max(1, parameter.numel // shape[0] if len(shape) > 1 and shape[0] else parameter.numel)
