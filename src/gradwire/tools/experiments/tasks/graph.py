"""``graph``: classification of a graph's nodes by a graph network, over workers that own parts of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import nn

from gradwire.errors import BackendError, GradwireError
from gradwire.graphs import (
    GAT,
    GCN,
    PARTITIONS,
    Graph,
    GraphSAGE,
    HaloMethod,
    Subgraph,
    block_model,
    halo_method,
    partition,
    subgraphs,
    symmetrised,
)
from gradwire.tools.experiments.errors import UsageError, check_known
from gradwire.tools.experiments.order import generator
from gradwire.tools.experiments.tasks.base import Source, Task

WIDTH = 64
HALO_BYTES = "halo_bytes"
MODELS: dict[str, Callable[..., nn.Module]] = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE}

NEIGHBOURS = 8
"""Nearest images that each image is joined to, in ``digits``."""
IMAGES_PER_CLASS = 2

BLOCKS, NODES, WORDS = 8, 2048, 128
INNER, OUTER = 6.0, 6.0
"""Mean number of neighbours of a node in its own block and in all others, in ``sbm``."""
COMMON, TOPIC = 0.1, 0.15
"""Chance of a word in a node, and how much more likely are words of its block's topic."""
TOPIC_SHARE = 0.15
NODES_PER_BLOCK = 20
LARGE_NODES, LARGE_KNOWN = 100_000, 1000
"""Nodes of ``sbm100k``, and how many of each block have labels known in training."""


def _marks(labels: torch.Tensor, known: int, purpose: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``known`` nodes of each class for training; return masks of these and of all others."""
    order = torch.randperm(len(labels), generator=generator(0, purpose, 0))
    drawn = torch.cat([order[labels[order] == c][:known] for c in range(int(labels.max()) + 1)])
    training = torch.zeros(len(labels), dtype=torch.bool)
    training[drawn] = True
    return training, ~training


def digits() -> Graph:
    """Build the graph of scikit-learn's 1797 images of digits, each joined to the 8 with the nearest pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BackendError('the graph digits needs scikit-learn: pip install "gradwire[cli]"') from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).flatten(1).to(torch.float64)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    # Pixels are integers from 0 to 16, so squared distances are exact; the stable sort takes the first of equal ones.
    squares = pixels.square().sum(1)
    distances = squares[:, None] + squares - 2 * pixels @ pixels.T
    distances.fill_diagonal_(torch.inf)
    nearest = torch.sort(distances, dim=1, stable=True).indices[:, :NEIGHBOURS]
    source = torch.arange(len(labels)).repeat_interleave(NEIGHBOURS)
    edges = symmetrised(torch.stack([source, nearest.flatten()]), len(labels))
    return Graph(edges, (pixels / 16).to(torch.float32), labels, *_marks(labels, IMAGES_PER_CLASS, "digits labels"))


def sbm() -> Graph:
    """Build a fixed stochastic block model of 2048 nodes in 8 blocks, each node with a bag of 128 words."""
    labels = torch.randint(0, BLOCKS, (NODES,), generator=generator(0, "sbm blocks", 0))
    same = labels[:, None] == labels
    chance = torch.where(same, INNER * BLOCKS / NODES, OUTER * BLOCKS / (NODES * (BLOCKS - 1)))
    drawn = torch.rand(NODES, NODES, generator=generator(0, "sbm edges", 0)) < chance
    edges = symmetrised(torch.nonzero(drawn.triu(1)).T, NODES)
    topics = torch.rand(BLOCKS, WORDS, generator=generator(0, "sbm topics", 0)) < TOPIC_SHARE
    likely = (COMMON + TOPIC * topics.to(torch.float32))[labels]
    words = torch.rand(NODES, WORDS, generator=generator(0, "sbm words", 0)) < likely
    return Graph(edges, words.to(torch.float32), labels, *_marks(labels, NODES_PER_BLOCK, "sbm labels"))


def sbm100k() -> Graph:
    """Build a fixed block model of 100000 nodes in 8 blocks, with the edges and words a node of :func:`sbm`."""
    return block_model(
        LARGE_NODES,
        blocks=BLOCKS,
        inner=INNER,
        outer=OUTER,
        words=WORDS,
        common=COMMON,
        topic=TOPIC,
        topic_share=TOPIC_SHARE,
        known=LARGE_KNOWN,
    )


GRAPHS = {"digits": digits, "sbm": sbm, "sbm100k": sbm100k}
"""The graphs by name."""


@lru_cache(maxsize=2)
def build_graph(name: str) -> Graph:
    """Return one of :data:`GRAPHS`, which is built once in a process.

    Raises:
        BackendError: a library that it needs is not installed.
    """
    return GRAPHS[name]()


@dataclass(frozen=True, kw_only=True)
class GraphTask(Task):
    """Settings of the ``graph`` task.

    Every worker owns a part of the nodes, and each step takes all of them. Before a layer aggregates over edges,
    workers send each other the rows of their boundaries, and in the backward pass the gradients of these rows: both by
    ``halo``, a method for halos. Weight gradients are exchanged by the run's method. The loss is the mean cross entropy
    of the nodes whose labels are known. Evaluations exchange all rows in float32, which is not counted as traffic.

    Attributes:
        graph: "digits" (scikit-learn's images, each joined to its eight nearest; two labels a class are known) or "sbm"
            (a stochastic block model with a bag of words a node; twenty labels a class) or "sbm100k" (the same with
            100000 nodes; a thousand labels a class).
        model: "gcn", "gat" or "sage" (GraphSAGE with the mean aggregator), each of width 64.
        layers: Number of graph layers.
        partition: "random", "greedy" or "contiguous", see :func:`gradwire.graphs.partition`.
        halo: Spec of the method for the halo, see :func:`gradwire.graphs.halo_method`.
    """

    name: ClassVar[str] = "graph"
    summary: ClassVar[str] = "graph network on a partitioned graph, full batch; --graph digits or sbm, --halo SPEC"
    evaluated_on: ClassVar[str] = "all nodes whose labels are unknown in training (a fixed draw)"
    reads_data: ClassVar[bool] = False
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
            check_known(field, getattr(self, field), known, " of the task graph")
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
        """The bytes that a worker sends for the halo in a step, and the gauges of the method for the halo."""
        return (HALO_BYTES, *self.halo_method().gauges)

    def check_data(self) -> None:
        """Check that the graph can be built."""
        build_graph(self.graph)

    def build_model(self) -> nn.Module:
        """Build the network."""
        graph = build_graph(self.graph)
        return MODELS[self.model](graph.features.shape[1], graph.classes, width=WIDTH, layers=self.layers)

    def load(self) -> Source:
        """Raise UsageError: this task has subgraphs instead of samples, see :meth:`subgraphs`."""
        raise UsageError("task graph has no samples to draw: its workers have subgraphs")

    def subgraphs(self, workers: int, seed: int) -> list[Subgraph]:
        """Return the subgraph of each worker; raises HyperparameterError if there are fewer nodes than workers."""
        graph = build_graph(self.graph)
        return subgraphs(graph, partition(graph, workers, self.partition, seed))
