"""PowerGossip: neighbours exchange low-rank differences, found by steps of the power method."""

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
"""Sides of factors. The state for each neighbour is the factor with which the last exchange ended."""


@dataclass(frozen=True, kw_only=True)
class PowerGossip(GossipMethod):
    r"""PowerGossip: differences between neighbours as products of two thin factors, with no parameter to tune.

    For each edge (i, j), i < j, and each matrix of n by m, both ends have the same factor p of n by r, random at first.
    With X_i worker i's matrix after its own steps, and weights w_ij as for :class:`DPSGD`::

        p <- orthonormalise(p)        q = X_j^T p - X_i^T p
        X_i <- X_i + w_ij p q^T       X_j <- X_j - w_ij p q^T

    i sends X_i^T p and j sends X_j^T p. In the next iteration q takes the role of p, and X^T that of X: this continues
    the power method for the largest singular vectors of the difference. All edges of a worker use its parameters from
    before the iteration. One end adds what the other subtracts, so the mean over workers does not change. p q^T is a
    projection of the difference, so the difference never grows, whatever r is; no residual is needed, and the method
    cannot diverge.

    A matrix has the outermost dimension in memory as rows and all others as columns. It is compressed if the messages
    of two iterations have ``least_saving`` times fewer numbers than two matrices. All other parameters, such as
    vectors, are averaged as by :class:`DPSGD`.

    Args:
        graph: See :class:`DPSGD`.
        matrix_rank: Number of columns r of a factor.
        iterations: Number of iterations in each exchange; each continues the one before.
        least_saving: Least ratio of a matrix's elements to the numbers sent for which it is compressed; 1 or more.
        every: Number of optimizer steps between exchanges.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, as for :class:`DPSGD`.

    Wire: float32 products, and in the first iteration uncompressed parameters (``docs/wire-format.md``). Factors are
    drawn from the shared stream under the names of parameter and edge. They are uniform; the paper's are normal.

    Memory: two factors for each edge of a worker.

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
            own=(LEFT, RIGHT),
            of_ranks=(LEFT, RIGHT, GRAPH),
            # Rounds of an even number of iterations all begin on the same side.
            period=1 + self.iterations % 2,
        )

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        rows, columns = shape_of(parameter)
        return min(self.matrix_rank, rows, columns) * (rows if kind == LEFT else columns)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _EdgePlan(self, setting)


class _EdgePlan(GossipPlan):
    """Plan that sends products of matrices and each edge's factors, the first ones with uncompressed parameters."""

    def __init__(self, method: PowerGossip, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        # Two messages of one factor each are compared with two matrices: half of the factors of a product.
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
        """Move towards the neighbours along the known factors, and return the other factors."""
        rank, graph, rest = context.rank, self.graph, self._rest
        context = replace(context, workspace=context.workspace.part(f"{asked.name} {iteration}"), exchange=iteration)
        of_factor = DenseCodec(lay_out([Parameter("(factor)", (asked.numel,), (1,))]), 1)
        codecs = [of_factor, rest.codec] if iteration == 0 and rest.codec.numel else [of_factor]
        sections = sized([Section(codec, NoSummary()) for codec in codecs], flat)
        layout, draw, units = whole_rows(context, sections), draw_of(context), [codec.units for codec in codecs]
        behind = encode(context, sections[1:], flat, units[1:], draw, "behind, ")
        bases = {j: self._basis(context, known, j, query) for j, query in queries.items()}
        own = {j: self._product(flat, known, asked, basis) for j, basis in bases.items()}
        other, pull = floats(context, "factor", asked.numel), floats(context, "pull", flat.numel())
        answers = dict[int, torch.Tensor]()
        if not flat.is_meta:
            pull.zero_()

        def bodies(neighbour: int) -> list[torch.Tensor]:
            mine = encode(context, sections[:1], other if flat.is_meta else own[neighbour], units[:1], draw)
            return [*mine, *behind]

        def take(neighbour: int, parts: list[torch.Tensor]) -> None:
            if flat.is_meta:
                return
            of_factor.decode_rows(parts[0].view(1, -1), NoSummary(), other)
            # Both ends subtract the lower worker's from the higher one's: the same bits, including signs of zeros.
            higher, lower = (other, own[neighbour]) if rank < neighbour else (own[neighbour], other)
            answers[neighbour] = higher - lower
            if len(parts) > 1:
                rest.pull(parts[1], graph.weight(rank, neighbour), flat, pull)

        yield from tell_neighbours(context, self._tag, graph.moves(rank), layout, bodies, take)
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
