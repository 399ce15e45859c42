"""CHOCO-SGD: gossip of compressed differences to estimates of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch

from gradwire.exchange.codecs import CheckedCodec, Codec, Constant, Draw, NoSummary
from gradwire.exchange.method import Method, Properties, is_number, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting
from gradwire.exchange.protocols.direct import tell_neighbours
from gradwire.exchange.protocols.division import join
from gradwire.exchange.protocols.payloads import Section, encode, sized, whole_rows
from gradwire.exchange.segments import Parameter, Segment, divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import get_kernels
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.gossip.gossip import GRAPH, GossipMethod, GossipPlan, Mixing, floats, mix
from gradwire.methods.levels.qsgd import QSGDinf
from gradwire.methods.wrappers.wrapper import pieces
from gradwire.seeds import worker_seed

ESTIMATE, NEIGHBOURS = "estimate", "neighbour_estimates"
"""State of a parameter in float64: its estimate at the neighbours, and the weighted sum of their estimates."""


@dataclass(frozen=True, kw_only=True)
class ChocoSGD(GossipMethod):
    r"""CHOCO-SGD: gossip of compressed parameters, whose errors vanish over time.

    Every worker has an estimate y_i of its own parameters, which its neighbours know, too, since all of them update it
    from the same messages. With x_i the parameters after ``every`` steps of its optimizer, and weights w_ij as for
    :class:`DPSGD`::

        q_i = C(x_i - y_i)        y_j <- y_j + q_j        x_i <- x_i + gamma sum_j w_ij (y_j - y_i)

    q_i is sent to the neighbours. The next difference includes what C left out of this one. As workers agree and steps
    become small, differences and errors vanish, even if C is biased. Only the weighted sum of the neighbours' estimates
    is stored. The mean over workers does not change, since weights are symmetric.

    In the first exchange, and in the first one after ``link.synchronise()``, parameters are sent uncompressed and
    become the first estimates. Small parameters and those in ``exclude`` are not compressed, but averaged as by
    :class:`DPSGD`.

    Args:
        graph: See :class:`DPSGD`.
        compressor: C, an operator on one vector with its own scale that is a contraction: |C(x) - x| is less than |x|,
            on average if C is random.
        gamma: Step towards the neighbours' estimates, above 0 and at most 1. It must be smaller the more C leaves out,
            or workers diverge: about 0.9 with four bits, 0.3 with one, and one to two times the density of a sparse C.
        every: Number of optimizer steps between exchanges.

    Raises:
        HyperparameterError: a field is out of range, or the operator is not suitable.
        IncompatibleError: when attached, as for :class:`DPSGD`.

    Wire: the operator's section, then float32 (``docs/wire-format.md``). Each sender draws from its own stream.

    Memory: the estimate and the sum, 16 bytes a compressed element.

    Reference: A. Koloskova, S. U. Stich, M. Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with
    Compressed Communication", ICML 2019, algorithm 2, in the form of its appendix that keeps the sum of estimates; for
    neural networks A. Koloskova, T. Lin, S. U. Stich, M. Jaggi, "Decentralized Deep Learning with Arbitrary
    Communication Compression", ICLR 2020.

    Example:
        >>> import gradwire as gw
        >>> gw.method("ChocoSGD(compressor=TopK(density=0.01), gamma=0.05)").traits.remembers
        ('estimate', 'neighbour_estimates', 'graph')
    """

    graph: str = "ring"
    compressor: Method = field(default_factory=lambda: QSGDinf(levels=7, block_size=256), kw_only=False)
    gamma: float = 0.9
    every: int = 1

    name: ClassVar[str] = "choco_sgd"
    tag: ClassVar[int] = 51
    properties: ClassVar[Properties] = Properties(
        summary="Gossip of compressed differences to estimates that neighbours share",
        paper="Koloskova et al., CHOCO-SGD, ICML 2019",
        bit_stable=True,
        bits_per_element=2 * (4 + 32 / 256) * 4 / 6,
        state="an estimate per parameter and rank, the weighted sum of the neighbours' estimates",
        state_bytes_per_element=16.0,
        stream="rank",
    )

    def __post_init__(self) -> None:
        self.check_graph()
        gamma = self.gamma
        require(is_number(gamma, above=0, most=1), "ChocoSGD", f"gamma is above 0 and at most 1, not {gamma!r}")
        object.__setattr__(self, "gamma", float(gamma))
        inner = self.compressor
        check_contraction("ChocoSGD", inner, "so that estimates may run from what they estimate", "no estimate")
        reason = _unsuitable(inner)
        require(
            reason is None,
            "ChocoSGD",
            f"compressor is an operator that each worker applies by itself, such as TopK(density=0.01), and {inner!r} "
            f"{reason}",
        )

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            kernels=self.compressor.traits.kernels,
            remembers=(ESTIMATE, NEIGHBOURS, GRAPH),
            own=(ESTIMATE, NEIGHBOURS),
            of_ranks=(ESTIMATE, NEIGHBOURS, GRAPH),
            of_parameters=(ESTIMATE, NEIGHBOURS, GRAPH),
            sends_differences=True,
            min_numel=self.compressor.traits.min_numel,
            needs_link_cost=self.compressor.traits.needs_link_cost,
            gauges=self.compressor.traits.gauges,
        )

    @property
    def operator(self) -> Operator:
        """The compressor."""
        return self.compressor  # type: ignore[return-value]

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _DifferencePlan(self, setting)


@lru_cache(maxsize=256)
def _unsuitable(inner: Method) -> str | None:
    """Return why a worker's payload of an operator cannot be decoded alone, or None if it can."""
    if inner.traits.same_elements:
        return "has elements that all workers share: use coordinates='private'"
    if inner.traits.joined or inner.traits.whole_step:
        return "works on all parameters as one vector: use blocks='parameter'"
    if not hasattr(inner, "codec") or inner.traits.direction:
        return "is none on one vector"
    segment = Segment(Parameter("p", (160,), (1,)), 0, 0, 160)
    codec: Codec = inner.codec(get_kernels("reference"), [segment], 1, 0)
    if isinstance(codec, CheckedCodec):
        return "is decoded by a vector that is near it, which a neighbour has not"
    if codec.summarise(torch.zeros(160, dtype=torch.float32, device="cpu")).shared is not None:
        return "has a scale that all workers share"
    return None


class _DifferencePlan(GossipPlan):
    """Plan that sends differences to the estimates, and uncompressed parameters, to each neighbour."""

    def __init__(self, method: ChocoSGD, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._operator, self._tag, self._gamma = method.operator, method.tag, method.gamma
        self._ours, dense = divide(setting.segments)
        self.runs = [join((s.offset, s.offset + s.numel) for s in self._ours)]
        self._rest, self._all = Mixing(dense), Mixing([s for s in setting.segments if s.numel])
        self._every_segment = Constant(torch.arange(len(self._ours), device="cpu"))
        self._codecs: dict[int, Codec] = {}

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        if self.remembers_this_graph(context) or flat.is_meta or not self._ours:
            return (yield from self._go_on(context, flat))
        yield from self._begin(context, flat)
        return Outcome(True)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        self._subtract(self._held(context, ESTIMATE), gradient, gradient)

    def _begin(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        """Send parameters uncompressed, and set the estimates to them."""
        estimate, theirs = self._staged(context, ESTIMATE), self._staged(context, NEIGHBOURS)
        estimate.copy_(flat)
        theirs.zero_()

        def seen(neighbour: int, values: torch.Tensor) -> None:
            self._add(theirs, values, self.graph.weight(context.rank, neighbour), theirs)

        yield from mix(context, self._tag, self.graph, self._all, flat, seen)

    def _go_on(self, context: Context, flat: torch.Tensor) -> Exchange[Outcome]:
        rest, rank = self._rest, context.rank
        draw = Draw(context.round, 0, 1.0, context.link, context.gauge)
        difference = floats(context, "difference", flat.numel())
        decoded, pull = floats(context, "theirs", flat.numel()), floats(context, "pull", flat.numel())
        if not flat.is_meta:
            for a, n in rest.codec.runs:
                pull[a : a + n].zero_()
                difference[a : a + n].copy_(flat[a : a + n])
            self._subtract(self._held(context, ESTIMATE), flat, difference)
        sections = []
        if self._ours:
            codec = self._codec(rank)
            sections.append(Section(codec, codec.summarise(difference).select(self._every_segment, None)))
        if rest.codec.numel:
            sections.append(Section(rest.codec, NoSummary()))
        found = sized(sections, flat)
        layout, moves = whole_rows(context, found), self.graph.moves(rank)
        bodies = encode(context, found, difference, [s.codec.units for s in found], draw)

        if flat.is_meta:
            yield from tell_neighbours(context, self._tag, moves, layout, bodies, lambda *_: None)
            return Outcome()
        estimate, theirs = self._staged(context, ESTIMATE), self._staged(context, NEIGHBOURS)
        held, before = self._held(context, ESTIMATE), self._held(context, NEIGHBOURS)
        for a, n in rest.codec.runs:
            estimate[a : a + n].copy_(held[a : a + n])
            theirs[a : a + n].copy_(before[a : a + n])

        def decode(worker: int, body: torch.Tensor) -> None:
            codec = self._codec(worker)
            summary = codec.remember(sections[0].summary, difference, draw, False)
            # A decoder that reads its output buffer must find the same values on all workers: zeros.
            decoded.zero_()
            codec.decode_rows(body.view(1, -1), summary, decoded)

        def take(neighbour: int, parts: list[torch.Tensor]) -> None:
            nonlocal before
            weight = self.graph.weight(rank, neighbour)
            if self._ours:
                decode(neighbour, parts[0])
                self._add(before, decoded, weight, theirs)
                before = theirs
            if rest.codec.numel:
                rest.pull(parts[-1], weight, flat, pull)

        own: torch.Tensor | None = None
        if self._ours:
            decode(rank, bodies[0])
            self._add(held, decoded, 1.0, estimate)
            own = decoded.clone() if context.wants_sent else None
        yield from tell_neighbours(context, self._tag, moves, layout, bodies, take)
        if before is not theirs:
            theirs.copy_(before)
        rest.move(flat, pull)
        self._follow(1 - self.graph.weight(rank, rank), estimate, theirs, flat)

        def sent(out: torch.Tensor, weight: float) -> None:
            if own is not None:
                for a, b in self.runs[0]:
                    out[a:b].add_(own[a:b], alpha=weight)

        return Outcome(True, sent if context.wants_sent else None)

    def _follow(self, others: float, estimate: torch.Tensor, theirs: torch.Tensor, flat: torch.Tensor) -> None:
        """Add ``gamma sum_j w_ij (y_j - y_i)``, rounded once; ``others`` is the sum of the neighbours' weights."""
        for a, b in pieces(self.runs[0]):
            pull = theirs[a:b] - estimate[a:b] * others
            flat[a:b] = pull.mul_(self._gamma).add_(flat[a:b])

    def _subtract(self, estimate: torch.Tensor, flat: torch.Tensor, out: torch.Tensor) -> None:
        for a, b in pieces(self.runs[0]):
            out[a:b] = flat[a:b].double().sub_(estimate[a:b])

    def _add(self, to: torch.Tensor, values: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        for a, b in pieces(self.runs[0]):
            torch.add(to[a:b], values[a:b].double().mul_(weight), out=out[a:b])

    def _held(self, context: Context, kind: str) -> torch.Tensor:
        return context.memory.read(kind, self.setting.segments, dtype=torch.float64)

    def _staged(self, context: Context, kind: str) -> torch.Tensor:
        return context.memory.stage(kind, self.setting.segments, dtype=torch.float64)

    def _codec(self, worker: int) -> Codec:
        """Return the coder of the operator for a worker, with that worker's draws."""
        found = self._codecs.get(worker)
        if found is None:
            seed = worker_seed(self.setting.seed, worker)
            found = self._codecs[worker] = self._operator.codec(self.setting.kernels, self._ours, 1, seed)
        return found
