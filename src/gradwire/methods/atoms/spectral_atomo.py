"""Spectral ATOMO: singular vectors kept at random with the best probability for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.method import Method, Properties, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.methods.atoms.singular_codec import SingularCodec

if TYPE_CHECKING:
    from gradwire.exchange.segments import Segment
    from gradwire.kernels import Kernels

__all__ = ["SpectralATOMO"]


@dataclass(frozen=True, kw_only=True)
class SpectralATOMO(Method):
    r"""Spectral ATOMO: the singular vectors of every parameter as a matrix, each pair kept at random.

    With X = sum_k sigma_k u_k v_k^T and independent t_k, 1 with the probability p_k and else 0::

        Q(X) = sum_k (sigma_k t_k / p_k) u_k v_k^T      p_k = min(1, sigma_k / c)      sum_k p_k = budget

    Unbiased, with the variance sum_k sigma_k^2 (1 / p_k - 1), the least of all p with that sum. A matrix of a rank up
    to the budget is exact, and so is a parameter with one dimension, whose only singular value always travels.

    A parameter is a matrix of its outermost dimension in memory by all others, as for :class:`PowerSGD`. Each worker
    decomposes its own gradient, with LAPACK: for large matrices that takes far longer than a step, which is the
    method's price. What it sends is decoded alike by all, in an order that is stated.

    Args:
        budget: Pairs of a matrix that are kept on average, at least 1.

    Raises:
        HyperparameterError: ``budget`` is out of range.

    Wire: ``docs/wire-format.md``. On average 32 budget (rows + columns) bits a matrix and worker. Draws from the rank's
    stream.

    Reference: H. Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS 2018,
    section 5. The authors' program cuts probabilities off at 1 without giving what is left of the budget to the others,
    and draws again where nothing was kept, which is biased; here neither is done.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.outer(torch.arange(1.0, 5.0), torch.ones(6))
        >>> torch.allclose(gw.simulate([{"w": x}], gw.SpectralATOMO(budget=1.0)).mean["w"], x)
        True
    """

    budget: float = 3.0

    name: ClassVar[str] = "spectral_atomo"
    tag: ClassVar[int] = 38
    cut: ClassVar[int] = 1 << 40
    share_cut: ClassVar[int] = 1 << 40
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    kernels: ClassVar[tuple[str, ...]] = ("low_rank",)
    unbiased: ClassVar[bool] = True
    properties: ClassVar[Properties] = Properties(
        summary="Pairs of singular vectors kept at random with the probabilities of the least variance",
        paper="Wang et al., ATOMO, NeurIPS 2018",
        bit_stable=False,
        bits_per_element=2 * 32 * 3 * 2000 / 1000**2,
        stream="rank",
    )

    def __post_init__(self) -> None:
        value = self.budget
        known = isinstance(value, int | float) and not isinstance(value, bool)
        require(
            known and 1 <= value < 2**15, "SpectralATOMO", f"budget is a number of pairs, 1 to 32767, not {value!r}"
        )
        object.__setattr__(self, "budget", float(value))

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return SectionPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return SectionPlan(self, replace(setting, segments=[replace(s, dense=True) for s in setting.segments]))

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SingularCodec:
        """Bind it to segments."""
        return SingularCodec(kernels, segments, world_size, seed, budget=self.budget)
