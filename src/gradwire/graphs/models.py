"""Graph networks, whose layers have two halves between which the rows of the halo are exchanged."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from gradwire.exchange.method import is_whole, require
from gradwire.graphs.halo_plan import HaloExchange, extended
from gradwire.graphs.subgraph import Subgraph

SLOPE = 0.2
"""Slope of the leaky rectifier of attention scores below zero, as published."""


class GraphLayer(nn.Module, ABC):
    """A layer that transforms every node's row and then aggregates over edges; rows are exchanged between the two."""

    @abstractmethod
    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows to be exchanged, ``[own, width]``."""

    @abstractmethod
    def aggregate(self, rows: torch.Tensor, subgraph: Subgraph) -> torch.Tensor:
        """Return the rows of the own nodes from the rows of own nodes and halo, ``[own + halo, width]``."""


class GCNLayer(GraphLayer):
    r"""A layer of a graph convolutional network: h_v = b + sum_u (W x_u) / sqrt(d_u d_v) over edges from u to v.

    Every node has an edge to itself, and d counts the edges that end in a node.

    Reference: T. N. Kipf, M. Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017,
    equation 2.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.linear.weight)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(rows)
        return out

    def aggregate(self, rows: torch.Tensor, subgraph: Subgraph) -> torch.Tensor:
        messages = rows.index_select(0, subgraph.source) * subgraph.weight[:, None]
        return _sums(messages, subgraph) + self.bias


class GATLayer(GraphLayer):
    r"""A layer of a graph attention network, whose heads are concatenated or averaged.

    With z_u = W x_u for a head, and edges from u to v::

        e_uv = leaky_relu(a_1.z_u + a_2.z_v)
        alpha_uv = exp(e_uv) / sum_w exp(e_wv)          h_v = b + sum_u alpha_uv z_u

    The scores of a node of the halo are computed from its received row, so that nothing else is sent.

    Reference: P. Velickovic et al., "Graph Attention Networks", ICLR 2018, equations 1 to 6.
    """

    def __init__(self, features: int, width: int, heads: int, *, joined: bool = True) -> None:
        super().__init__()
        self.heads, self.width, self.joined = heads, width, joined
        self.linear = nn.Linear(features, heads * width, bias=False)
        self.from_source = nn.Parameter(torch.empty(heads, width))
        self.from_target = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads * width if joined else width))
        for weight in (self.linear.weight, self.from_source, self.from_target):
            nn.init.xavier_uniform_(weight)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(rows)
        return out

    def aggregate(self, rows: torch.Tensor, subgraph: Subgraph) -> torch.Tensor:
        source, target, own = subgraph.source, subgraph.target, len(subgraph.own)
        heads = rows.view(-1, self.heads, self.width)
        of_source = (heads * self.from_source).sum(2).index_select(0, source)
        scores = F.leaky_relu(
            of_source + (heads[:own] * self.from_target).sum(2).index_select(0, target), negative_slope=SLOPE
        )
        # Subtracting the largest score of a node does not change the result, so no gradient is needed through it.
        largest = scores.detach().new_full((own, self.heads), -torch.inf)
        largest = largest.scatter_reduce(0, target[:, None].expand_as(scores), scores.detach(), "amax")
        powers = (scores - largest.index_select(0, target)).exp()
        alpha = powers / _sums(powers, subgraph).index_select(0, target)
        found = _sums(heads.index_select(0, source) * alpha[:, :, None], subgraph)
        return (found.flatten(1) if self.joined else found.mean(1)) + self.bias


class SAGELayer(GraphLayer):
    r"""A layer of GraphSAGE with the mean aggregator: h_v = b + W_1 x_v + W_2 mean_u x_u over neighbours u of v.

    A node is not a neighbour of its own: its edge to itself is left out. The mean over no neighbours is zero. Rows are
    exchanged as they come, before both products, so that their gradients come back for every layer except a first one
    whose features need none.

    The published layer multiplies the concatenation of x_v and the mean by one matrix, which is [W_1, W_2] here. It
    samples neighbours, and scales each row to a length of one; this layer takes all neighbours and does not scale.

    Reference: W. L. Hamilton, R. Ying, J. Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017,
    algorithm 1, with the mean aggregator of section 3.3.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.of_own = nn.Linear(features, width, bias=False)
        self.of_neighbours = nn.Linear(features, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        for linear in (self.of_own, self.of_neighbours):
            nn.init.xavier_uniform_(linear.weight)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def aggregate(self, rows: torch.Tensor, subgraph: Subgraph) -> torch.Tensor:
        own = len(subgraph.own)
        # Own rows come first, so that only an edge from a node to itself has the same row at both ends.
        outer = (subgraph.source != subgraph.target).to(rows.dtype)[:, None]
        neighbours = _sums(outer, subgraph).clamp(min=1)
        mean = _sums(rows.index_select(0, subgraph.source) * outer, subgraph) / neighbours
        out: torch.Tensor = self.of_own(rows[:own]) + self.of_neighbours(mean) + self.bias
        return out


def _sums(messages: torch.Tensor, subgraph: Subgraph) -> torch.Tensor:
    """Add up the messages of the edges that end in each own node, in the order of the edges."""
    zeros = messages.new_zeros(len(subgraph.own), *messages.shape[1:])
    return zeros.index_add(0, subgraph.target, messages)


class GraphNetwork(nn.Module):
    """Graph layers with a nonlinearity between each two; the rows of the last one are logits."""

    def __init__(self, layers: Sequence[GraphLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the nonlinearity."""
        return F.relu(rows)

    def forward(self, features: torch.Tensor, subgraph: Subgraph, exchange: HaloExchange | None = None) -> torch.Tensor:
        """Return the logits of the own nodes of one worker, ``[own, classes]``.

        Args:
            features: Features of the own nodes.
            subgraph: Subgraph of the worker.
            exchange: Exchange of the halos (collective); None if the worker has the whole graph.
        """
        return forward_together([self], [features], [subgraph], exchange)[0]


def forward_together(
    networks: Sequence[GraphNetwork],
    features: Sequence[torch.Tensor],
    subgraphs: Sequence[Subgraph],
    exchange: HaloExchange | None,
) -> list[torch.Tensor]:
    """Return the logits of several workers that one process plays, layer after layer.

    Args:
        networks: One for each worker, with the same layers.
    """
    rows = list(features)
    depth = len(networks[0].layers)
    for number in range(depth):
        layers: list[GraphLayer] = [network.layers[number] for network in networks]  # type: ignore[misc]
        sent = [layer.transform(own) for layer, own in zip(layers, rows)]
        known = extended(exchange, number, sent)
        rows = [layer.aggregate(all_rows, part) for layer, all_rows, part in zip(layers, known, subgraphs)]
        if number < depth - 1:
            rows = [network.between(own) for network, own in zip(networks, rows)]
    return rows


def _in_a_row(
    layer: Callable[[int, int], GraphLayer], features: int, classes: int, width: int, layers: int
) -> list[GraphLayer]:
    sizes = [*_sizes(features, width, layers), classes]
    return [layer(a, b) for a, b in itertools.pairwise(sizes)]


def _sizes(features: int, width: int, layers: int) -> list[int]:
    """Return the numbers of features that each layer takes."""
    require(is_whole(layers, 1), "layers", f"a network has at least 1, not {layers!r}")
    return [features, *[width] * (layers - 1)]


class GCN(GraphNetwork):
    """A graph convolutional network with rectifiers (Kipf, Welling, ICLR 2017).

    Args:
        features: Number of features of a node.
        classes: Number of logits.
        width: Width of the hidden layers.
        layers: Number of layers, at least 1.

    Raises:
        HyperparameterError: ``layers`` is out of range.
    """

    def __init__(self, features: int, classes: int, *, width: int = 64, layers: int = 2) -> None:
        super().__init__(_in_a_row(GCNLayer, features, classes, width, layers))


class GraphSAGE(GraphNetwork):
    """GraphSAGE with the mean aggregator and rectifiers (Hamilton, Ying, Leskovec, NeurIPS 2017).

    Args:
        features: Number of features of a node.
        classes: Number of logits.
        width: Width of the hidden layers.
        layers: Number of layers, at least 1.

    Raises:
        HyperparameterError: ``layers`` is out of range.
    """

    def __init__(self, features: int, classes: int, *, width: int = 64, layers: int = 2) -> None:
        super().__init__(_in_a_row(SAGELayer, features, classes, width, layers))


class GAT(GraphNetwork):
    """A graph attention network with exponential linear units (Velickovic et al., ICLR 2018).

    Heads of hidden layers are concatenated; the last layer has one head.

    Args:
        features: Number of features of a node.
        classes: Number of logits.
        width: Width of the hidden layers, over all heads: a multiple of ``heads``.
        layers: Number of layers, at least 1.
        heads: Heads of the hidden layers; the last has one.

    Raises:
        HyperparameterError: ``layers`` is out of range, or ``width`` is no multiple of ``heads``.
    """

    def __init__(self, features: int, classes: int, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        fits = is_whole(heads, 1) and (layers == 1 or width % heads == 0)
        require(fits, "GAT", f"width is a multiple of heads, not {width!r} for {heads!r}")
        sizes = _sizes(features, width, layers)
        hidden: list[GraphLayer] = [GATLayer(a, b // heads, heads) for a, b in itertools.pairwise(sizes)]
        super().__init__([*hidden, GATLayer(sizes[-1], classes, 1, joined=False)])

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        return F.elu(rows)
