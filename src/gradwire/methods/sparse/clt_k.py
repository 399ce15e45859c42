"""CLT-k: values at the largest elements of one worker's vector, the leader's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.method import Properties, is_number, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome, broadcast, leader
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import Packing, Whole, padded
from gradwire.methods.feedback.error_feedback import Feedback, ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.feedback.waiting import expected_wait, longest, momentum_beside_residual
from gradwire.methods.sparse.sparse_codec import LargestRule, SparseCodec, SparseSummary
from gradwire.methods.sparse.sparse_values import NoValues, UnitTable
from gradwire.methods.sparse.top_k import TopK, check_density
from gradwire.methods.wrappers.wrapper import TransformedPlan, pieces

Integers: TypeAlias = npt.NDArray[np.int64]

FIFTH_EXCHANGE = 4
"""Number of the exchange of positions; means and earlier exchanges have lower numbers."""


class LeadersElements:
    """Choice of each compressed parameter's elements of the largest magnitude in one worker's vector, for all workers.

    Positions are sent in the shortest format. If the leader's order matters, they are followed, for each position in
    ascending order, by its rank in that order within its parameter, in as many bits as the ranks of that parameter
    need, from the lowest bit of each byte up.

    Args:
        setting: Setting of the bucket, whose backend has the families "selection" and "indices".
        density: Share of each parameter that is chosen.
        ordered: True for descending order of the leader's values within each parameter, False for ascending positions.

    Attributes:
        counts: Number of elements of each parameter.
        numel: Number of elements of all parameters.
        codec: Codec of positions without values.
    """

    def __init__(self, setting: PlanSetting, density: float, *, ordered: bool = False) -> None:
        light = divide(setting.segments)[0]
        units = UnitTable(light, [1] * len(light))
        rule = LargestRule(density)
        self.codec = SparseCodec(setting.kernels, units, 1, rule=rule, block=None, values=NoValues())
        if setting.coder is not None:
            self.codec.use_coder(setting.coder)
        self.counts: list[int] = rule.most(self.codec.blocks).tolist()
        self.numel = sum(self.counts)
        self._ordered = ordered
        self._width = [max(0, (n - 1).bit_length()) for n in self.counts]
        self._order_bytes = -(-sum(n * w for n, w in zip(self.counts, self._width)) // 8) if ordered else 0
        self._ends = list(accumulate(self.counts, initial=0))

    @property
    def packings(self) -> list[Packing]:
        """Section of positions, and of their order if it is sent."""
        order: list[Packing] = [Whole(padded(self._order_bytes))] if self._ordered else []
        return [self.codec.packing(self.codec.units), *order]

    def write(self, flat: torch.Tensor, room: torch.Tensor) -> list[torch.Tensor]:
        """Choose elements of ``flat`` and return their payload, whose first part is in ``room``."""
        self.codec.encode(flat, SparseSummary(), Draw(0, 0), room)
        if not self._ordered:
            return [room]
        chosen = self.codec.read(room)[0]
        values, place = flat[self.codec.table.places(chosen)], torch.empty(self.numel, dtype=torch.int64, device="cpu")
        for a, b in pairwise(self._ends):
            order = torch.sort(values[a:b], descending=True, stable=True).indices
            place[a:b][order] = torch.arange(b - a, device="cpu")
        owner, bit = self._bits()
        packed = np.packbits((place.numpy()[owner] >> bit & 1).astype(np.uint8), bitorder="little")
        out = torch.zeros(padded(self._order_bytes), dtype=torch.uint8, device="cpu")
        out[: len(packed)] = torch.from_numpy(packed)
        return [room, out]

    def read(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Decode a payload: return the elements' places in the bucket, in their order, int64.

        Raises:
            PayloadError: the order has an element twice, or the number of elements is wrong.
        """
        chosen, _ = self.codec.read(parts[0])
        if list(self.codec.table.counts(chosen)) != self.counts:
            raise PayloadError(f"positions of {len(chosen)} elements are told, where {self.numel} are needed")
        places = self.codec.table.places(chosen).long()
        if not self._ordered:
            return places
        owner, bit = self._bits()
        bits = np.unpackbits(parts[1].numpy(), count=len(owner), bitorder="little").astype(np.int64)
        place = np.zeros(self.numel, np.int64)
        np.add.at(place, owner, bits << bit)
        place += np.repeat(self._ends[:-1], self.counts)
        if not np.array_equal(np.sort(place), np.arange(self.numel)):
            raise PayloadError("the order of elements names one of them twice")
        ordered = torch.empty_like(places)
        ordered[torch.from_numpy(place)] = places
        return ordered

    def run(self, context: Context, tag: int, flat: torch.Tensor, root: int) -> Exchange[torch.Tensor]:
        """Return the places in the bucket of the largest elements of rank ``root``'s ``flat``, on every rank.

        Bytes sent by a rank: those of a broadcast of header, positions and, if it is sent, their order.
        """
        if not self.numel:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        space, bodies = context.workspace.part("leader"), None
        if context.rank == root and not flat.is_meta:
            bodies = self.write(flat, space.get("positions", self.codec.payload_bytes(self.codec.units)))
        context = replace(context, workspace=space, exchange=FIFTH_EXCHANGE)
        parts = yield from broadcast(context, tag, self.packings, bodies, root)
        return torch.empty(0, dtype=torch.int64, device="cpu") if flat.is_meta else self.read(parts)

    def _bits(self) -> tuple[Integers, Integers]:
        """Return for each bit of the order its element, and its place in that element's number."""
        width = np.repeat(self._width, self.counts)
        owner = np.repeat(np.arange(self.numel), width)
        return owner, np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)


@dataclass(frozen=True, kw_only=True)
class CLTk(ResidualAlgorithm):
    r"""CLT-k (cyclic local top-k): all workers send the elements that are largest on one worker, the leader.

    With p_i = g_i + e_i of d elements, k = max(1, floor(density d)) and the leader l = round mod N::

        S = the k elements of the largest magnitude of p_l
        mean_j = (1 / N) sum_i p_ij  for j in S, 0 elsewhere
        e_i <- e_i + beta (g_i - sent_i)        sent_ij = p_ij  for j in S, 0 elsewhere

    The leader broadcasts S; values then add up as a vector of k elements does, so traffic does not grow with the number
    of workers, while :class:`TopK` gathers k elements and positions of every worker. The method relies on residuals of
    different workers being large in the same places, as the paper finds.

    ``beta`` is the paper's low-pass filter: below 1 a residual follows the unsent values slowly, which stabilises
    training at high learning rates and with many workers. With 1, which is plain error feedback, nothing is lost.

    Args:
        density: Share k/d of each parameter that is sent, above 0 to 1; the paper: 0.001.
        beta: Share of a round's change that is added to the residual, above 0 to 1.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range.

    Unsent elements are checked, too: an infinity or a NaN anywhere in a parameter, on any worker, makes the whole
    parameter +inf on all workers.

    Wire: a broadcast of the leader's positions, then values and uncompressed parameters, in float32 by two-shot or a
    gather (``docs/wire-format.md``).

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
        require(is_number(self.beta, above=0, most=1), "CLTk", f"beta is above 0 and at most 1, not {self.beta!r}")
        object.__setattr__(self, "beta", float(self.beta))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            # All workers must lead in turn for each parameter.
            needs_every_round=True,
            kernels=("selection", "indices", "signs"),
            unbiased=False,
            unbiased_note="no; with beta=1 nothing is lost",
        )

    def wait_of(self, numel: int | None = None) -> float | None:
        # Workers with similar gradients: the leader's largest elements are about their own.
        delta = TopK(density=self.density).typical_delta_of(numel)
        return None if delta is None or self.beta < 1 else expected_wait(delta)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        numel = longest(parameters)
        delta = TopK(density=self.density).delta_of(numel) or 0.0
        return momentum_beside_residual(self, optimizer, wait=self.wait_of(numel), delta=delta)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        inner = LeadersPlan(setting, self.density, self.tag)
        if self.beta == 1:
            return self.fed_back(inner, setting)
        return self._after_momentum(_Filtered(inner, setting.segments, self.beta), setting)


class LeadersPlan(TransformedPlan):
    """Plan that exchanges the values of the leader's elements as parameters.

    Args:
        setting: Setting of the bucket.
        density: Share of each parameter that is chosen.
        tag: Tag of the payload of positions.
        ordered: See :class:`LeadersElements`.

    Attributes:
        elements: The choice, and the exchange of its positions.
        places: Places of the round's elements in the bucket.
    """

    def __init__(self, setting: PlanSetting, density: float, tag: int, *, ordered: bool = False) -> None:
        self.elements = LeadersElements(setting, density, ordered=ordered)
        self._tag = tag
        self.places = torch.empty(0, dtype=torch.int64, device="cpu")
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
    """Plan whose residual changes by ``beta`` times the change of a round."""

    def __init__(self, inner: BucketPlan, segments: Any, beta: float) -> None:
        super().__init__(inner, segments)
        self._beta = beta

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        outcome = super().after(context, flat, outcome)
        held, staged = (side("residual", self.segments) for side in (context.memory.read, context.memory.stage))
        for a, b in pieces(self.runs[context.chunk]):
            staged[a:b].sub_(held[a:b]).mul_(self._beta).add_(held[a:b])
        return outcome
