"""The graphs of the task ``graph``."""

from __future__ import annotations

from functools import lru_cache

import torch

from gradwire.errors import BackendError
from gradwire.graphs import Graph, symmetrised
from gradwire.tools.experiments.order import generator

__all__ = ["GRAPHS", "build_graph"]

NEIGHBOURS = 8
"""Nearest images of each, in ``digits``."""
IMAGES_PER_CLASS = 2

BLOCKS, NODES, WORDS = 8, 2048, 128
INNER, OUTER = 6.0, 6.0
"""Mean number of neighbours of a node in its own block and in all others, in ``sbm``."""
COMMON, TOPIC = 0.1, 0.15
"""Chance of a word in a node, and how much more likely are words of its block's topic."""
TOPIC_SHARE = 0.15
NODES_PER_BLOCK = 20


def _marks(labels: torch.Tensor, known: int, purpose: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``known`` nodes of each class for training; all others are evaluated on."""
    order = torch.randperm(len(labels), generator=generator(0, purpose, 0))
    drawn = torch.cat([order[labels[order] == c][:known] for c in range(int(labels.max()) + 1)])
    training = torch.zeros(len(labels), dtype=torch.bool)
    training[drawn] = True
    return training, ~training


def digits() -> Graph:
    """scikit-learn's 1797 images of digits, each joined to its 8 nearest by the distance of their pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BackendError('the graph digits needs scikit-learn: pip install "gradwire[cli]"') from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).flatten(1).to(torch.float64)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    # Pixels are integers from 0 to 16, so that squared distances are exact, and of equal ones the first is taken.
    squares = pixels.square().sum(1)
    distances = squares[:, None] + squares - 2 * pixels @ pixels.T
    distances.fill_diagonal_(torch.inf)
    nearest = torch.sort(distances, dim=1, stable=True).indices[:, :NEIGHBOURS]
    source = torch.arange(len(labels)).repeat_interleave(NEIGHBOURS)
    edges = symmetrised(torch.stack([source, nearest.flatten()]), len(labels))
    return Graph(edges, (pixels / 16).to(torch.float32), labels, *_marks(labels, IMAGES_PER_CLASS, "digits labels"))


def sbm() -> Graph:
    """A stochastic block model of 2048 nodes in 8 blocks, with a bag of 128 words a node; a fixed draw."""
    labels = torch.randint(0, BLOCKS, (NODES,), generator=generator(0, "sbm blocks", 0))
    same = labels[:, None] == labels
    chance = torch.where(same, INNER * BLOCKS / NODES, OUTER * BLOCKS / (NODES * (BLOCKS - 1)))
    drawn = torch.rand(NODES, NODES, generator=generator(0, "sbm edges", 0)) < chance
    edges = symmetrised(torch.nonzero(drawn.triu(1)).T, NODES)
    topics = torch.rand(BLOCKS, WORDS, generator=generator(0, "sbm topics", 0)) < TOPIC_SHARE
    likely = (COMMON + TOPIC * topics.to(torch.float32))[labels]
    words = torch.rand(NODES, WORDS, generator=generator(0, "sbm words", 0)) < likely
    return Graph(edges, words.to(torch.float32), labels, *_marks(labels, NODES_PER_BLOCK, "sbm labels"))


GRAPHS = {"digits": digits, "sbm": sbm}
"""By name."""


@lru_cache(maxsize=2)
def build_graph(name: str) -> Graph:
    """Return one of :data:`GRAPHS`, built once a process.

    Raises:
        BackendError: it needs a library that is not installed.
    """
    return GRAPHS[name]()
