"""An undirected graph with features and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.errors import IncompatibleError

__all__ = ["Graph", "symmetrised"]


def symmetrised(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return every edge in both directions, and one of each node to itself, without doubles.

    Args:
        edges: Pairs of nodes, int64 ``[2, edges]``, in any order.
        nodes: Number of nodes.

    Returns:
        Source (row 0) and target (row 1) of each directed edge, int64 ``[2, ...]``, by target and then by source.

    Example:
        >>> symmetrised(torch.tensor([[0, 1], [1, 0]]), 2).tolist()
        [[0, 1, 0, 1], [0, 0, 1, 1]]
    """
    loops = torch.arange(nodes)
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
        IncompatibleError: an edge names a node that there is not, or the attributes are of different lengths.
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

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.features)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1
