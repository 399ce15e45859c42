"""Generated block models: sizes, edges within and between blocks, words, the seed, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.graphs import block_model

NODES, BLOCKS = 4000, 5


def test_edges_are_as_many_as_were_asked_for_and_end_where_they_should() -> None:
    graph = block_model(NODES, blocks=BLOCKS, inner=8.0, outer=3.0, seed=1)
    source, target = graph.edges[:, graph.edges[0] < graph.edges[1]]
    same = graph.labels[source] == graph.labels[target]
    between, within = int((~same).sum()), int(same.sum())
    # Of m draws of P pairs about m^2 / 2 P repeat an earlier one: 16000 of 1.6 million pairs within blocks (80, and 20
    # loops), and 6000 of 6.4 million between them (3). Five standard deviations of such counts.
    assert 16000 - 100 - 5 * 10 <= within <= 16000 - 100 + 5 * 10
    assert 6000 - 3 - 5 * 2 <= between <= 6000
    sizes = torch.bincount(graph.labels)
    assert bool(((sizes - NODES / BLOCKS).abs() < 5 * (NODES / BLOCKS * (1 - 1 / BLOCKS)) ** 0.5).all())


def test_every_other_node_is_as_likely_a_neighbour() -> None:
    """Four blocks of unlike sizes would show a bias; the chance of a node depends on whether the block is its own."""
    graph = block_model(400, blocks=4, inner=0.0, outer=100.0, seed=2)
    source, target = graph.edges[:, graph.edges[0] != graph.edges[1]]
    degree = torch.bincount(target, minlength=400).double()
    assert not bool((graph.labels[source] == graph.labels[target]).any())
    for block in range(4):
        mine = graph.labels[source] == block
        for other in set(range(4)) - {block}:
            ends = torch.bincount(target[mine], minlength=400)[graph.labels == other].double()
            # About 100 of 300 nodes are joined: a count of a block is binomial, of its nodes times a hundred draws.
            chance = float(degree.sum()) / (400 * 300)
            pairs = int((graph.labels == block).sum()) * len(ends)
            assert abs(float(ends.sum()) - chance * pairs) < 0.1 * chance * pairs
    assert int(degree.min()) > 0


def test_words_tell_of_the_block() -> None:
    graph = block_model(NODES, blocks=BLOCKS, words=40, common=0.1, topic=0.4, topic_share=0.5, seed=3)
    means = torch.stack([graph.features[graph.labels == block].mean(0) for block in range(BLOCKS)])
    off = torch.minimum((means - 0.1).abs(), (means - 0.5).abs())
    # Five deviations of a mean of about 800 words; the two chances are 0.4 apart.
    assert float(off.max()) < 5 * (0.25 / 700) ** 0.5
    assert 0.3 < float((means > 0.3).float().mean()) < 0.7
    assert set(graph.features.unique().tolist()) == {0.0, 1.0}


def test_known_labels_are_so_many_a_block_and_the_others_are_held_out() -> None:
    graph = block_model(NODES, blocks=BLOCKS, known=30)
    assert torch.bincount(graph.labels[graph.training]).tolist() == [30] * BLOCKS
    assert torch.equal(graph.held_out, ~graph.training)


def test_a_seed_decides_everything() -> None:
    one, again, other = block_model(500, seed=1), block_model(500, seed=1), block_model(500, seed=2)
    for field in ("edges", "features", "labels", "training"):
        assert torch.equal(getattr(one, field), getattr(again, field))
        assert not torch.equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": 1},
        {"nodes": 7},
        {"nodes": 1000.0},
        {"words": 0},
        {"known": 0},
        {"inner": -1.0},
        {"outer": float("nan")},
        {"common": 0.9, "topic": 0.2},
        {"topic_share": 1.5},
        {"seed": True},
    ],
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(gw.HyperparameterError):
        block_model(**{"nodes": 1000, **wrong})
