"""gTop-k: payloads merged pair by pair, each merge keeping the largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Method, Properties
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm, momentum_beside_residual
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.sparse.top_k import TopK


@dataclass(frozen=True, kw_only=True)
class GTopK(ResidualAlgorithm):
    r"""gTop-k: workers' largest elements merged pair by pair, every merge keeping the k largest, with error feedback.

    With p_i = g_i + e_i of d elements and k = max(1, floor(density d))::

        x_i = TopK_k(p_i)      x <- TopK_k(x_low + x_high)  in each merge      mean = x / N      e_i <- p_i - sent_i

    A message has k elements however many workers there are, and each worker sends log2(N) of them where a gather sends
    N - 1. The outcome has k elements at most, the same on all workers: nearly the k largest of the sum of all x_i, but
    not exactly, since what a merge leaves out may have grown in a later one.

    ``sent_i`` is x_i less what was left out of the merges of which worker i keeps the rest: the first of all the
    workers that do the same merge. So the sum over workers of ``sent_i`` is the outcome, and nothing is lost. The
    paper's workers put back what is not in the outcome and forget what was left out on the way of elements that are in
    it: with four workers or more, mass is lost.

    Args:
        density: Share k/d of the elements, above 0 to 1; the paper: 0.001.
        blocks: "model": the largest of all parameters together, as the authors' program does, which needs the whole
            step; or "parameter": those of each.
        values: How values travel: ``FP32()``, ``BF16()``, or an operator with levels that is a contraction, as for
            :class:`TopK`; every merge rounds once more. What rounding loses is kept, too.
        momentum: Applied before compression, as :class:`ErrorFeedback` describes; above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range, or ``values`` is no contraction.

    With the option ``collective="two_shot_merged"``, and ``blocks="model"``, the elements are dealt to the workers in
    shares. Each worker merges all workers' k / N largest of its own share and tells all others the k / N largest of
    their sum: a worker sends less than 2 k elements, whatever N, where the tree sends k log2(N). The outcome then has
    the largest of each share instead of the largest of all.

    Wire: payloads of :class:`TopK`, by recursive doubling or by shares (``docs/wire-format.md``), for any number of
    workers.

    Reference: S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks", ICDCS 2019, algorithms 2 and 4.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[3.0, 0.0, 1.0, 0.0], [0.0, 2.0, 1.5, 0.0]])
        >>> found = gw.simulate(g, gw.GTopK(density=0.25))
        >>> found.mean, [found.state[f"rank {r}"]["residual/(model)"].tolist() for r in (0, 1)]
        (tensor([1.5000, 0.0000, 0.0000, 0.0000]), [[0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 1.5, 0.0]])
    """

    density: float = 0.1
    blocks: str = "model"
    values: Method = field(default_factory=FP32)
    momentum: float = 0.0

    name: ClassVar[str] = "gtopk"
    properties: ClassVar[Properties] = Properties(
        summary="Workers' largest elements merged pair by pair, each merge keeping the largest, with error feedback",
        paper="Shi et al., ICDCS 2019",
        bit_stable=True,
        bits_per_element=2 / 1.5 * 0.1 * (32 + 4.8),
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", checked_momentum("GTopK", self.momentum))
        operator = TopK(density=self.density, blocks=self.blocks, values=self.values)
        check_contraction("GTopK", operator, "so its residual may grow without bound", "no residual")
        object.__setattr__(self, "density", operator.density)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # The paper's tree, and where elements of all parameters are compared, owners who merge shares of these.
            collectives=("tree", "two_shot_merged") if (self.blocks == "model") else ("tree",),
            # Whether elements of all parameters are compared.
            whole_step=(self.blocks == "model"),
            # Whether elements of all parameters are compared.
            joined=self.blocks == "model",
            kernels=self.operator.traits.kernels,
            unbiased=False,
            unbiased_note="no; nothing is lost",
        )

    def usual_collective(self, world_size: int) -> str | None:
        # The paper's, whose outcome is another one.
        return "tree" if self.traits.joined else None

    @property
    def operator(self) -> TopK:
        """The operator of each worker, and of each merge."""
        return TopK(density=self.density, blocks=self.blocks, values=self.values)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        numel = max((p.numel() for p in parameters.values()), default=1)
        return momentum_beside_residual(self, optimizer, self.operator.delta_of(numel) or 0.0)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(SectionPlan(self.operator, setting), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        dense = [replace(s, dense=True) for s in setting.segments]
        return self._after_momentum(
            SectionPlan(self.operator, replace(setting, segments=dense, collective="two_shot")), setting
        )
