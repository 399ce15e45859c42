"""PowerGossip: neighbours find the largest part of what they differ by with one step of the power method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.method import Properties, is_number, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.direct import tell_neighbours
from gradwire.exchange.protocols.memory import kind_of_peer
from gradwire.exchange.protocols.payloads import Section, draw_of, encode, sized, whole_rows
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.traits import Traits
from gradwire.methods.gossip.gossip import GRAPH, GossipMethod, GossipPlan, Mixing, floats
from gradwire.methods.low_rank.factors import Side, check_matrix_rank, matrices, matrix_table, shape_of

LEFT, RIGHT = "left", "right"
"""Sides of factors, and what is remembered of each with each neighbour: the one that the last exchange ended with."""


@dataclass(frozen=True, kw_only=True)
class PowerGossip(GossipMethod):
    r"""PowerGossip: of the difference between neighbours, a product of two thin factors, without any parameter to tune.

    For each edge (i, j), i < j, and each matrix of n by m, both ends hold the same factor p of n by r, at first random.
    With X_i worker i's matrix after its own steps, and weights w_ij as of :class:`DPSGD`::

        p <- orthonormalise(p)        q = X_j^T p - X_i^T p
        X_i <- X_i + w_ij p q^T       X_j <- X_j - w_ij p q^T

    i sends X_i^T p and j sends X_j^T p. The next time q takes the part of p, and X the part of X^T: a step of the power
    method for the largest singular vectors of the difference, from where the last one ended. All edges of a worker are
    computed from the same parameters. What is added at one end is taken away at the other, so that the mean over
    workers stays; p q^T is a projection of the difference, so that it only becomes smaller, whatever the rank: nothing
    is remembered of what was left out, and nothing can run away.

    A matrix has the outermost dimension in memory as rows and all others as columns. It is compressed where the
    messages of two exchanges have ``least_saving`` times fewer numbers than two matrices; all else, vectors among it,
    is averaged as by :class:`DPSGD`.

    Args:
        graph: As of :class:`DPSGD`.
        matrix_rank: Columns r of a factor.
        iterations: Exchanges one after the other, each from where the one before ended.
        least_saving: How many times fewer numbers are sent of a matrix; 1 or more.
        every: Optimizer steps from one exchange to the next.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, as of :class:`DPSGD`.

    Wire: float32 products, and in the first iteration what is not compressed (``docs/wire-format.md``). Factors are
    drawn from the shared stream under the names of parameter and edge; they are uniform, where the paper's are normal.

    Memory: two factors per edge of a worker.

    Reference: T. Vogels, S. P. Karimireddy, M. Jaggi, "Practical Low-Rank Communication Compression in Decentralized
    Deep Learning", NeurIPS 2020.

    Example:
        >>> import torch, gradwire as gw
        >>> columns, row = torch.arange(32.0), torch.ones(40)
        >>> workers = [torch.nn.Parameter(rank * torch.outer(columns, row)) for rank in (0.0, 2.0)]
        >>> method = gw.PowerGossip(iterations=2)
        >>> steps = gw.SimulatedLocalSteps([[("x", x)] for x in workers], method, min_numel=0)
        >>> steps.after_step()
        >>> torch.allclose(workers[0], torch.outer(columns, row), rtol=1e-5)
        True
    """

    graph: str = "ring"
    matrix_rank: int = 1
    iterations: int = 1
    least_saving: float = 1.0
    every: int = 1

    name: ClassVar[str] = "power_gossip"
    tag: ClassVar[int] = 52
    properties: ClassVar[Properties] = Properties(
        summary="Gossip of the largest part of a difference, as a product of two thin factors",
        paper="Vogels et al., PowerGossip, NeurIPS 2020",
        bit_stable=True,
        bits_per_element=2 * 32 * 4 / 6 / 1000,
        state="factors per parameter and edge",
        stream="shared",
    )

    def __post_init__(self) -> None:
        self.check_graph()
        check_matrix_rank("PowerGossip", self.matrix_rank)
        count, saving = self.iterations, self.least_saving
        require(is_whole(count, 1), "PowerGossip", f"iterations is at least 1, not {count!r}")
        require(
            is_number(saving, least=1, most=float("inf")), "PowerGossip", f"least_saving is at least 1, not {saving!r}"
        )
        object.__setattr__(self, "least_saving", float(saving))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=("low_rank",),
            remembers=(LEFT, RIGHT, GRAPH),
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        rows, columns = shape_of(parameter)
        return min(self.matrix_rank, rows, columns) * (rows if kind == LEFT else columns)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _EdgePlan(self, setting)


class _EdgePlan(GossipPlan):
    """Products of a bucket's matrices with each edge's factors; behind the first ones what is not compressed."""

    def __init__(self, method: PowerGossip, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        # Two messages, of one factor each, are weighed against two matrices: half of what a product is made of.
        found = matrices(setting.segments, method.matrix_rank, method.least_saving / 2)
        self._iterations, self._tag = method.iterations if found else 1, method.tag
        self._table, whole = matrix_table(found), {m.segment for m in found}
        self._sides = {name: Side(found, name) for name in (LEFT, RIGHT)}
        self._rest = Mixing([s for s in setting.segments if s not in whole and s.numel])

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        queries, knows = dict[int, torch.Tensor](), self.remembers_this_graph(context)
        for iteration in range(self._iterations):
            turn = context.round * self._iterations + iteration
            known, asked = (self._sides[name] for name in ((LEFT, RIGHT) if turn % 2 == 0 else (RIGHT, LEFT)))
            if iteration == 0 and not flat.is_meta:
                queries = {j: self._remembered(context, known, j, knows) for j in self.graph.neighbours(context.rank)}
            queries = yield from self._iterate(context, flat, known, asked, queries, iteration)
        for neighbour, answer in queries.items():
            context.memory.stage(kind_of_peer(asked.name, neighbour), asked.segments).copy_(answer)
        return Outcome(None if flat.is_meta else True)

    def _iterate(
        self,
        context: Context,
        flat: torch.Tensor,
        known: Side,
        asked: Side,
        queries: Mapping[int, torch.Tensor],
        iteration: int,
    ) -> Exchange[dict[int, torch.Tensor]]:
        """Move towards the neighbours along the factors that are known; return the other factors, which end with it."""
        rank, graph, rest = context.rank, self.graph, self._rest
        context = replace(context, workspace=context.workspace.part(f"{asked.name} {iteration}"), exchange=iteration)
        of_factor = DenseCodec(lay_out([Parameter("(factor)", (asked.numel,), (1,))]), 1)
        codecs = [of_factor, rest.codec] if iteration == 0 and rest.codec.numel else [of_factor]
        sections = sized([Section(codec, NoSummary()) for codec in codecs], flat)
        layout, draw, units = whole_rows(context, sections), draw_of(context), [codec.units for codec in codecs]
        behind = encode(context, sections[1:], flat, units[1:], draw, "behind, ")
        bases = {j: self._basis(context, known, j, query) for j, query in queries.items()}
        own = {j: self._product(flat, known, asked, basis) for j, basis in bases.items()}
        theirs, other = floats(context, "theirs", flat.numel()), floats(context, "factor", asked.numel)
        pull, answers = floats(context, "pull", flat.numel()), dict[int, torch.Tensor]()
        if not flat.is_meta:
            pull.zero_()

        def bodies(neighbour: int) -> list[torch.Tensor]:
            mine = encode(context, sections[:1], other if flat.is_meta else own[neighbour], units[:1], draw)
            return [*mine, *behind]

        def take(neighbour: int, parts: list[torch.Tensor]) -> None:
            if flat.is_meta:
                return
            of_factor.decode_rows(parts[0].view(1, -1), NoSummary(), other)
            # The higher worker's less the lower one's, on both of them: the same bits, zeros' signs among them.
            higher, lower = (other, own[neighbour]) if rank < neighbour else (own[neighbour], other)
            answers[neighbour] = higher - lower
            if len(parts) > 1:
                rest.read(parts[1], theirs)
                rest.pull(theirs, graph.weight(rank, neighbour), flat, pull)

        last = iteration == self._iterations - 1
        yield from tell_neighbours(context, self._tag, graph.moves(rank), layout, bodies, take, last=last)
        for neighbour, basis in bases.items():
            weight = graph.weight(rank, neighbour) * (1 if rank < neighbour else -1)
            left, right = (basis, answers[neighbour]) if known.name == LEFT else (answers[neighbour], basis)
            self.setting.kernels.multiply_out(left, right, self._table, flat, weight)
        if len(codecs) > 1 and not flat.is_meta:
            rest.move(flat, pull)
        return answers

    def _remembered(self, context: Context, side: Side, neighbour: int, knows: bool) -> torch.Tensor:
        held = context.memory.read(kind_of_peer(side.name, neighbour), side.segments)
        return held if knows else torch.zeros_like(held)

    def _basis(self, context: Context, side: Side, neighbour: int, query: torch.Tensor) -> torch.Tensor:
        low, high = sorted((context.rank, neighbour))
        filled = side.filled(query, self.setting.seed, context.round, f", workers {low} and {high}")
        return self.setting.kernels.orthonormalise(filled, self._table, side.name)

    def _product(self, flat: torch.Tensor, known: Side, asked: Side, basis: torch.Tensor) -> torch.Tensor:
        product, kernels = flat.new_empty(asked.numel), self.setting.kernels
        if known.name == LEFT:
            kernels.multiply_left(flat, self._table, basis, product)
        else:
            kernels.multiply_right(flat, self._table, basis, product)
        return product
