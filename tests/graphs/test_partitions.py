"""Partitions and subgraphs: every node has one owner, every edge is somewhere, and halos are what edges need."""

from __future__ import annotations

import pytest
import torch
from small_graphs import CLASSES, FEATURES, Run, link_of, parts_of, random_graph, whole

import gradwire as gw
from gradwire.graphs import GCN, PARTITIONS, Graph, cut_edges, partition, subgraphs, symmetrised


@pytest.mark.parametrize("rule", PARTITIONS)
@pytest.mark.parametrize("workers", [1, 3, 4, 60])
def test_every_node_has_an_owner_and_shares_differ_by_one(rule: str, workers: int) -> None:
    sizes = torch.bincount(partition(random_graph(), workers, rule), minlength=workers)
    assert len(sizes) == workers
    assert int(sizes.sum()) == 60
    assert int(sizes.max()) - int(sizes.min()) <= 1


def test_the_seed_draws_a_random_partition_and_no_other() -> None:
    graph = random_graph()
    assert torch.equal(partition(graph, 4, "random", 1), partition(graph, 4, "random", 1))
    assert not torch.equal(partition(graph, 4, "random", 1), partition(graph, 4, "random", 2))
    for rule in ("contiguous", "greedy"):
        assert torch.equal(partition(graph, 4, rule, 1), partition(graph, 4, rule, 2))


def test_greedy_growing_follows_a_slow_definition() -> None:
    graph = random_graph(30, 60)
    found = partition(graph, 3, "greedy").tolist()
    neighbours = [set(graph.edges[0][graph.edges[1] == v].tolist()) - {v} for v in range(30)]
    owner = [-1] * 30
    for worker in range(3):
        for _ in range(10):
            free = [v for v in range(30) if owner[v] < 0]
            inside = {v: sum(owner[u] == worker for u in neighbours[v]) for v in free}
            owner[max(free, key=lambda v: (inside[v], -v))] = worker
    assert found == owner


def test_greedy_growing_keeps_separate_cliques_whole() -> None:
    pairs = torch.tensor([(b * 5 + i, b * 5 + j) for b in range(4) for i in range(5) for j in range(i)]).T
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    nodes = torch.ones(20)
    graph = Graph(symmetrised(shuffled[pairs], 20), nodes[:, None], nodes.long(), nodes > 0, nodes < 0)
    assert cut_edges(graph, partition(graph, 4, "greedy")) == 0
    assert cut_edges(graph, partition(graph, 4, "random")) > 0.5


def test_partitions_that_cannot_be_are_refused() -> None:
    graph = random_graph()
    with pytest.raises(gw.HyperparameterError, match="partition is one of contiguous, random, greedy, not 'metis'"):
        partition(graph, 4, "metis")
    with pytest.raises(gw.HyperparameterError, match="60 nodes cannot be shared by 61 workers"):
        partition(graph, 61)


def test_graphs_that_make_no_sense_are_refused() -> None:
    marks = torch.ones(3, dtype=torch.bool)
    with pytest.raises(gw.IncompatibleError, match="outside 0 to 2"):
        Graph(torch.tensor([[0], [3]]), torch.ones(3, 1), torch.zeros(3).long(), marks, marks)
    with pytest.raises(gw.IncompatibleError, match="of every node"):
        Graph(torch.tensor([[0], [1]]), torch.ones(3, 1), torch.zeros(2).long(), marks, marks)


@pytest.mark.parametrize("wrong", ["shuffled", "one way", "without loops", "twice"])
def test_edges_in_another_form_are_refused(wrong: str) -> None:
    """As those of other libraries: greedy partitions and the weights of edges would be wrong without an error."""
    edges = symmetrised(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    marks, rest = torch.ones(4, dtype=torch.bool), (torch.ones(4, 1), torch.zeros(4).long())
    Graph(edges, *rest, marks, marks)
    broken = {
        "shuffled": edges[:, torch.arange(edges.shape[1]).roll(1)],
        "one way": edges[:, edges[0] <= edges[1]],
        "without loops": edges[:, edges[0] != edges[1]],
        "twice": edges.repeat_interleave(2, dim=1),
    }
    with pytest.raises(gw.IncompatibleError, match="symmetrised first"):
        Graph(broken[wrong], *rest, marks, marks)


def test_edges_go_both_ways_once_and_every_node_has_one_to_itself() -> None:
    edges = symmetrised(torch.tensor([[0, 0, 2, 1], [1, 1, 2, 0]]), 3)
    assert list(map(tuple, edges.T.tolist())) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("rule", PARTITIONS)
@pytest.mark.parametrize("workers", [1, 4])
def test_subgraphs_hold_every_edge_once_with_its_weight_in_one_order(rule: str, workers: int) -> None:
    graph, found = random_graph(), {}
    degree = torch.bincount(graph.edges[1]).double()
    parts = parts_of(graph, workers, rule)
    for part in parts:
        halo = [p.own[p.boundary.leaving[part.boundary.rank]] for p in parts]
        assert [len(h) for h in halo] == part.boundary.arriving
        number = torch.cat([part.own, *halo])
        assert int(part.target.max()) < len(part.own)
        edges = list(zip(number[part.source].tolist(), part.own[part.target].tolist()))
        assert edges == sorted(edges, key=lambda edge: edge[::-1])
        found.update(dict(zip(edges, part.weight.tolist())))
        assert torch.equal(part.features, graph.features[part.own])
        assert graph.training[part.own[part.training]].all()
        assert part.labelled == int(graph.training.sum())
    assert sum(len(part.source) for part in parts) == len(found)
    assert set(found) == set(map(tuple, graph.edges.T.tolist()))
    for (u, v), weight in found.items():
        assert weight == pytest.approx(float((degree[u] * degree[v]).rsqrt()), rel=1e-6)
    assert sum(len(part.training) for part in parts) == int(graph.training.sum())


def test_a_halo_holds_the_nodes_that_edges_begin_at_and_no_others() -> None:
    graph = random_graph()
    owner = partition(graph, 4, "random", 1)
    for rank, part in enumerate(subgraphs(graph, owner)):
        source, target = graph.edges
        needed = source[(owner[target] == rank) & (owner[source] != rank)].unique()
        assert sum(part.boundary.arriving) == len(needed)
        assert part.boundary.arriving == [int((owner[needed] == other).sum()) for other in range(4)]
        assert len(part.boundary.leaving[rank]) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_owners_and_edges_of_smaller_integers_serve_as_well(dtype: torch.dtype) -> None:
    """Keys of pairs of workers and nodes exceed these types: rows of the halo were wrong, in silence."""
    nodes, workers = 1 << 16, 200
    places = torch.arange(nodes)
    edges = symmetrised(torch.stack([places, places.roll(1)]), nodes)
    marks = torch.ones(nodes, dtype=torch.bool)
    graph = Graph(edges, torch.zeros(nodes, 1), torch.zeros(nodes, dtype=torch.int64), marks, ~marks)
    owner = partition(graph, workers, "contiguous")
    short = Graph(edges.int(), graph.features, graph.labels, marks, ~marks)
    for mine, other in zip(subgraphs(graph, owner), subgraphs(short, owner.to(dtype)), strict=True):
        assert torch.equal(mine.source, other.source)
        assert torch.equal(mine.boundary.counts, other.boundary.counts)


def test_a_last_worker_may_own_no_node() -> None:
    graph = random_graph()
    owner = partition(graph, 3)
    parts = subgraphs(graph, owner, workers=4)
    assert len(parts) == parts[0].boundary.workers == 4
    assert len(parts[3].own) == len(parts[3].source) == sum(parts[3].boundary.arriving) == 0
    alone = Run(lambda: GCN(FEATURES, CLASSES), [whole(graph)], None).train(5)
    together = Run(lambda: GCN(FEATURES, CLASSES), parts, link_of(parts)).train(5)
    for key, value in alone.weights().items():
        torch.testing.assert_close(together.weights()[key], value, rtol=1e-4, atol=1e-5)


def test_owners_that_do_not_fit_are_refused() -> None:
    graph = random_graph()
    owner = partition(graph, 3)
    for wrong, workers in ((owner[:-1], None), (owner - 1, None), (owner, 2)):
        with pytest.raises(gw.IncompatibleError, match="needs an owner of each from 0 to"):
            subgraphs(graph, wrong, workers)
