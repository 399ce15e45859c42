"""Small random graphs, and networks trained on their parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.nn import functional as F

import gradwire as gw
from gradwire.graphs import Graph, GraphNetwork, Subgraph, forward_together, partition, subgraphs, symmetrised

NODES, FEATURES, CLASSES = 60, 5, 3


def random_graph(nodes: int = NODES, edges: int = 150, seed: int = 0) -> Graph:
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, nodes, (2, edges), generator=draw)
    labels = torch.randint(0, CLASSES, (nodes,), generator=draw)
    training = torch.rand(nodes, generator=draw) < 0.5
    features = torch.randn(nodes, FEATURES, generator=draw)
    return Graph(symmetrised(pairs, nodes), features, labels, training, ~training)


def parts_of(graph: Graph, workers: int, rule: str = "random") -> list[Subgraph]:
    return subgraphs(graph, partition(graph, workers, rule, seed=1))


def whole(graph: Graph) -> Subgraph:
    return parts_of(graph, 1)[0]


def link_of(parts: list[Subgraph], halo: object = "fp32", steps: int = 20, seed: int = 3) -> gw.SimulatedHaloLink:
    return gw.SimulatedHaloLink([part.boundary for part in parts], halo, steps=steps, seed=seed)  # type: ignore[arg-type]


class Run:
    """Plain gradient descent on all parts of a graph, their gradients added up."""

    def __init__(
        self,
        network: Callable[[], GraphNetwork],
        parts: list[Subgraph],
        exchange: gw.SimulatedHaloLink | None,
        lr: float = 0.1,
    ) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.parts, self.exchange, self.lr = parts, exchange, lr
        self.losses: list[float] = []

    def logits(self) -> list[torch.Tensor]:
        features = [part.features for part in self.parts]
        return forward_together([self.model] * len(self.parts), features, self.parts, self.exchange)

    def step(self) -> None:
        shares = torch.stack(
            [
                F.cross_entropy(out[p.training], p.labels[p.training], reduction="sum")
                for out, p in zip(self.logits(), self.parts)
            ]
        )
        loss = shares.sum()
        self.model.zero_grad()
        (loss / self.parts[0].labelled).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= self.lr * parameter.grad
        if self.exchange is not None:
            self.exchange.next_round(shares.detach().tolist())
        self.losses.append(float(loss.detach()))

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.model.state_dict())
