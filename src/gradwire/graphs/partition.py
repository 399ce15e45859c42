"""Which worker owns which node."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import check_seed, is_whole, require
from gradwire.graphs.subgraph import Graph
from gradwire.seeds import parameter_key


def _contiguous(graph: Graph, workers: int, seed: int) -> torch.Tensor:
    return torch.arange(graph.nodes) * workers // graph.nodes


def _random(graph: Graph, workers: int, seed: int) -> torch.Tensor:
    low, high = parameter_key(seed, "", "partition")
    drawn = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(low | high << 32))
    return _contiguous(graph, workers, seed)[drawn.argsort()]


def _greedy(graph: Graph, workers: int, seed: int) -> torch.Tensor:
    sizes = torch.bincount(_contiguous(graph, workers, seed), minlength=workers).tolist()
    ends = torch.bincount(graph.edges[1], minlength=graph.nodes).cumsum(0).tolist()
    sources = graph.edges[0].tolist()
    owner = [-1] * graph.nodes
    first = 0
    for worker, size in enumerate(sizes):
        inside = [0] * graph.nodes
        frontier: list[tuple[int, int]] = []
        for _ in range(size):
            node = -1
            while frontier and node < 0:
                count, candidate = heapq.heappop(frontier)
                if owner[candidate] < 0 and -count == inside[candidate]:
                    node = candidate
            if node < 0:
                while owner[first] >= 0:
                    first += 1
                node = first
            owner[node] = worker
            for neighbour in sources[ends[node - 1] if node else 0 : ends[node]]:
                if owner[neighbour] < 0:
                    inside[neighbour] += 1
                    heapq.heappush(frontier, (-inside[neighbour], neighbour))
    return torch.tensor(owner)


PARTITIONS: dict[str, Callable[[Graph, int, int], torch.Tensor]] = {
    "contiguous": _contiguous,
    "random": _random,
    "greedy": _greedy,
}
"""Rules by name."""


def partition(graph: Graph, workers: int, rule: str = "random", seed: int = 0) -> torch.Tensor:
    """Return the owner of each node, int64 ``[nodes]``; workers own equally many, to within one.

    * ``contiguous``: node v of n belongs to worker floor(v N / n).
    * ``random``: the same of a random order of the nodes, drawn from the seed.
    * ``greedy``: one worker after the other is given nodes until it has its share: always the free node with the most
      neighbours among those that the worker has, of several the first, and the first free node where no free one has a
      neighbour there. This is greedy graph growing; it cuts few edges.

    Args:
        workers: Number N of workers, at least 1 and at most the number of nodes.

    Raises:
        HyperparameterError: there is no such rule, a number is not a whole one, or a worker would own no node.

    Reference: G. Karypis, V. Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", SIAM
    J. Sci. Comput. 1998, section 4.2 (greedy graph growing).
    """
    if rule not in PARTITIONS:
        raise HyperparameterError(f"partition is one of {', '.join(PARTITIONS)}, not {rule!r}")
    check_seed(seed)
    require(is_whole(workers), "workers", f"a whole number is needed, not {workers!r}")
    if not 1 <= workers <= graph.nodes:
        raise HyperparameterError(f"{graph.nodes} nodes cannot be shared by {workers} workers: each needs one at least")
    return PARTITIONS[rule](graph, workers, seed)


def cut_edges(graph: Graph, owner: torch.Tensor) -> float:
    """Return the share of the edges, those of a node to itself left out, that connect nodes of different workers."""
    source, target = graph.edges
    between = source != target
    return float((owner[source] != owner[target]).sum()) / max(1, int(between.sum()))
