"""Partitions of a graph: the owner of each node."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import check_seed, is_whole, require
from gradwire.graphs.subgraph import Graph
from gradwire.seeds import parameter_key


def _contiguous(graph: Graph, workers: int, seed: int) -> torch.Tensor:
    return torch.arange(graph.nodes, device="cpu") * workers // graph.nodes


def _random(graph: Graph, workers: int, seed: int) -> torch.Tensor:
    low, high = parameter_key(seed, "", "partition")
    drawn = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(low | high << 32), device="cpu")
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
    return torch.tensor(owner, device="cpu")


PARTITIONS: dict[str, Callable[[Graph, int, int], torch.Tensor]] = {
    "contiguous": _contiguous,
    "random": _random,
    "greedy": _greedy,
}
"""The rules by name."""


def partition(graph: Graph, workers: int, rule: str = "random", seed: int = 0) -> torch.Tensor:
    """Return the owner of each node, int64 ``[nodes]``; the numbers of nodes that workers own differ by one at most.

    * ``contiguous``: node v of n belongs to worker floor(v N / n).
    * ``random``: the same for a random order of the nodes, drawn from the seed.
    * ``greedy``: workers get their shares one after the other. The next node of a worker is the free node with the most
      neighbours among the worker's nodes, the first of several, or the first free node if none has a neighbour there.
      This is greedy graph growing; it cuts few edges.

    Args:
        workers: Number N of workers, at least 1 and at most the number of nodes.

    Raises:
        HyperparameterError: there is no such rule, a number is not whole, or a worker would own no node.

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
    """Return the share of edges between different nodes that connect nodes of different workers."""
    source, target = graph.edges
    between = source != target
    return float((owner[source] != owner[target]).sum()) / max(1, int(between.sum()))
