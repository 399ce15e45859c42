"""Halo links on real ranks: the bits and bytes of the simulation, disagreements and failures named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed as dist
from small_graphs import CLASSES, FEATURES, parts_of, random_graph
from torch.nn import functional as F

import gradwire as gw
from gradwire.graphs import GAT, GCN, GraphNetwork, GraphSAGE, extended, forward_together
from ranks import Ranks

WORKERS, STEPS = 3, 4
SPECS = [
    "fp32",
    "bf16",
    "VARCO(start=4, end=1, slope=2)",
    "CDFGNN(tolerance=0.2, values=QSGDinf(levels=7))",
    "CDFGNN(tolerance=0.5, adaptive=True)",
    "isolated",
]


def network(name: str) -> GraphNetwork:
    torch.manual_seed(0)
    kind = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE}[name]
    return kind(FEATURES, CLASSES, width=8, layers=2)


def loss_of(logits: torch.Tensor, part: Any) -> torch.Tensor:
    return F.cross_entropy(logits[part.training], part.labels[part.training], reduction="sum")


def real(name: str, spec: str) -> tuple[list[torch.Tensor], gw.Traffic, dict[str, Any]]:
    """Take steps on this rank, each with its own gradient, and return the last gradients, traffic and state."""
    part = parts_of(random_graph(), WORKERS)[dist.get_rank()]
    model, halo = network(name), gw.HaloLink(part.boundary, spec, steps=STEPS, seed=3)
    for _ in range(STEPS):
        model.zero_grad()
        loss = loss_of(model(part.features, part, halo), part)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad  # type: ignore[operator]
        halo.next_round(float(loss.detach()))
    before = halo.traffic()
    with torch.no_grad(), halo.evaluation():
        model(part.features, part, halo)
    assert halo.traffic() == before
    state = halo.state_dict()
    halo.close()
    return [p.detach() for p in model.parameters()], before, state


def simulated(name: str, spec: str) -> tuple[list[list[torch.Tensor]], gw.SimulatedHaloLink]:
    parts = parts_of(random_graph(), WORKERS)
    models = [network(name) for _ in parts]
    halo = gw.SimulatedHaloLink([p.boundary for p in parts], spec, steps=STEPS, seed=3)
    for _ in range(STEPS):
        for model in models:
            model.zero_grad()
        found = forward_together(models, [p.features for p in parts], parts, halo)
        losses = torch.stack([loss_of(out, p) for out, p in zip(found, parts)])
        losses.sum().backward()
        with torch.no_grad():
            for p in (p for model in models for p in model.parameters()):
                p -= 0.01 * p.grad  # type: ignore[operator]
        halo.next_round(losses.detach().tolist())
    return [[p.detach() for p in model.parameters()] for model in models], halo


@pytest.mark.ranks
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
def test_real_ranks_and_simulated_ones_have_the_same_bits_bytes_and_memory(
    three_ranks: Ranks, name: str, spec: str
) -> None:
    found = three_ranks(real, name, spec)
    weights, halo = simulated(name, spec)
    assert not all(torch.equal(a, b) for a, b in zip(weights[0], weights[1]))
    for rank, (own, traffic, state) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(own, weights[rank]))
        assert traffic == halo.traffic()[rank]
        expected = halo.state_dict()[f"rank {rank}"]
        assert state["rank"].keys() == expected.keys()
        assert all(torch.equal(state["rank"][key], value) for key, value in expected.items())
        assert int(state["global"]["round"]) == STEPS
        common = halo.state_dict()["global"]
        assert state["global"].keys() == common.keys()
        assert all(torch.equal(state["global"][key], value) for key, value in common.items())
        assert ("losses" in common) == ("adaptive" in spec)


def unequal() -> tuple[str, str]:
    """Give a link that follows the loss no loss, and then another one on each rank."""
    part = parts_of(random_graph(), WORKERS)[dist.get_rank()]
    halo = gw.HaloLink(part.boundary, "CDFGNN(adaptive=True)")
    try:
        halo.next_round()
    except gw.IncompatibleError as error:
        told = str(error)
    halo.next_round((0.1, 0.2, 0.3)[dist.get_rank()])
    losses = halo.state_dict()["global"]["losses"]
    halo.close()
    return told, losses.numpy().tobytes().hex()


@pytest.mark.ranks
def test_ranks_agree_on_the_bits_of_the_loss(three_ranks: Ranks) -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last bit."""
    answers = three_ranks(unequal)
    expected = torch.full((2,), 0.1 + 0.2 + 0.3, dtype=torch.float64).numpy().tobytes().hex()
    assert all("give this worker's loss" in told for told, _ in answers)
    assert [bits for _, bits in answers] == [expected] * WORKERS


def differing(what: str) -> str:
    rank = dist.get_rank()
    boundary = parts_of(random_graph(edges=100 if what == "graph" and rank else 150), WORKERS)[rank].boundary
    spec = "bf16" if what == "method" and rank else "fp32"
    if what == "workers":
        boundary = parts_of(random_graph(), 4)[rank].boundary
    try:
        gw.HaloLink(boundary, spec, seed=rank if what == "seed" else 0, steps=10 + rank if what == "steps" else None)
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("method", "RankMismatchError: rank 1 differs from rank 0 in 'method of the halo'"),
        ("seed", "RankMismatchError: rank 1 differs from rank 0 in 'seed'"),
        ("steps", "RankMismatchError: rank 1 differs from rank 0 in 'steps'"),
        ("graph", "RankMismatchError: rank 1 differs from rank 0 in 'boundaries'"),
        ("workers", "IncompatibleError: the boundary is that of worker"),
    ],
)
def test_ranks_that_differ_are_told_before_anything_travels(three_ranks: Ranks, what: str, told: str) -> None:
    for answer in three_ranks(differing, what):
        assert answer.startswith(told)


def broken() -> str:
    """Rank 0 sends rows of another width than rank 1 expects."""
    part = parts_of(random_graph(), WORKERS)[dist.get_rank()]
    halo = gw.HaloLink(part.boundary, "fp32")
    try:
        halo.forward(0, [torch.ones(len(part.own), 4 + 4 * dist.get_rank())])
    except gw.GradwireError as error:
        with pytest.raises(type(error)):
            halo.forward(0, [torch.ones(len(part.own), 4)])
        return str(error)
    finally:
        halo.close()
    return "no error"


@pytest.mark.ranks
def test_a_failure_names_the_rank_the_layer_and_the_step(three_ranks: Ranks) -> None:
    answers = three_ranks(broken)
    assert any("layer 0 forward, step 0" in answer for answer in answers)
    assert all("rank" in answer for answer in answers)


def closed() -> str:
    part = parts_of(random_graph(), WORKERS)[dist.get_rank()]
    halo = gw.HaloLink(part.boundary, "fp32")
    halo.close()
    try:
        halo.forward(0, [torch.ones(len(part.own), 4)])
    except gw.ExchangeError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_closed_link_says_so(three_ranks: Ranks) -> None:
    assert all("closed" in answer for answer in three_ranks(closed))


def test_a_simulation_needs_all_boundaries_in_order() -> None:
    boundaries = [part.boundary for part in parts_of(random_graph(), 3)]
    for wrong in (boundaries[:2], boundaries[::-1], []):
        with pytest.raises(gw.IncompatibleError, match="of all workers"):
            gw.SimulatedHaloLink(wrong, "fp32")


def elsewhere() -> str:
    part = parts_of(random_graph(), WORKERS)[dist.get_rank()]
    halo = gw.HaloLink(part.boundary, "fp32")
    try:
        # Rows need no device to be outside of main memory.
        extended(halo, 1, [torch.zeros(len(part.own), 2, device="meta")])
    except gw.IncompatibleError as error:
        return str(error)
    finally:
        halo.close()
    return "nothing was refused"


@pytest.mark.ranks
def test_rows_outside_of_main_memory_are_refused_by_name(three_ranks: Ranks) -> None:
    for said in three_ranks(elsewhere):
        assert said.startswith("the rows of layer 1 are on meta, and halos are exchanged in main memory")


@pytest.mark.parametrize("spec", ["fp32", "CDFGNN(tolerance=0.2)"])
def test_a_state_loads_on_the_rank_that_saved_it_alone(spec: str) -> None:
    """A worker with the caches of another would go on with other rows than those that it is sent."""
    _, halo = simulated("gcn", spec)
    first, second = halo.workers[:2]
    saved = first.state()
    with pytest.raises(gw.IncompatibleError, match="the state of rank 0, and this is rank 1"):
        second.load(saved)
    first.load(saved)
    assert first.state()["rank"].keys() == saved["rank"].keys()
    assert all(torch.equal(first.state()["rank"][key], value) for key, value in saved["rank"].items())
    mixed = halo.state_dict()
    mixed["rank 1"], mixed["rank 2"] = mixed["rank 2"], mixed["rank 1"]
    with pytest.raises(gw.IncompatibleError, match="the state of rank 2, and this is rank 1"):
        halo.load_state_dict(mixed)


def test_a_state_that_does_not_tell_its_rank_is_refused_where_that_matters() -> None:
    """States did not always have the rank: those without caches have nothing that would differ."""
    (_, exact), (_, cached) = simulated("gcn", "fp32"), simulated("gcn", "CDFGNN(tolerance=0.2)")
    earlier = [halo.workers[1].state() for halo in (exact, cached)]
    for state in earlier:
        del state["rank"]["rank"]
    fresh = gw.SimulatedHaloLink([worker.boundary for worker in exact.workers], "fp32")
    fresh.workers[1].load(earlier[0])
    assert fresh.workers[1].round == STEPS
    with pytest.raises(gw.IncompatibleError, match="it has no 'rank'"):
        cached.workers[1].load(earlier[1])
