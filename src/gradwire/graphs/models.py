"""Networks of graph layers, on one worker or on several that exchange halos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from gradwire.graphs.halo import HaloExchange, extended
from gradwire.graphs.layers import GATLayer, GCNLayer, GraphLayer
from gradwire.graphs.subgraph import Subgraph

__all__ = ["GAT", "GCN", "GraphNetwork", "forward_together"]


class GraphNetwork(nn.Module):
    """Graph layers with a nonlinearity between each two; the last one's rows are logits."""

    def __init__(self, layers: Sequence[GraphLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the nonlinearity."""
        return F.relu(rows)

    def forward(self, features: torch.Tensor, subgraph: Subgraph, exchange: HaloExchange | None = None) -> torch.Tensor:
        """Return the logits of the own nodes of one worker, ``[own, classes]``.

        Args:
            features: Of the own nodes.
            subgraph: The worker's.
            exchange: Of the halos, collective; None where the worker has the whole graph.
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
        networks: One a worker, with the same layers.
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


class GCN(GraphNetwork):
    """A graph convolutional network with rectifiers (Kipf, Welling, ICLR 2017).

    Args:
        features: Of a node.
        classes: Number of logits.
        width: Of the hidden layers.
        layers: Number of layers, at least 1.
    """

    def __init__(self, features: int, classes: int, *, width: int = 64, layers: int = 2) -> None:
        sizes = [features, *[width] * (layers - 1), classes]
        super().__init__([GCNLayer(a, b) for a, b in itertools.pairwise(sizes)])


class GAT(GraphNetwork):
    """A graph attention network with exponential linear units (Velickovic et al., ICLR 2018).

    Heads of hidden layers are side by side; those of the last layer are averaged.

    Args:
        features: Of a node.
        classes: Number of logits.
        width: Of the hidden layers, all heads together: a multiple of ``heads``.
        layers: Number of layers, at least 1.
        heads: Of the hidden layers; the last has one.
    """

    def __init__(self, features: int, classes: int, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        sizes = [features, *[width] * (layers - 1)]
        hidden: list[GraphLayer] = [GATLayer(a, b // heads, heads) for a, b in itertools.pairwise(sizes)]
        super().__init__([*hidden, GATLayer(sizes[-1], classes, 1, joined=False)])

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        return F.elu(rows)
