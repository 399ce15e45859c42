"""Generated graphs of any size: a stochastic block model, whose nodes have words that tell of their block."""

from __future__ import annotations

import torch

from gradwire.exchange.method import check_seed, is_number, is_whole, require
from gradwire.graphs.subgraph import Graph, symmetrised
from gradwire.seeds import parameter_key


def block_model(
    nodes: int,
    *,
    blocks: int = 8,
    inner: float = 6.0,
    outer: float = 6.0,
    words: int = 128,
    common: float = 0.1,
    topic: float = 0.15,
    topic_share: float = 0.15,
    known: int = 20,
    seed: int = 0,
) -> Graph:
    """Generate a stochastic block model with a fixed number of edges, and a bag of words a node.

    Every node belongs to a block, its label, drawn evenly. ``floor(nodes inner / 2)`` edges join a node, drawn evenly,
    with a node of its block, and ``floor(nodes outer / 2)`` join one with a node of another block; loops and repeated
    edges are dropped, a share of about ``blocks inner / (2 nodes)`` of those within blocks. Time and memory grow with
    the number of edges and of words, not with the square of the number of nodes.

    A word is in a node with a chance of ``common``, or ``common + topic`` for the words of its block's topic, which
    each word belongs to with a chance of ``topic_share``.

    Args:
        nodes: Number of nodes, at least ``blocks``.
        blocks: Number of blocks, at least 2.
        inner: Expected number of neighbours of a node within its block.
        outer: Expected number of neighbours in all other blocks.
        words: Number of words, the features.
        common: Chance of a word.
        topic: How much more likely a word of the topic is; ``common + topic`` is at most 1.
        topic_share: Share of the words in a topic.
        known: Number of nodes of each block whose labels are known in training; all other nodes are held out.
        seed: Seed of everything that is drawn.

    Raises:
        HyperparameterError: an argument is out of range.

    Reference: P. W. Holland, K. B. Laskey, S. Leinhardt, "Stochastic blockmodels: first steps", Social Networks 1983;
    there each pair of nodes is joined independently.

    Example:
        >>> graph = block_model(1000, seed=1)
        >>> graph.nodes, graph.classes, int(graph.training.sum())
        (1000, 8, 160)
    """
    check_seed(seed)
    owner = "block_model"
    require(is_whole(blocks, 2), owner, f"blocks is a whole number of at least 2, not {blocks!r}")
    require(is_whole(nodes, blocks), owner, f"nodes is a whole number of at least {blocks}, not {nodes!r}")
    require(is_whole(words, 1) and is_whole(known, 1), owner, "words and known are whole numbers of at least 1")
    require(is_number(inner, least=0) and is_number(outer, least=0), owner, "inner and outer are at least 0")
    chances = all(is_number(chance, least=0) for chance in (common, topic, topic_share))
    require(chances and common + topic <= 1 and topic_share <= 1, owner, "chances are from 0 to 1, also common + topic")

    labels = torch.randint(0, blocks, (nodes,), generator=_draw(seed, "blocks"), device="cpu")
    inside, outside = _within(labels, int(nodes * inner / 2), seed), _between(labels, int(nodes * outer / 2), seed)
    edges = symmetrised(torch.cat([inside, outside], 1), nodes)
    topics = torch.rand(blocks, words, generator=_draw(seed, "topics"), dtype=torch.float32, device="cpu") < topic_share
    likely = (common + topic * topics.to(torch.float32))[labels]
    bags = torch.rand(nodes, words, generator=_draw(seed, "words"), dtype=torch.float32, device="cpu") < likely
    order = torch.randperm(nodes, generator=_draw(seed, "known labels"), device="cpu")
    training = torch.zeros(nodes, dtype=torch.bool, device="cpu")
    training[torch.cat([order[labels[order] == block][:known] for block in range(blocks)])] = True
    return Graph(edges, bags.to(torch.float32), labels, training, ~training)


def _draw(seed: int, purpose: str) -> torch.Generator:
    low, high = parameter_key(seed, "block model", purpose)
    return torch.Generator().manual_seed(low | high << 32)


def _within(labels: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Draw pairs of nodes of one block, ``[2, count]``."""
    draw = _draw(seed, "edges within blocks")
    sizes = torch.bincount(labels)
    source = torch.randint(0, len(labels), (count,), generator=draw, device="cpu")
    block = labels[source]
    place = (torch.rand(count, generator=draw, dtype=torch.float64, device="cpu") * sizes[block]).long()
    return torch.stack([source, labels.argsort(stable=True)[(sizes.cumsum(0) - sizes)[block] + place]])


def _between(labels: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Draw pairs of nodes of different blocks, ``[2, count]``."""
    draw = _draw(seed, "edges between blocks")
    sizes = torch.bincount(labels)
    source = torch.randint(0, len(labels), (count,), generator=draw, device="cpu")
    block, others = labels[source], len(labels) - sizes
    # A node of the block's complement: nodes in the order of their blocks, counted from the end of the block around.
    place = (torch.rand(count, generator=draw, dtype=torch.float64, device="cpu") * others[block]).long()
    return torch.stack([source, labels.argsort(stable=True)[(sizes.cumsum(0)[block] + place) % len(labels)]])
