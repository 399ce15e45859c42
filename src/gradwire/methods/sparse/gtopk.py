"""gTop-k: sparse payloads merged in pairs, where each merge keeps the largest elements."""

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
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.feedback.waiting import expected_wait, longest, momentum_beside_residual
from gradwire.methods.sparse.top_k import TopK


@dataclass(frozen=True, kw_only=True)
class GTopK(ResidualAlgorithm):
    r"""gTop-k: workers' largest elements merged in pairs, where each merge keeps the k largest, with error feedback.

    With p_i = g_i + e_i of d elements and k = max(1, floor(density d))::

        x_i = TopK_k(p_i)      x <- TopK_k(x_low + x_high)  in each merge      mean = x / N      e_i <- p_i - sent_i

    A message has k elements whatever the number of workers, and each worker sends log2(N) messages, where a gather
    sends N - 1. The outcome has at most k elements, the same on all workers: nearly the k largest of the sum of all
    x_i, but not exactly, since an element left out of a merge could have grown in a later one.

    ``sent_i`` is x_i minus the elements left out of the merges for which worker i is responsible: for each merge the
    first of the workers that compute it. So the sum over workers of ``sent_i`` is the outcome, and nothing is lost. In
    the paper workers keep only elements that are not in the outcome, so with four workers or more, parts of elements
    that were left out of a merge and are in the outcome are lost.

    Args:
        density: Share k/d of the elements, above 0 to 1; the paper: 0.001.
        blocks: "model", the largest of all parameters together, as in the authors' program, which needs the whole
            gradient; or "parameter", the largest of each.
        values: Encoding of values: ``FP32()``, ``BF16()``, or an operator with levels that is a contraction, as for
            :class:`TopK`. Every merge rounds once more; the rounding error is added to the residual.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range, or ``values`` is not a contraction.

    With the option ``collective="two_shot_merged"``, and ``blocks="model"``, every worker owns a share of the elements.
    It merges all workers' k / N largest of its share and sends the k / N largest of their sum to all others: a worker
    sends fewer than 2 k elements, whatever N, where the tree sends k log2(N). The outcome then has the largest of each
    share instead of the largest of all.

    Wire: payloads of :class:`TopK`, by recursive doubling or by shares (``docs/wire-format.md``), for any number of
    workers.

    Reference: S. Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
    Bandwidth Networks", ICDCS 2019, algorithms 2 and 4.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[3.0, 0.0, 1.0, 0.0], [0.0, 2.0, 1.5, 0.0]])
        >>> found = gw.simulate(g, gw.GTopK(density=0.25))
        >>> found.mean, [found.state[f"rank {r}"]["residual/0"].tolist() for r in (0, 1)]
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
            # The paper's tree or, if elements of all parameters are compared, owners who merge shares.
            collectives=("tree", "two_shot_merged") if (self.blocks == "model") else ("tree",),
            # True if elements of all parameters are compared.
            whole_step=(self.blocks == "model"),
            # True if elements of all parameters are compared.
            joined=self.blocks == "model",
            kernels=self.operator.traits.kernels,
            unbiased=False,
            unbiased_note="no; nothing is lost",
        )

    def usual_collective(self, world_size: int) -> str | None:
        # The paper's tree is the default, since the other protocol has another outcome.
        return "tree" if self.traits.joined else None

    @property
    def operator(self) -> TopK:
        """Operator of each worker, and of each merge."""
        return TopK(density=self.density, blocks=self.blocks, values=self.values)

    def wait_of(self, numel: int | None = None) -> float | None:
        delta = self.operator.typical_delta_of(numel)
        return None if delta is None else expected_wait(delta)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        numel = longest(parameters)
        delta = self.operator.delta_of(numel) or 0.0
        return momentum_beside_residual(self, optimizer, wait=self.wait_of(numel), delta=delta)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(SectionPlan(self.operator, setting), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        dense = [replace(s, dense=True) for s in setting.segments]
        return self._after_momentum(
            SectionPlan(self.operator, replace(setting, segments=dense, collective="two_shot")), setting
        )
