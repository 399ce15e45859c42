"""CLT-k: the elements that are largest on one worker, each in its turn, summed over all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Properties, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome, leader
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.methods.feedback.error_feedback import Feedback, ResidualAlgorithm, momentum_beside_residual
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.sparse.leaders_elements import LeadersElements
from gradwire.methods.sparse.top_k import TopK, check_density
from gradwire.methods.wrappers.transformed import TransformedPlan
from gradwire.methods.wrappers.wrapper import pieces

__all__ = ["CLTk", "LeadersPlan"]


@dataclass(frozen=True, kw_only=True)
class CLTk(ResidualAlgorithm):
    r"""CLT-k (cyclic local top-k): all workers send the elements that are largest on one of them, the leader.

    With p_i = g_i + e_i of d elements, k = max(1, floor(density d)) and the leader l = round mod N::

        S = the k elements of the largest magnitude of p_l
        mean_j = (1 / N) sum_i p_ij  for j in S, 0 elsewhere
        e_i <- e_i + beta (g_i - sent_i)        sent_ij = p_ij  for j in S, 0 elsewhere

    The leader tells the others S, once; values then add up as a vector of k elements does, so that traffic does not
    grow with the number of workers, where :class:`TopK` gathers k elements and their positions of every worker. It
    works as far as residuals of different workers are large in the same places, which the paper finds they are.

    ``beta`` is the paper's low-pass filter: below 1 a residual follows what is left out slowly, which calms training at
    high learning rates and with many workers. With 1, which is plain error feedback, nothing is lost.

    Args:
        density: Share k/d of each parameter that is sent, above 0 to 1; the paper: 0.001.
        beta: Share of a round's change that the residual takes up, above 0 to 1.
        momentum: Applied before compression, as :class:`ErrorFeedback` describes; above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range.

    What is not sent is looked at all the same: an infinity or a NaN anywhere in a parameter, on any worker, makes its
    outcome +inf everywhere on all.

    Wire: positions from the leader to all by a broadcast, then values and what is not compressed, in float32 by
    two-shot or a gather (``docs/wire-format.md``).

    Reference: C.-Y. Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
    Distributed Training", NeurIPS 2020, algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[4.0, 1.0, 0.0, 0.0], [2.0, 3.0, 5.0, 0.0]])
        >>> found = gw.simulate(g, gw.CLTk(density=0.5))
        >>> found.mean, [found.state[f"rank {r}"]["residual/0"].tolist() for r in (0, 1)]
        (tensor([3., 2., 0., 0.]), [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    """

    density: float = 0.1
    beta: float = 1.0
    momentum: float = 0.0

    name: ClassVar[str] = "clt_k"
    tag: ClassVar[int] = 54
    collectives: ClassVar[tuple[str, ...]] = ("two_shot", "all_gather")
    kernels: ClassVar[tuple[str, ...]] = ("selection", "indices", "signs")
    unbiased: ClassVar[bool] = False
    unbiased_note: ClassVar[str | None] = "no; with beta=1 nothing is lost"
    properties: ClassVar[Properties] = Properties(
        summary="The elements that are largest on one worker, each in its turn, summed over all, with error feedback",
        paper="Chen et al., ScaleCom, NeurIPS 2020",
        bit_stable=True,
        bits_per_element=0.1 * (32 + 4.8 * 2 * 2 / 3),
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("CLTk", self.density))
        object.__setattr__(self, "momentum", checked_momentum("CLTk", self.momentum))
        number = isinstance(self.beta, int | float) and not isinstance(self.beta, bool)
        require(number and 0 < self.beta <= 1, "CLTk", f"beta is above 0 and at most 1, not {self.beta!r}")
        object.__setattr__(self, "beta", float(self.beta))

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        numel = max((p.numel() for p in parameters.values()), default=1)
        return momentum_beside_residual(self, optimizer, TopK(density=self.density).delta_of(numel) or 0.0)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        inner = LeadersPlan(setting, self.density, self.tag)
        if self.beta == 1:
            return self.fed_back(inner, setting)
        return self._after_momentum(_Filtered(inner, setting.segments, self.beta), setting)


class LeadersPlan(TransformedPlan):
    """Exchanges the values of the leader's elements as though they were the parameters.

    Args:
        setting: Of the bucket.
        density: Share of each parameter.
        tag: Of the payload that tells positions.
        ordered: As for :class:`LeadersElements`.

    Attributes:
        elements: Chooses and tells them.
        places: In the bucket, of the round's elements.
    """

    def __init__(self, setting: PlanSetting, density: float, tag: int, *, ordered: bool = False) -> None:
        self.elements = LeadersElements(setting, density, ordered=ordered)
        self._tag = tag
        self.places = torch.empty(0, dtype=torch.int64)
        super().__init__(None, setting, self.elements.counts)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        places = yield from self.elements.run(context, self._tag, flat, leader(context.round, context.world_size))
        self.places = places
        return (yield from super().prepare(context, flat))

    def gather(self, round: int, flat: torch.Tensor, slots: torch.Tensor) -> None:
        torch.index_select(flat, 0, self.places, out=slots)

    def scatter(self, round: int, slots: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        if add:
            flat.index_add_(0, self.places, slots)
            return
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        flat.index_copy_(0, self.places, slots)


class _Filtered(Feedback):
    """Keeps a residual that takes up ``beta`` of what a round changes."""

    def __init__(self, inner: BucketPlan, segments: Any, beta: float) -> None:
        super().__init__(inner, segments)
        self._beta = beta

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        outcome = super().after(context, flat, outcome)
        held, staged = (side("residual", self.segments) for side in (context.memory.read, context.memory.stage))
        for a, b in pieces(self.runs[context.chunk]):
            staged[a:b].sub_(held[a:b]).mul_(self._beta).add_(held[a:b])
        return outcome
