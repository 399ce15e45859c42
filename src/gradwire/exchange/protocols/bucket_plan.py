"""How one bucket of gradients is exchanged: what happens once for the bucket, and what for each of its chunks.

A plan is made once for a bucket's layout and used every round. A driver runs :meth:`BucketPlan.prepare` first, then
:meth:`BucketPlan.run` for each chunk, in any number of lanes; a rank that runs them in one thread gets the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from gradwire.exchange.codecs import Codec, Constant, DenseCodec, SummableCodec
from gradwire.exchange.deferred_checks import Flag, all_hold, both
from gradwire.exchange.ops import Exchange, Reduce
from gradwire.exchange.protocols import (
    PROTOCOLS,
    REDUCE_SCATTER,
    SHARED_OUT,
    Context,
    Outcome,
    ShardSections,
    Share,
    all_reduce,
    gathered_mean,
)
from gradwire.exchange.protocols.pieces import Pieces, cut, join, shard_out, share_out
from gradwire.exchange.protocols.sections import Bound, BoundChunk, BoundPart, BoundShard, Prepared
from gradwire.exchange.protocols.shares import reduce_scatter
from gradwire.exchange.segments import Segment, divide
from gradwire.exchange.traits import Traits

if TYPE_CHECKING:
    from gradwire.kernels import Coder, Kernels


DENSE_TAG = 127
"""Wire tag of payloads that hold nothing but float32, as in warm-up rounds."""

FEW_BYTES = 1 << 19
"""Values that a cast leaves alone go to each rank in a message of their own up to this many bytes; beyond by a ring."""


class BucketPlan(ABC):
    """The exchange of one bucket.

    Attributes:
        chunks: Parts that :meth:`run` exchanges one by one, in any order and side by side.
        collective: The protocol's name.
        runs: For each chunk, where what it compresses lies in the flat vector: (begin, end), ascending. What travels in
            float32 beside it is left out: a method that remembers something has nothing to remember of that.
        asynchronous: Nothing is to prepare, and each chunk is one collective with local arithmetic before and after.
            So it may start on the thread that brings the bucket and end on the one that brings the reply.
        keeps_dtype: The bucket is exchanged in its own dtype; otherwise in float32.
        finishes: Whether :meth:`finish` is to be run at the end of a round.
    """

    chunks: int
    collective: str
    asynchronous: bool = False
    keeps_dtype: bool = False
    runs: Sequence[Sequence[tuple[int, int]]] = ()
    finishes: bool = False

    @abstractmethod
    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        """Measure whole parameters and agree on what all ranks must share; the result goes to every chunk."""

    @abstractmethod
    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        """Exchange chunk ``context.chunk``, writing the mean into its part of ``flat``."""

    def finish(self, context: Context) -> Exchange[None]:
        """Do what is left of a round once all its buckets have been exchanged, while the training goes on.

        It is run once a round, on the plan of any of its buckets, and not where a value of the round was not finite. It
        must not depend on which bucket that is: what it needs of the buckets is in ``context.parts``. What it stages
        holds from the next round on, whose first bucket waits for its end.
        """
        yield from ()

    def target_(self, context: Context, gradient: torch.Tensor) -> None:  # noqa: B027
        """Replace a copy of this round's gradient by the vector whose mean over ranks the exchange estimates.

        To be called when the round's chunks have run; most plans estimate the mean of the gradient itself.
        """

    def whole(self, context: Context, flat: torch.Tensor) -> Exchange[Outcome]:
        """Run everything in order, as one generator."""
        prepared = yield from self.prepare(context, flat)
        finite: Flag | None = True
        for chunk in range(self.chunks):
            outcome = yield from self.run(replace(context, chunk=chunk), flat, prepared)
            finite = both(finite, outcome.finite)
        return Outcome(finite)


@dataclass(frozen=True, eq=False)
class PlanSetting:
    """The bucket that a plan is made for.

    Attributes:
        segments: What lies in the bucket, one after the other.
        kernels: The backend.
        world_size: Ranks that take part.
        collective: One of the method's protocols, by name.
        seed: Of the link.
        chunk_numel: Elements of a chunk at most (rounded up to a multiple of 80); the bits do not depend on it.
        coder: An entropy coder for the digits of compressed sections, whatever the method says of coders; the outcome
            does not depend on it.
        parts: Where one of ``segments`` is all compressed parameters joined, those that it is made of.
    """

    segments: Sequence[Segment]
    kernels: Kernels
    world_size: int
    collective: str
    seed: int
    chunk_numel: int
    coder: Coder | None = None
    parts: Sequence[Segment] = ()

    @property
    def compressed(self) -> Sequence[Segment]:
        """The parameters that are compressed, each by itself also where they are joined."""
        return self.parts or divide(self.segments)[0]

    def whole(self) -> PlanSetting:
        """Return the setting in which everything travels in float32."""
        return replace(self, segments=[replace(s, dense=True) for s in self.segments])

    def float32_plan(self) -> BucketPlan:
        """Plan the exchange of all of the bucket in float32, by a protocol whose bits no layout decides."""
        return SectionPlan(Float32(), self.whole())


class Operator(Protocol):
    """What a plan of sections needs of a compressor."""

    tag: ClassVar[int]

    @property
    def traits(self) -> Traits:
        """Its traits, of which a plan reads where parameters may be cut."""
        ...

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> Codec:
        """Bind the operator to segments."""
        ...


class Float32:
    """Float32 as an operator, for a plan that knows which part of a bucket it compresses."""

    tag: ClassVar[int] = DENSE_TAG
    traits: ClassVar[Traits] = Traits()

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> DenseCodec:
        """Bind the operator to segments."""
        return DenseCodec(segments, world_size)


class CastPlan(BucketPlan):
    """One all-reduce of the whole bucket: cutting it would change the order of the backend's sum.

    Without a ``dtype`` the bucket travels in its own, as in DDP. Otherwise dense segments are a chunk of their own, in
    the bucket's own dtype: by a ring where they are many, else by one message to each rank.
    """

    collective = "all_reduce"
    asynchronous = True
    keeps_dtype = True

    def __init__(self, dtype: torch.dtype | None, segments: Sequence[Segment]) -> None:
        light, dense = divide(segments)
        self._parts: list[tuple[torch.dtype | None, Sequence[Segment] | None]] = [(dtype, light), (None, dense)]
        if dtype is None or not light:
            self._parts = [(None, None)]
        elif not dense:
            self._parts = [(dtype, None)]
        self.chunks = len(self._parts)
        runs = join((s.offset, s.offset + s.numel) for s in light)
        self.runs = [runs, []][: self.chunks]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        dtype, segments = self._parts[context.chunk]
        if dtype is None and segments is not None:
            size = sum(s.numel for s in segments) * flat.element_size() * (context.world_size - 1)
            if size <= FEW_BYTES:
                return gathered_mean(context, DENSE_TAG, flat, segments)
        return all_reduce(context, flat, dtype or flat.dtype, segments)


class SectionPlan(BucketPlan):
    """A compressor's section and a dense one, by any protocol.

    Protocols of shares, among them two-shot where codes do not add up, are given each chunk cut into one a rank.

    Args:
        method: Compresses all segments that are not dense.
        setting: Of the bucket.
        others: By the name of a parameter, an operator in the place of ``method``, with its tag and cuts. Each operator
            that any parameter of a chunk has is a section, in the order in which the bucket first has them.

    Attributes:
        codecs: Of each operator, bound to all that it compresses of the bucket.
    """

    def __init__(self, method: Operator, setting: PlanSetting, others: Mapping[str, Operator] | None = None) -> None:
        self.method, self.setting, self.collective = method, setting, setting.collective
        others, ours_of = others or {}, dict[Operator, list[Segment]]()
        compressed, _ = divide(setting.segments)
        for s in compressed:
            ours_of.setdefault(others.get(s.parameter.name, method), []).append(s)
        self._operators = list(ours_of)
        self.tag = method.tag if compressed else DENSE_TAG
        self.codecs = [self._bind(i, ours, setting.world_size) for i, ours in enumerate(ours_of.values())]
        add_up = self.collective in PROTOCOLS and all(isinstance(c, SummableCodec) for c in self.codecs)
        shared_out = self.collective in SHARED_OUT and not add_up
        self.grain = math.lcm(method.traits.cut, method.traits.share_cut) if shared_out else method.traits.cut
        position = {s: (i, j) for i, ours in enumerate(ours_of.values()) for j, s in enumerate(ours)}
        self._chunks = []
        self.runs = []
        for pieces in cut([s for s in setting.segments if s.numel], setting.chunk_numel, self.grain):
            ours = [(piece, position[whole]) for piece, whole in pieces if not piece.dense]
            rest = [(piece, (0, 0)) for piece, _ in pieces if piece.dense]
            if self.collective == REDUCE_SCATTER:
                self._chunks.append(self._sharded(ours, rest))
            else:
                self._chunks.append(self._shared_out(ours, rest) if shared_out else BoundChunk(self._part(ours, rest)))
            self.runs.append(join((p.offset, p.offset + p.numel) for p, _ in ours))
        self.chunks = len(self._chunks)

    @property
    def codec(self) -> Codec | None:
        """The codec of the whole bucket where there is one operator; None where nothing is compressed."""
        return self.codecs[0] if self.codecs else None

    def _bind(self, operator: int, segments: Sequence[Segment], world_size: int) -> Codec:
        return self._operators[operator].codec(self.setting.kernels, segments, world_size, self.setting.seed)

    def _part(self, ours: Pieces, rest: Pieces, world_size: int | None = None) -> BoundPart:
        world_size = world_size or self.setting.world_size
        bound = []
        for operator in range(len(self._operators)):
            own = [(p, i) for p, (of, i) in ours if of == operator]
            if not own:
                continue
            codec = self._bind(operator, [p for p, _ in own], world_size)
            if self.setting.coder is not None:
                codec.use_coder(self.setting.coder)
            bound.append(Bound(codec, operator, Constant(torch.tensor([i for _, i in own], dtype=torch.int64))))
        return BoundPart(bound, DenseCodec([p for p, _ in rest], world_size) if rest else None)

    def _shared_out(self, ours: Pieces, rest: Pieces) -> BoundChunk:
        world_size = self.setting.world_size
        parts = zip(share_out(ours, world_size, self.method.traits.share_cut), share_out(rest, world_size, 1))
        # One who encodes the mean is the only worker of it.
        return BoundChunk(None, [(self._part(*part), self._part(*part, world_size=1)) for part in parts])

    def _sharded(self, ours: Pieces, rest: Pieces) -> BoundChunk:
        world_size, shards = self.setting.world_size, list[BoundShard]()
        made: dict[tuple[Segment, ...], BoundPart] = {}
        wide, narrow, own = (shard_out(p, world_size, g) for p, g in ((ours, self.grain), (rest, 1), (ours, 1)))
        for mine, dense, owned in zip(wide, narrow, own):
            key = tuple(piece for piece, _ in mine)
            if key not in made:
                made[key] = self._part(mine, [])
            part = BoundPart(made[key].compressed, self._part([], dense).dense)
            covered, exact = (
                join(sorted((p.offset, p.offset + p.numel) for p, _ in (*some, *dense))) for some in (mine, owned)
            )
            shards.append(BoundShard(part, covered, exact))
        return BoundChunk(None, shards=shards)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Prepared]:
        found = []
        for codec in self.codecs:
            summary = codec.summarise(flat)
            found.append((summary, None if summary.shared is None else (yield Reduce(summary.shared.clone(), "max"))))
        return found

    def run(self, context: Context, flat: torch.Tensor, prepared: Prepared) -> Exchange[Outcome]:
        chunk = self._chunks[context.chunk]
        if chunk.whole is not None:
            return PROTOCOLS[self.collective](context, self.tag, chunk.whole.sections(prepared), flat)
        if chunk.shards:
            shards = [ShardSections(s.part.sections(prepared), s.covered, s.owned) for s in chunk.shards]
            return reduce_scatter(context, self.tag, shards, flat)
        shares = [Share(up.sections(prepared), down.sections(prepared)) for up, down in chunk.shares]
        return SHARED_OUT[self.collective](context, self.tag, shares, flat)


LARGEST = 2.0**40
"""The largest magnitude that a method takes that adds up rounds, as it is exchanged, with the loss scale in it.

What is remembered is a sum of what was exchanged, and methods multiply it with such sums: 2^48 products of two numbers
of this size add up within float32, so that nothing that a round leaves behind makes a later round overflow.
"""


def in_range(values: torch.Tensor) -> Flag:
    """Return whether all values are numbers of at most :data:`LARGEST`, as a flag that is read later."""
    return all_hold(values.abs() <= LARGEST)


class BoundedPlan(BucketPlan):
    """Makes an infinity of every value beyond :data:`LARGEST` before an inner plan exchanges a bucket.

    A spike that is finite would be remembered where an infinity is not, and what is remembered of it may overflow in
    every later round, each of which would then be discarded. As an infinity it reaches all ranks by the way that the
    method has for these, and no rank remembers anything of the round. Each element is judged by itself, so that neither
    ranks nor the layout of buckets differ.

    Args:
        inner: How the bucket is exchanged.
        segments: Of whole parameters, as they lie in the bucket.
        owner: Name of the method, for the warning.
    """

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], owner: str) -> None:
        # Not asynchronous, whatever the inner plan is: all of the bucket is looked at before any chunk is sent.
        self.inner, self._segments, self._owner = inner, segments, owner
        self.chunks, self.collective, self.runs = inner.chunks, inner.collective, inner.runs
        self.keeps_dtype, self.finishes = inner.keeps_dtype, inner.finishes

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        if not flat.is_meta and flat.numel():
            self._bound(context, flat)
        return (yield from self.inner.prepare(context, flat))

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        return self.inner.run(context, flat, prepared)

    def finish(self, context: Context) -> Exchange[None]:
        return self.inner.finish(context)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self.inner.target_(context, gradient)

    def _bound(self, context: Context, flat: torch.Tensor) -> None:
        if flat.device.type == "cpu":
            # One pass that only reads. Of a device the answer would have to be waited for.
            low, high = (float(extreme) for extreme in torch.aminmax(flat))
            if low >= -LARGEST and high <= LARGEST:
                return
            self._warn(context, flat)
        flat.masked_fill_(flat.abs() > LARGEST, math.inf)

    def _warn(self, context: Context, flat: torch.Tensor) -> None:
        """Tell of the first parameter with a spike, if there is one: of infinities and NaN a GradScaler knows."""
        for s in self._segments:
            sizes = flat[s.offset : s.offset + s.numel].abs()
            beyond = sizes[(sizes > LARGEST) & sizes.isfinite()]
            if beyond.numel():
                context.warn_here(
                    "range",
                    f"round {context.round}: {s.parameter.name!r} has values beyond 2^40 ({beyond.numel()}, up to "
                    f"{float(beyond.max()):.2g}), which {self._owner} does not take: the round counts as overflowed, "
                    "so that its mean is infinite on all ranks and nothing of it is remembered; skip such a step, and "
                    "scale the loss down if it happens again",
                )
                return
