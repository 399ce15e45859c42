"""Graphs, and the subgraphs of the workers that share one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.errors import IncompatibleError


def symmetrised(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return each edge once in each direction, and an edge from each node to itself, without duplicates.

    Args:
        edges: Pairs of nodes, int64 ``[2, edges]``, in any order.
        nodes: Number of nodes.

    Returns:
        Source (row 0) and target (row 1) of each directed edge, int64 ``[2, ...]``, by target and then by source.

    Example:
        >>> symmetrised(torch.tensor([[0, 1], [1, 0]]), 2).tolist()
        [[0, 1, 0, 1], [0, 0, 1, 1]]
    """
    loops = torch.arange(nodes, device="cpu")
    source = torch.cat([edges[0], edges[1], loops])
    target = torch.cat([edges[1], edges[0], loops])
    keys = (target * nodes + source).unique()
    return torch.stack([keys % nodes, keys // nodes])


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes with features, labels and edges.

    Attributes:
        edges: Source and target of each directed edge, as :func:`symmetrised` returns them.
        features: Float32 ``[nodes, features]``.
        labels: Class of each node, int64 ``[nodes]``.
        training: Whether the label of a node is known in training, bool ``[nodes]``.
        held_out: Whether a node is evaluated on, bool ``[nodes]``.

    Raises:
        IncompatibleError: an edge names a node that does not exist, the attributes have different lengths, or the edges
            are in another order, or not all there.
    """

    edges: torch.Tensor
    features: torch.Tensor
    labels: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor

    def __post_init__(self) -> None:
        n = len(self.features)
        if any(len(part) != n for part in (self.labels, self.training, self.held_out)):
            raise IncompatibleError("a graph needs features, a label and both marks of every node")
        if self.edges.numel() and not 0 <= int(self.edges.min()) <= int(self.edges.max()) < n:
            raise IncompatibleError(f"an edge of the graph names a node outside 0 to {n - 1}")
        # In smaller types the keys would wrap around.
        source, target = self.edges.long()
        keys, back = target * n + source, source * n + target
        loops = int((source == target).sum()) == n
        if not loops or not bool((keys.diff() > 0).all()) or not torch.equal(keys, back.sort().values):
            # Partitions and the weights of edges would be wrong without an error.
            raise IncompatibleError(
                "the edges of a graph are there in both directions, with one from each node to itself, by target and "
                "then by source: pass them through gradwire.graphs.symmetrised first"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.features)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1


@dataclass(frozen=True, eq=False)
class Boundary:
    """The rows that a worker sends to each other worker, and how many it receives.

    Attributes:
        rank: Number of this worker.
        counts: Row p, column q: how many nodes of worker p have an edge to a node of worker q; int64
            ``[workers, workers]``, zeros on the diagonal.
        leaving: For each worker, the own rows to send to it, ascending; empty for this worker.
    """

    rank: int
    counts: torch.Tensor
    leaving: tuple[torch.Tensor, ...]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.counts)

    @property
    def arriving(self) -> list[int]:
        """Number of rows that come from each worker."""
        found: list[int] = self.counts[:, self.rank].tolist()
        return found


@dataclass(frozen=True, eq=False)
class Subgraph:
    """A worker's own nodes, the edges that end in them, and its halo: other workers' nodes at which these edges begin.

    The rows of a matrix over the subgraph are those of the own nodes, in the order of their numbers in the graph, then
    those of the halo, in the order of owner and number.

    Attributes:
        own: Numbers of the own nodes in the graph, ascending, int64.
        source: Row of the node at which each edge begins, int64 ``[edges]``.
        target: Own row at which each edge ends. Edges are in the order of their target and then of their source in the
            graph, so that the order of sums over a node's edges does not depend on the partition.
        weight: 1 / sqrt(d_u d_v) of each edge from u to v, float32, where d is the number of edges that end in a node.
        features: Features of the own nodes, float32 ``[own, features]``.
        labels: Labels of the own nodes.
        training: Rows of own nodes with labels known in training, int64.
        held_out: Rows of own nodes to be evaluated on, int64.
        labelled: Number of nodes with known labels in the whole graph.
        boundary: The rows to exchange.
    """

    own: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    features: torch.Tensor
    labels: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor
    labelled: int
    boundary: Boundary


def subgraphs(graph: Graph, owner: torch.Tensor, workers: int | None = None) -> list[Subgraph]:
    """Cut a graph into the subgraphs of its workers.

    Args:
        owner: Owner of each node, as :func:`partition` returns it, of any integer type.
        workers: Number of workers, of whom some may own no node; None: the last one owns some.

    Raises:
        IncompatibleError: there is not one owner, from 0 to ``workers - 1``, for each node.
    """
    # In smaller types the keys below would wrap around.
    owner = owner.long()
    least, most = (int(owner.min()), int(owner.max())) if owner.numel() else (0, -1)
    workers = most + 1 if workers is None else workers
    if owner.shape != (graph.nodes,) or least < 0 or not most < workers:
        raise IncompatibleError(
            f"a graph of {graph.nodes} nodes needs an owner of each from 0 to {workers - 1}: these are "
            f"{list(owner.shape)}, from {least} to {most}"
        )
    source, target = graph.edges.long()
    degree = torch.bincount(target, minlength=graph.nodes).to(torch.float64)
    weight = (degree[source] * degree[target]).rsqrt().to(torch.float32)
    # The nodes of each worker at which edges to another worker begin, each once, ascending.
    outer = owner[source] != owner[target]
    keys = ((owner[source] * workers + owner[target]) * graph.nodes + source)[outer].unique()
    pair, node = keys // graph.nodes, keys % graph.nodes
    counts = torch.bincount(pair, minlength=workers * workers).view(workers, workers)
    sent = node.split(counts.flatten().tolist())
    found = []
    for rank in range(workers):
        own = torch.nonzero(owner == rank).flatten()
        halo = torch.cat([sent[other * workers + rank] for other in range(workers)])
        row = torch.full((graph.nodes,), -1, dtype=torch.int64, device="cpu")
        row[own], row[halo] = torch.arange(len(own), device="cpu"), len(own) + torch.arange(len(halo), device="cpu")
        mine = owner[target] == rank
        found.append(
            Subgraph(
                own=own,
                source=row[source[mine]],
                target=row[target[mine]],
                weight=weight[mine],
                features=graph.features[own],
                labels=graph.labels[own],
                training=torch.nonzero(graph.training[own]).flatten(),
                held_out=torch.nonzero(graph.held_out[own]).flatten(),
                labelled=int(graph.training.sum()),
                boundary=Boundary(rank, counts, tuple(row[sent[rank * workers + to]] for to in range(workers))),
            )
        )
    return found
