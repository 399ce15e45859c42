"""Training on parts of a graph with full communication is training on the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_graphs import CLASSES, FEATURES, Run, link_of, parts_of, random_graph, whole
from torch import nn

import gradwire as gw
from gradwire.graphs import GAT, GCN, GraphNetwork, GraphSAGE, extended, forward_together

NETWORKS: dict[str, Callable[[], GraphNetwork]] = {
    "gcn": lambda: GCN(FEATURES, CLASSES, width=8, layers=3),
    "gat": lambda: GAT(FEATURES, CLASSES, width=8, layers=3, heads=2),
    "sage": lambda: GraphSAGE(FEATURES, CLASSES, width=8, layers=3),
}


@pytest.mark.parametrize("rule", ["random", "greedy"])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_parts_train_as_the_whole_does(name: str, workers: int, rule: str) -> None:
    """Sums over edges have the same order; matrices of other heights, and sums over workers, round otherwise.

    A step changes weights of about 1 by relative errors of some 1e-7 for each of 60 rows and 3 layers; 20 steps of
    descent on a smooth loss add these up.
    """
    graph = random_graph()
    alone = Run(NETWORKS[name], [whole(graph)], None, lr=0.5).train(20)
    parts = parts_of(graph, workers, rule)
    together = Run(NETWORKS[name], parts, link_of(parts), lr=0.5).train(20)
    assert alone.losses[-1] < 0.98 * alone.losses[0]
    for key, value in alone.weights().items():
        torch.testing.assert_close(together.weights()[key], value, rtol=1e-4, atol=1e-5)
    isolated = Run(NETWORKS[name], parts, link_of(parts, "isolated"), lr=0.5).train(20)
    assert any(not torch.allclose(isolated.weights()[k], v, rtol=1e-2, atol=1e-3) for k, v in alone.weights().items())


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_where_all_sums_are_exact_the_bits_are_those_of_the_whole(workers: int) -> None:
    """Small integers, a weight of one on every edge: float32 rounds nothing, whatever the order."""
    graph = random_graph()
    draw = torch.Generator().manual_seed(4)
    x = torch.randint(-3, 4, (graph.nodes, FEATURES), generator=draw).float()
    first = torch.randint(-2, 3, (FEATURES, 6), generator=draw).float()
    second = torch.randint(-2, 3, (6, 4), generator=draw).float()
    seeds = torch.randint(-2, 3, (graph.nodes, 4), generator=draw).float()

    def run(parts: list, link: gw.SimulatedHaloLink | None) -> tuple[torch.Tensor, list[torch.Tensor]]:  # type: ignore[type-arg]
        weights = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        rows = [x[p.own] for p in parts]
        for layer, weight in enumerate(weights):
            known = extended(link, layer, [own @ weight for own in rows])
            zeros = [torch.zeros(len(p.own), weight.shape[1]) for p in parts]
            rows = [z.index_add(0, p.target, k.index_select(0, p.source)) for z, k, p in zip(zeros, known, parts)]
            rows = [torch.relu(own) for own in rows]
        total = sum((own * seeds[p.own]).sum() for own, p in zip(rows, parts))
        gradients = torch.autograd.grad(total, weights)  # type: ignore[arg-type]
        out = torch.empty(graph.nodes, 4)
        for own, p in zip(rows, parts):
            out[p.own] = own.detach()
        return out, list(gradients)

    parts = parts_of(graph, workers)
    one, many = run([whole(graph)], None), run(parts, link_of(parts))
    assert float(one[0].abs().max()) < 2**20
    assert torch.equal(one[0], many[0])
    assert all(torch.equal(a, b) for a, b in zip(one[1], many[1]))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    graph = random_graph(20, 40)
    parts = parts_of(graph, 3)
    run = Run(NETWORKS[name], parts, link_of(parts))
    weight = next(run.model.parameters())
    run.step()
    assert weight.grad is not None
    direction = weight.grad / weight.grad.norm()

    def loss(distance: float) -> float:
        with torch.no_grad():
            weight.add_(direction, alpha=distance)
            found = [
                float(nn.functional.cross_entropy(out[p.training], p.labels[p.training], reduction="sum"))
                for out, p in zip(run.logits(), parts)
            ]
            weight.sub_(direction, alpha=distance)
        return sum(found) / parts[0].labelled

    weight.data.add_(weight.grad, alpha=run.lr)
    other = list(run.model.parameters())[1:]
    for p in other:
        if p.grad is not None:
            p.data.add_(p.grad, alpha=run.lr)
    # A loss of about 1 has errors of some 1e-7, so that the slope has errors of 1e-4; and a rectifier may turn.
    slope = (loss(1e-3) - loss(-1e-3)) / 2e-3
    assert slope == pytest.approx(float(weight.grad.norm()), rel=5e-3, abs=5e-4)


def test_sums_over_edges_are_the_formulas() -> None:
    graph = random_graph(12, 20)
    part = whole(graph)
    torch.manual_seed(0)
    gcn, gat = GCN(FEATURES, 4, layers=1), GAT(FEATURES, 4, layers=1)
    adjacency = torch.zeros(12, 12, dtype=torch.bool)
    adjacency[part.target, part.source] = True
    degree = adjacency.sum(1).float()
    mixed = adjacency / (degree[:, None] * degree).sqrt()
    expected = mixed @ (part.features @ gcn.layers[0].linear.weight.T)
    torch.testing.assert_close(gcn(part.features, part), expected)
    layer = gat.layers[0]
    z = part.features @ layer.linear.weight.T
    scores = nn.functional.leaky_relu((z @ layer.from_source[0])[None] + (z @ layer.from_target[0])[:, None], 0.2)
    alpha = scores.masked_fill(~adjacency, -torch.inf).softmax(1)
    torch.testing.assert_close(gat(part.features, part), alpha @ z)


def test_means_are_those_of_the_other_nodes_and_zero_where_there_are_none() -> None:
    graph = random_graph(14, 10)
    part = whole(graph)
    torch.manual_seed(0)
    sage = GraphSAGE(FEATURES, 4, layers=1)
    neighbours: list[list[int]] = [[] for _ in range(14)]
    for u, v in graph.edges.T.tolist():
        if u != v:
            neighbours[v].append(u)
    assert any(not found for found in neighbours)
    means = torch.stack([graph.features[found].mean(0) if found else torch.zeros(FEATURES) for found in neighbours])
    layer = sage.layers[0]
    joined = torch.cat([graph.features, means], 1)
    both = torch.cat([layer.of_own.weight, layer.of_neighbours.weight], 1)
    torch.testing.assert_close(sage(part.features, part), joined @ both.T)


def test_features_of_graphsage_are_sent_as_they_are_and_have_no_gradient() -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts)
    Run(lambda: GraphSAGE(FEATURES, CLASSES, width=8, layers=3), parts, link).train(1)
    rows = [(int(parts[0].boundary.counts[r].sum()), int(parts[0].boundary.counts[:, r].sum())) for r in range(4)]
    # Features forward; two hidden layers forward and backward.
    assert [t.dense_bytes for t in link.traffic()] == [
        4 * (FEATURES * leaving + 2 * 8 * (leaving + arriving)) for leaving, arriving in rows
    ]


def test_a_worker_without_known_labels_and_one_without_neighbours_take_part() -> None:
    graph = random_graph(12, 0)
    parts = parts_of(graph, 3)
    assert int(parts[0].boundary.counts.sum()) == 0
    link = link_of(parts)
    run = Run(NETWORKS["gcn"], parts, link).train(2)
    assert link.traffic()[0].sent_bytes == 0
    assert run.losses[1] < run.losses[0]
    graph = random_graph()
    graph.training[parts_of(graph, 4)[2].own] = False
    parts = parts_of(graph, 4)
    assert len(parts[2].training) == 0
    assert Run(NETWORKS["gat"], parts, link_of(parts)).train(2).losses[0] > 0


def test_evaluations_exchange_all_rows_and_are_neither_counted_nor_remembered() -> None:
    graph = random_graph()
    parts = parts_of(graph, 4)
    link = link_of(parts, "CDFGNN(tolerance=0.5)")
    run = Run(NETWORKS["gcn"], parts, link).train(3)
    traffic, state = link.traffic(), link.state_dict()
    with torch.no_grad(), link.evaluation():
        found = run.logits()
    expected = forward_together([run.model], [graph.features], [whole(graph)], None)[0]
    for own, part in zip(found, parts):
        torch.testing.assert_close(own, expected[part.own])
    assert link.traffic() == traffic
    assert all(torch.equal(a, link.state_dict()["rank 1"][k]) for k, a in state["rank 1"].items())


def test_a_second_derivative_is_refused() -> None:
    """The gradients of other workers would count as constants in it, in silence."""
    parts = parts_of(random_graph(), 2)
    rows = [part.features.clone().requires_grad_() for part in parts]
    known = torch.cat(extended(link_of(parts), 0, rows))
    first = torch.autograd.grad(known.pow(3).sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.cat(first).sum().backward()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: GAT(FEATURES, CLASSES, width=10, heads=4), "width is a multiple of heads, not 10 for 4"),
        (lambda: GraphSAGE(FEATURES, CLASSES, layers=0), "a network has at least 1, not 0"),
    ],
    ids=["heads", "layers"],
)
def test_networks_that_cannot_be_are_refused(build: Callable[[], GraphNetwork], told: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=told):
        build()
