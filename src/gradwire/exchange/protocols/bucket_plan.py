"""Exchange plans of a bucket: the work that is done once for the bucket, and that for each of its chunks.

A plan is made once for a bucket's layout and used in every round. A driver runs :meth:`BucketPlan.prepare` first, then
:meth:`BucketPlan.run` for each chunk, in any number of lanes; a rank that runs them in one thread gets the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from gradwire.errors import IncompatibleError, unknown
from gradwire.exchange.codecs import Codec, Constant, DenseCodec, SummableCodec, check_codec
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
from gradwire.exchange.protocols.division import Pieces, cut, even_shares, join, row_shards
from gradwire.exchange.protocols.sections import Bound, BoundChunk, BoundPart, BoundShard, Prepared
from gradwire.exchange.protocols.shares import reduce_scatter
from gradwire.exchange.segments import Segment, divide, take_apart
from gradwire.exchange.traits import Traits

if TYPE_CHECKING:
    from gradwire.kernels import Coder, Kernels


DENSE_TAG = 127
"""Wire tag of payloads with float32 values only, as in warm-up rounds."""

FEW_BYTES = 1 << 19
"""Values that a cast does not change are gathered by one message to each rank up to this many bytes, else by a ring."""


class BucketPlan(ABC):
    """The exchange plan of one bucket.

    Attributes:
        chunks: Number of parts that :meth:`run` exchanges one by one, in any order and in parallel.
        collective: The protocol's name.
        runs: For each chunk, the ascending runs (begin, end) of the flat vector that it compresses. Runs that are sent
            in float32 are not included, since a method keeps no state for them.
        asynchronous: True if there is nothing to prepare, and each chunk is one collective with local arithmetic before
            and after. So it may start on the thread that passes the bucket and end on the one that receives the reply.
        keeps_dtype: True if the bucket is exchanged in its own dtype; otherwise it is in float32.
        dtype: The dtype in which the bucket is exchanged, if it has that of its parameters.
        finishes: True if :meth:`finish` must run at the end of a round.
    """

    chunks: int
    collective: str
    asynchronous: bool = False
    keeps_dtype: bool = False
    dtype: torch.dtype = torch.float32
    runs: Sequence[Sequence[tuple[int, int]]] = ()
    finishes: bool = False

    @abstractmethod
    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        """Measure whole parameters and agree on values that all ranks share; the result is passed to every chunk."""

    @abstractmethod
    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        """Exchange chunk ``context.chunk``, and write the mean into its part of ``flat``."""

    def finish(self, context: Context) -> Exchange[None]:
        """Do the work at the end of a round, after all its buckets have been exchanged, while the training continues.

        It runs once a round, on the plan of any bucket, unless a value of the round was not finite. It must not depend
        on the choice of the bucket: data from the buckets is in ``context.parts``. The state that it stages is valid
        from the next round on, whose first bucket waits for it.
        """
        yield from ()

    def target_(self, context: Context, gradient: torch.Tensor) -> None:  # noqa: B027
        """Replace a copy of this round's gradient by the vector whose mean over ranks the exchange estimates.

        Call it after the round's chunks have run. Most plans estimate the mean of the gradient itself.
        """

    def whole(self, context: Context, flat: torch.Tensor) -> Exchange[Outcome]:
        """Run all parts in order, as one generator."""
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
        segments: The segments of the bucket, one after the other.
        kernels: The kernel backend.
        world_size: Number of ranks.
        collective: Name of one of the method's protocols.
        seed: Seed of the link.
        chunk_numel: Largest number of elements of a chunk (rounded up to a multiple of 80); results do not depend on
            it.
        coder: An entropy coder for the digits of compressed sections, which takes precedence over the method's; the
            outcome does not depend on it.
    """

    segments: Sequence[Segment]
    kernels: Kernels
    world_size: int
    collective: str
    seed: int
    chunk_numel: int
    coder: Coder | None = None

    @property
    def compressed(self) -> Sequence[Segment]:
        """The parameters that are compressed, one by one even if they are joined."""
        return take_apart(divide(self.segments)[0])

    def whole(self) -> PlanSetting:
        """Return the setting in which everything is sent in float32."""
        return replace(self, segments=[replace(s, dense=True) for s in self.segments])

    def float32_plan(self) -> BucketPlan:
        """Plan the exchange of all of the bucket in float32, by a protocol whose bits do not depend on the layout."""
        return SectionPlan(Float32(), self.whole())


class Operator(Protocol):
    """The part of a compressor that a plan of sections uses."""

    tag: ClassVar[int]

    @property
    def traits(self) -> Traits:
        """The traits, from which a plan reads where parameters may be divided."""
        ...

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> Codec:
        """Bind the operator to segments."""
        ...


class Float32:
    """Float32 as an operator, for a plan that lists the runs of a bucket that it compresses."""

    tag: ClassVar[int] = DENSE_TAG
    traits: ClassVar[Traits] = Traits()

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> DenseCodec:
        """Bind the operator to segments."""
        return DenseCodec(segments, world_size)


class CastPlan(BucketPlan):
    """One all-reduce of the whole bucket, since dividing it would change the order of the backend's sum.

    Without a ``dtype`` the bucket is sent in its own, as in DDP. Otherwise dense segments are a chunk of their own, in
    the bucket's dtype: sent by a ring if they are large, else by one message to each rank.
    """

    collective = "all_reduce"
    asynchronous = True
    keeps_dtype = True

    def __init__(self, dtype: torch.dtype | None, segments: Sequence[Segment]) -> None:
        light, dense = divide(segments)
        # A bucket's parameters have one dtype.
        self.dtype = next((s.parameter.dtype for s in segments), torch.float32)
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

    For protocols of shares, such as two-shot with codes that do not add up, each chunk is divided into a share for each
    rank.

    Args:
        method: The operator for all segments that are not dense.
        setting: Setting of the bucket.
        others: Operators instead of ``method``, with its tag and cuts, by name of the parameter. Each operator of the
            parameters of a chunk has a section, in the order in which they first occur in the bucket.

    Attributes:
        codecs: The codec of each operator, bound to all segments of the bucket that it compresses.
    """

    def __init__(self, method: Operator, setting: PlanSetting, others: Mapping[str, Operator] | None = None) -> None:
        self.method, self.setting, self.collective = method, setting, setting.collective
        known = dict.fromkeys((*PROTOCOLS, *SHARED_OUT, REDUCE_SCATTER))
        if self.collective not in known:
            raise IncompatibleError(f"{type(method).__name__}: {unknown('protocol', self.collective, known)}")
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
        """The codec of the whole bucket if there is one operator; None if nothing is compressed."""
        return self.codecs[0] if self.codecs else None

    def _bind(self, operator: int, segments: Sequence[Segment], world_size: int) -> Codec:
        compressor = self._operators[operator]
        codec = compressor.codec(self.setting.kernels, segments, world_size, self.setting.seed)
        check_codec(type(compressor).__name__, codec)
        return codec

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
            index = torch.tensor([i for _, i in own], dtype=torch.int64, device="cpu")
            bound.append(Bound(codec, operator, Constant(index)))
        return BoundPart(bound, DenseCodec([p for p, _ in rest], world_size) if rest else None)

    def _shared_out(self, ours: Pieces, rest: Pieces) -> BoundChunk:
        world_size = self.setting.world_size
        parts = zip(even_shares(ours, world_size, self.method.traits.share_cut), even_shares(rest, world_size, 1))
        # The mean is encoded as the vector of a single worker, the owner.
        return BoundChunk(None, [(self._part(*part), self._part(*part, world_size=1)) for part in parts])

    def _sharded(self, ours: Pieces, rest: Pieces) -> BoundChunk:
        world_size, shards = self.setting.world_size, list[BoundShard]()
        made: dict[tuple[Segment, ...], BoundPart] = {}
        wide, narrow, own = (row_shards(p, world_size, g) for p, g in ((ours, self.grain), (rest, 1), (ours, 1)))
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
"""Largest magnitude of a value, with the loss scale, in the exchange of a method that adds up rounds.

State is a sum of exchanged values, and methods multiply such sums: 2^48 products of two numbers of this size add up
within float32, so that no state makes a later round overflow.
"""


def in_range(values: torch.Tensor) -> Flag:
    """Return whether all values are numbers of at most :data:`LARGEST`, as a flag that is read later."""
    return all_hold(values.abs() <= LARGEST)


class BoundedPlan(BucketPlan):
    """Replaces every value beyond :data:`LARGEST` by an infinity before an inner plan exchanges a bucket.

    A finite spike would be kept in the state, and could overflow in every later round, each of which would then be
    discarded. An infinity reaches all ranks in the method's own way, and no rank changes its state in the round. Each
    element is checked separately, so that the result depends on neither ranks nor the layout of buckets.

    Args:
        inner: The plan that exchanges the bucket.
        segments: Segments of whole parameters in the bucket.
        owner: Name of the method, for the warning.
    """

    def __init__(self, inner: BucketPlan, segments: Sequence[Segment], owner: str) -> None:
        # Not asynchronous even if the inner plan is: all of the bucket is checked before any chunk is sent.
        self.inner, self._segments, self._owner = inner, segments, owner
        self.chunks, self.collective, self.runs = inner.chunks, inner.collective, inner.runs
        self.keeps_dtype, self.dtype, self.finishes = inner.keeps_dtype, inner.dtype, inner.finishes

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
            # One pass that only reads. On a device, the thread would have to wait for the result.
            low, high = (float(extreme) for extreme in torch.aminmax(flat))
            if low >= -LARGEST and high <= LARGEST:
                return
            self._warn(context, flat)
        flat.masked_fill_(flat.abs() > LARGEST, math.inf)

    def _warn(self, context: Context, flat: torch.Tensor) -> None:
        """Warn about the first parameter with a finite spike, if any: a GradScaler handles infinities and NaN."""
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
