"""``graph``: a graph network trained on all nodes at once, the graph partitioned over the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradwire.errors import GradwireError
from gradwire.graphs import GAT, GCN, PARTITIONS, HaloMethod, Subgraph, halo_method, partition, subgraphs
from gradwire.tools.experiments.errors import UsageError, nearest
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.graph_data import GRAPHS, build_graph

__all__ = ["GraphTask"]

WIDTH = 64
HALO_BYTES = "halo_bytes"
MODELS: dict[str, Callable[..., nn.Module]] = {"gcn": GCN, "gat": GAT}


@dataclass(frozen=True, kw_only=True)
class GraphTask(Task):
    """Settings of the ``graph`` task.

    Every worker owns a part of the nodes, and each step takes all of them. Before a layer adds up what comes along
    edges, workers send each other the rows of their boundaries, and in the backward pass the gradients of these: both
    by ``halo``, a method for halos. Weight gradients are exchanged by the run's method. The loss is the mean cross
    entropy of the nodes whose labels are known. Evaluations exchange all rows in float32, which counts as no traffic.

    Attributes:
        graph: "digits" (scikit-learn's images, each joined to its eight nearest; two labels a class are known) or "sbm"
            (a stochastic block model with a bag of words a node; twenty labels a class).
        model: "gcn" or "gat", both of width 64.
        layers: Number of graph layers.
        partition: "random", "greedy" or "contiguous", see :func:`gradwire.graphs.partition`.
        halo: Spec of the method for the halo, see :func:`gradwire.graphs.halo_method`.
    """

    name: ClassVar[str] = "graph"
    summary: ClassVar[str] = "graph network on a partitioned graph, full batch; --graph digits or sbm, --halo SPEC"
    evaluated_on: ClassVar[str] = "all nodes whose labels are unknown in training (a fixed draw)"
    least_batch: ClassVar[int] = 0
    usual_method: ClassVar[str] = "fp32"

    steps: int = 300
    batch: int = 0
    lr: float = 0.01
    optimizer: str = "adam"
    weight_decay: float = 5e-4
    eval_every: int = 50
    graph: str = "digits"
    model: str = "gcn"
    layers: int = 3
    partition: str = "random"
    halo: str = "fp32"

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; raises UsageError."""
        super().__post_init__()
        for field, known in (("graph", GRAPHS), ("model", MODELS), ("partition", PARTITIONS)):
            value = getattr(self, field)
            if value not in known:
                raise UsageError(f"unknown {field} {value!r} of the task graph: {nearest(value, known)}")
        if self.batch:
            raise UsageError("task graph takes all nodes in every step: leave --batch out")
        if self.layers < 1:
            raise UsageError(f"layers = {self.layers}: must be at least 1")
        try:
            self.halo_method().check_steps(self.steps)
        except GradwireError as error:
            raise UsageError(f"halo = {self.halo}: {error}") from error

    def halo_method(self) -> HaloMethod:
        """Return the method for the halo."""
        return halo_method(self.halo)

    @property
    def gauges(self) -> tuple[str, ...]:
        """Bytes that a worker sends for the halo in a step, and what the method for the halo reports."""
        return (HALO_BYTES, *self.halo_method().gauges)

    def check_data(self) -> None:
        """Look whether the graph can be built."""
        build_graph(self.graph)

    def build_model(self) -> nn.Module:
        """Build the network."""
        graph = build_graph(self.graph)
        return MODELS[self.model](graph.features.shape[1], graph.classes, width=WIDTH, layers=self.layers)

    def load(self) -> Source:
        """Refuse: this task has no samples but subgraphs, see :meth:`subgraphs`."""
        raise UsageError("task graph has no samples to draw: its workers have subgraphs")

    def subgraphs(self, workers: int, seed: int) -> list[Subgraph]:
        """Return the subgraph of each worker; raises HyperparameterError where there are fewer nodes than workers."""
        graph = build_graph(self.graph)
        return subgraphs(graph, partition(graph, workers, self.partition, seed))
