"""Hierarchical: exact means inside a node, another method between nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import Flag, both
from gradwire.exchange.method import Inherited, Method, Properties, is_whole, require
from gradwire.exchange.ops import Exchange, Scope
from gradwire.exchange.protocols import (
    Context,
    Outcome,
    ScopeChecks,
    ShardMemory,
    agree_on_finite,
    gather_shards,
    scatter_shards,
    within,
)
from gradwire.exchange.protocols.bucket_plan import DENSE_TAG, BucketPlan, PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import Parameter, Segment, cut_into_shards, join_compressed
from gradwire.exchange.traits import Traits
from gradwire.methods.ternary.terngrad import TernGrad
from gradwire.methods.wrappers.wrapper import Wrapper
from gradwire.seeds import shard_seed

NODE, BETWEEN = "node", "between nodes"

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Environment variable in which ``torchrun`` passes the number of ranks that it started on this node."""


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Wrapper):
    r"""Two levels: exact means inside a node, with its fast links, and another method between nodes.

    With M nodes of L ranks each, g_ml the gradient of rank l of node m, and [s] the s-th of L shards of a vector::

        1. inside each node       h_m[s] = (1 / L) sum_l g_ml[s]        at rank s of the node, in float32
        2. between nodes          y[s]   = method(h_1[s], ..., h_M[s])  among the s-th ranks of all nodes
        3. inside each node       y      = y[1], ..., y[L]              at every rank

    The first step is a reduce-scatter and the last an all-gather, both without loss: with ``FP32()`` the outcome is the
    mean over all ranks. The method compresses M vectors that are means over a node, so its error has M terms instead of
    N. Each rank keeps the state, such as a residual, of its own shard, 1 / L of the elements.

    **Shards.** Every parameter is cut into L runs of rows, so that methods on matrices still work; one with fewer than
    L rows is cut into runs of elements. Scales, levels and factors are per run. Parameters that are sent in float32 are
    cut as well. No rank has a whole gradient, so a method that clips each worker's gradient to a norm is refused.

    Args:
        compressor: Method between nodes.
        node_size: Number of ranks L of a node: ranks 0 to L - 1 are the first node. None: from LOCAL_WORLD_SIZE, which
            ``torchrun`` sets, unless ``groups`` are given.
        groups: Ranks of each node, if they are not in this order; all nodes have equal size.

    Raises:
        HyperparameterError: ``compressor`` is a method with local steps, one whose outcomes differ by rank,
            :class:`DGC` with ``clip_norm``, or another ``Hierarchical``; ``node_size`` is below 1, or given beside
            ``groups``; ``groups`` have different sizes, or do not contain each rank from 0 on once.
        IncompatibleError: when attached, if the nodes are not known, ranks cannot be divided into them, or there is
            only one.

    Bytes between nodes sent by a rank: those of the method with M ranks and 1 / L of the elements. Inside the node: 8
    (L - 1) / L an element.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0))
        >>> found = gw.simulate(g, gw.Hierarchical(compressor=gw.QSGDinf(), node_size=2))
        >>> sent = found.traffic.sent_within
        >>> 8 * sent["between nodes"] / 10_000 < 3, 8 * sent["node"] / 10_000 > 32
        (True, True)
    """

    compressor: Method = field(default_factory=TernGrad, kw_only=False)
    node_size: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None

    name: ClassVar[str] = "hierarchical"
    properties: ClassVar[Inherited] = Inherited(
        "compressor",
        Properties(
            summary="Exact inside a node, another method between nodes",
            paper="two levels, as of NCCL's and Horovod's hierarchical all-reduce",
            bit_stable=True,
            bits_per_element=1.6,
            state="the method's, of a shard",
            stream="the method's",
        ),
    )

    def __post_init__(self) -> None:
        owner, inner, size = "Hierarchical", self.compressor, self.node_size
        require(isinstance(inner, Method), owner, f"compressor is a method, such as TernGrad(), not {inner!r}")
        require(
            not (inner.traits.local_steps or inner.name == self.name),
            owner,
            f"{inner!r} exchanges parameters after several steps, or is of two levels itself: put Hierarchical inside, "
            "as in DiLoCo(inner=Hierarchical(EDEN(bits=4)))",
        )
        require(
            bool(inner.traits.collectives) and not inner.traits.outcomes_differ,
            owner,
            f"{inner!r} is no method with one outcome for all ranks: name one, such as TernGrad()",
        )
        require(
            not inner.traits.clips_gradient,
            owner,
            "clip_norm is a limit of the norm of a whole gradient, and between nodes each rank has only a shard: use "
            "DGC(clip_norm=None) and clip each worker's gradient before the exchange, or use DGC without Hierarchical",
        )
        whole = size is None or is_whole(size, 1)
        require(whole, owner, f"node_size is at least 1 rank, or None, not {size!r}")
        if self.groups is None:
            return
        require(size is None, owner, f"node_size={size} beside groups: leave one of them out")
        listed = isinstance(self.groups, Sequence) and all(isinstance(group, Sequence) for group in self.groups)
        require(listed, owner, f"groups are the ranks of each node, such as ((0, 1), (2, 3)), not {self.groups!r}")
        groups = tuple(tuple(group) for group in self.groups)
        object.__setattr__(self, "groups", groups)
        ranks = sorted(rank for group in groups for rank in group)
        require(
            ranks == list(range(len(ranks))) and len({len(group) for group in groups}) == 1,
            owner,
            f"groups are as many ranks for each node, each rank from 0 on once, not {groups!r}",
        )

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            joined=False,
            sharded=True,
            # The exchange of a shard has no state in common with that of another.
            own=traits.remembers,
            unbiased=self.compressor.traits.unbiased,
            unbiased_note=self.compressor.traits.unbiased_note,
        )

    def nodes(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node.

        Raises:
            IncompatibleError: they are not known, or ranks cannot be divided into them, or there is only one.
        """
        groups = self.groups
        if world_size == 1:
            return ((0,),)
        if groups is None:
            size = self.node_size or _local_world_size()
            if world_size % size:
                raise IncompatibleError(
                    f"{self!r}: {world_size} ranks are no multiple of {size} on each node; every node needs as many, "
                    "since each of its ranks exchanges a shard with one rank of every other node"
                )
            groups = tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))
        elif sum(len(group) for group in groups) != world_size:
            raise IncompatibleError(f"{self!r}: the groups have other ranks than the {world_size} that there are")
        if len(groups) < 2:
            raise IncompatibleError(
                f"{self!r}: all {world_size} ranks are on one node, and nothing travels between nodes: use FP32(), or "
                "state node_size"
            )
        return groups

    def scopes(self, world_size: int) -> Sequence[Scope]:
        nodes = self.nodes(world_size)
        return Scope(NODE, nodes, local=True), Scope(BETWEEN, tuple(zip(*nodes)))

    def terms(self, world_size: int) -> Mapping[str, object]:
        return {"nodes": self.nodes(world_size), **self.compressor.terms(len(self.nodes(world_size)))}

    def usual_collective(self, world_size: int) -> str | None:
        return super().usual_collective(len(self.nodes(world_size)))

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        size = len(self.groups[0]) if self.groups else self.node_size or _local_world_size()
        parts = [part for part, _ in cut_into_shards(parameter, size)]
        return [kept for part in parts for kept in self.compressor.kept_as(part)]

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return HierarchicalPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return HierarchicalPlan(self, setting, warm_up=True)


def _local_world_size() -> int:
    found = os.environ.get(LOCAL_WORLD_SIZE, "")
    if not found.isdecimal() or int(found) < 1:
        raise IncompatibleError(
            f"Hierarchical: how many ranks a node has is not known, since {LOCAL_WORLD_SIZE} is not set, as torchrun "
            "sets it: state node_size, such as Hierarchical(TernGrad(), node_size=8)"
        )
    return int(found)


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a bucket that one rank of a node exchanges.

    Attributes:
        segments: Its parts of parameters, as segments of a vector of the shard.
        places: The same parts as segments of the bucket's vector, for an exchange in float32.
        owners: Name of the parameter, by the name of a part.
    """

    segments: Sequence[Segment]
    places: Sequence[Segment]
    owners: Mapping[str, str]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(s.numel for s in self.segments)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of the shard in the bucket's vector: (begin, end), ascending."""
        return join((s.offset, s.offset + s.numel) for s in self.places)

    def vector(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its elements joined, as a view if they are adjacent."""
        parts = [flat[a:b] for a, b in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, flat: torch.Tensor, vector: torch.Tensor) -> None:
        """Write its elements back to the bucket."""
        parts = vector.split([b - a for a, b in self.runs])
        torch._foreach_copy_([flat[a:b] for a, b in self.runs], list(parts))


def shards_of(segments: Sequence[Segment], count: int) -> list[Shard]:
    """Cut the parameters of a bucket into shards, each for one rank of a node."""
    found: list[tuple[list[Segment], list[Segment], dict[str, str]]] = [([], [], {}) for _ in range(count)]
    for s in segments:
        for (own, places, owners), (part, begin) in zip(found, cut_into_shards(s.parameter, count)):
            if part.numel:
                at = own[-1].offset + own[-1].numel if own else 0
                own.append(Segment(part, at, 0, part.numel, s.dense))
                places.append(Segment(part, s.offset + begin, 0, part.numel, True))
                owners[part.name] = s.parameter.name
    return [Shard(*parts) for parts in found]


class HierarchicalPlan(BucketPlan):
    """Plan of a bucket on two levels, with a plan of the method for each shard.

    Attributes:
        shards: Shards, by the place of a rank in its node.
    """

    def __init__(self, method: Hierarchical, setting: PlanSetting, *, warm_up: bool = False) -> None:
        self._method, self._setting, self._warm_up = method.compressor, setting, warm_up
        self._node, self._between = method.scopes(setting.world_size)
        self.shards = shards_of([s for s in setting.segments if s.numel], len(self._node.groups[0]))
        self._plans: dict[int, BucketPlan] = {}
        self._seen: dict[int, torch.Tensor] = {}
        self.chunks, self.collective = 1, setting.collective
        self.runs = [join((s.offset, s.offset + s.numel) for s in setting.segments if s.numel and not s.dense)]
        first = next((i for i, shard in enumerate(self.shards) if shard.numel), None)
        self.finishes = first is not None and self.plan_of(first).finishes

    def plan_of(self, place: int) -> BucketPlan:
        """Return the method's plan of a shard, created at the first call: a rank needs only its own."""
        if place not in self._plans:
            segments = self.shards[place].segments
            joined = self._method.traits.joined
            setting = replace(
                self._setting,
                segments=join_compressed(segments) if joined else segments,
                world_size=len(self._between.ranks(self._node.groups[0][place])),
                seed=shard_seed(self._setting.seed, place),
            )
            plan = self._method.dense_plan if self._warm_up else self._method.plan
            self._plans[place] = plan(setting)
        return self._plans[place]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        yield from ()

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        place, size = self._node.place(context.rank)
        shard, places = self.shards[place], [s.places for s in self.shards]
        node = replace(
            context,
            rank=place,
            world_size=size,
            workspace=context.workspace.part(NODE),
            wants_sent=False,
            checks=ScopeChecks(context.checks, self._node.ranks(context.rank)),
        )
        if size > 1:
            yield from within(self._node, context.rank, scatter_shards(node, DENSE_TAG, places, flat))
        outcome = Outcome(True)
        if shard.numel:
            vector = shard.vector(flat)
            if context.wants_sent:
                self._seen[context.rank] = vector.clone()
            outcome = yield from within(
                self._between, context.rank, self._across(self._context(context, place), vector, place)
            )
            shard.put(flat, vector)
        finite = outcome.finite
        if size > 1:
            yield from within(self._node, context.rank, gather_shards(node, DENSE_TAG, places, flat))
            finite = yield from within(self._node, context.rank, agree_on_finite(finite))
        return Outcome(finite, outcome.sent)

    def _across(self, context: Context, vector: torch.Tensor, place: int) -> Exchange[Outcome]:
        """Exchange a shard with the ranks of other nodes that have the same."""
        plan, shard = self.plan_of(place), self.shards[place]
        prepared = yield from plan.prepare(context, vector)
        finite: Flag | None = True
        contributions = []
        for chunk in range(plan.chunks):
            space = context.workspace.chunk(chunk)
            outcome = yield from plan.run(replace(context, chunk=chunk, workspace=space), vector, prepared)
            finite = both(finite, outcome.finite)
            contributions.append(outcome.sent)

        def sent(out: torch.Tensor, weight: float) -> None:
            room = torch.zeros_like(vector)
            for contribution in contributions:
                if contribution is not None:
                    contribution(room, weight)
            for (a, b), part in zip(shard.runs, room.split([b - a for a, b in shard.runs])):
                out[a:b].add_(part)

        return Outcome(finite, None if None in contributions else sent)

    def _context(self, context: Context, place: int) -> Context:
        """Return the context of a shard's exchange, whose ranks have the same place in each node."""
        rank, nodes = self._between.place(context.rank)
        rates, owners = context.learning_rates, self.shards[place].owners
        return replace(
            context,
            rank=rank,
            world_size=nodes,
            # Ranks of other shards do not have the warning.
            warn=context.warn_here,
            workspace=context.workspace.part(BETWEEN),
            memory=ShardMemory(context.memory),
            checks=ScopeChecks(context.checks, self._between.ranks(context.rank)),
            learning_rates=None if rates is None else {part: rates[whole] for part, whole in owners.items()},
        )

    def finish(self, context: Context) -> Exchange[None]:
        # A rank without a shard of this bucket may have one of another, whose data waits for the end of the round.
        place, _ = self._node.place(context.rank)
        finishing = self.plan_of(place).finish(self._context(context, place))
        yield from within(self._between, context.rank, finishing)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        """Replace a gradient by this rank's contribution: its node's mean in its own shard, zeros elsewhere."""
        place, _ = self._node.place(context.rank)
        seen = self._seen.pop(context.rank, None)
        gradient.zero_()
        if seen is not None:
            self.plan_of(place).target_(self._context(context, place), seen)
            self.shards[place].put(gradient, seen)
