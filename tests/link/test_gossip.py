"""Gossip of real ranks: the simulation's bits, DDP, checkpoints, the mean, failures."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from ranks import Ranks, fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

COUNT = 4
"""In a ring of four a rank has one that is not its neighbour."""

SPECS = (
    "DPSGD(every=2)",
    "ChocoSGD(compressor=QSGDinf(levels=3, block_size=64), gamma=0.5)",
    "ChocoSGD(compressor=Threshold(threshold=0.002), gamma=0.2)",
    "PowerGossip(iterations=2)",
    "PowerGossip(graph='exponential')",
)


def built(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), *([nn.BatchNorm1d(30)] if norm else []), nn.ReLU(), nn.Linear(30, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def run(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[torch.Tensor]:
    rows = []
    for step in steps:
        optimizer.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        optimizer.step()
        rows.append(flat(module))
    return rows


def trained(spec: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train through DDP, in several small buckets; no optimizer is given, so that it is found by its parameters."""
    rank, module = torch.distributed.get_rank(), DistributedDataParallel(built())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    link = gw.attach(module, spec, **{"min_numel": 0, "chunk_numel": 40} | options)
    rows = run(module, optimizer, rank, range(steps))
    sent = link.traffic()
    with link.global_parameters():
        mean = flat(module)
    own = flat(module)
    state = link.state_dict()
    link.synchronise()
    answer = {"rows": rows, "mean": mean, "own": own, "after": flat(module), "sent": sent, "round": link.round}
    for _ in range(2 * link.method.traits.local_steps):
        link.after_step()
    answer["still"] = flat(module)
    link.close()
    return answer | {"state": state, "diagnostics": link.diagnostics()["parameters"]}


def simulated(spec: str, steps: int, **options: Any) -> tuple[list[list[torch.Tensor]], gw.SimulatedLocalSteps]:
    modules = [built() for _ in range(COUNT)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in modules]
    named = [module.named_parameters() for module in modules]
    link = gw.SimulatedLocalSteps(named, spec, **{"min_numel": 0} | options)
    rows: list[list[torch.Tensor]] = [[] for _ in modules]
    for step in range(steps):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers)):
            run(module, optimizer, rank, range(step, step + 1))
        link.after_step()
        for found, module in zip(rows, modules):
            found.append(flat(module))
    return rows, link


@pytest.mark.parametrize("spec", SPECS)
def test_real_ranks_have_the_simulations_bits(four_ranks: Ranks, spec: str) -> None:
    """6: in buckets of any layout, state and all; and the mean over ranks is the simulation's, on all of them."""
    found, (rows, link) = four_ranks(trained, spec, 7, {}), simulated(spec, 7)
    mean, state = torch.cat(list(link.global_parameters.values())), link.state_dict()
    for rank, (real, ours) in enumerate(zip(found, rows)):
        assert all(torch.equal(a, b) for a, b in zip(real["rows"], ours))
        assert torch.equal(real["mean"], mean)
        assert torch.equal(real["own"], ours[-1])
        assert torch.equal(real["after"], mean)
        assert torch.equal(real["still"], mean)
        own = state[f"rank {rank}"]
        assert set(own) == set(real["state"]["rank"])
        assert all(torch.equal(x, real["state"]["rank"][key]) for key, x in own.items())
        # With one bucket there are fewer headers, to the same neighbours.
        assert real["sent"].sent_to.keys() == link.link.traffic(rank).sent_to.keys()
    assert not torch.equal(found[0]["rows"][0], found[1]["rows"][0])
    assert {one["round"] for one in found} == {state["global"]["round"].item()}


@pytest.mark.parametrize("spec", SPECS[1:4])
def test_bytes_are_the_simulations(four_ranks: Ranks, spec: str) -> None:
    """7: in one bucket to the byte, by rank and by neighbour; none go to the rank across the ring."""
    found, (_, link) = four_ranks(trained, spec, 5, {"chunk_numel": 1 << 20}), simulated(spec, 5)
    for rank, one in enumerate(found):
        expected = link.link.traffic(rank)
        assert one["sent"].sent_to == expected.sent_to
        assert set(expected.sent_to) == {(rank + 1) % 4, (rank - 1) % 4}
        assert (one["sent"].sent_bytes, one["sent"].received_bytes) == (expected.sent_bytes, expected.received_bytes)


def test_small_parameters_travel_whole_and_warm_up_is_synchronous(four_ranks: Ranks) -> None:
    spec = "ChocoSGD(compressor=TopK(density=0.05), gamma=0.1)"
    found, (rows, _) = four_ranks(trained, spec, 5, {"min_numel": 100}), simulated(spec, 5, min_numel=100)
    assert all(torch.equal(real["rows"][-1], ours[-1]) for real, ours in zip(found, rows))
    found = four_ranks(trained, spec, 5, {"warmup_steps": 3})
    for step, alike in ((0, True), (2, True), (3, False), (4, False)):
        assert torch.equal(found[0]["rows"][step], found[1]["rows"][step]) == alike


def test_what_a_compressor_leaves_out_is_measured(four_ranks: Ranks) -> None:
    """In the rounds that are measured, of the difference; of gossip as it is there is nothing to measure."""
    measured = four_ranks(trained, "ChocoSGD(compressor=ScaledSign(), gamma=0.2)", 101, {})[0]["diagnostics"]
    assert all(0.1 < row["relative_error"] < 1 for row in measured.values())
    assert len(measured) == 4
    assert four_ranks(trained, "dpsgd", 2, {})[0]["diagnostics"] == {}


def resumed(spec: str, cut: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters of a training that does not stop, and of one that another link goes on with."""
    rank = torch.distributed.get_rank()

    def started() -> tuple[Any, Any, Any]:
        module = DistributedDataParallel(built())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return module, optimizer, gw.attach(module, spec, optimizer=optimizer, min_numel=0)

    whole = started()
    run(whole[0], whole[1], rank, range(steps))
    wanted = flat(whole[0])
    whole[2].close()
    first = started()
    run(first[0], first[1], rank, range(cut))
    saved = copy.deepcopy((first[0].module.state_dict(), first[1].state_dict(), first[2].state_dict()))
    first[2].close()
    module, optimizer, link = started()
    module.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    link.load_state_dict(saved[2])
    run(module, optimizer, rank, range(cut, steps))
    link.close()
    return wanted, flat(module)


@pytest.mark.parametrize("spec", SPECS[:4])
def test_a_training_is_resumed_exactly(four_ranks: Ranks, spec: str) -> None:
    """8: of DPSGD between two exchanges."""
    for whole, again in four_ranks(resumed, spec, 3, 7):
        assert torch.equal(whole, again)


def saved_and_loaded(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    module, rank = built(), torch.distributed.get_rank()
    link = gw.Link(module.named_parameters(), "choco_sgd", min_numel=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        run(module, optimizer, rank, range(step, step + 1))
        link.after_step()
    gw.save(link, folder)
    before = torch.cat([x.reshape(-1) for x in link.state_dict()["rank"].values()])
    link.close()
    other = gw.Link(module.named_parameters(), "choco_sgd", min_numel=0)
    gw.load(other, folder)
    after = torch.cat([x.reshape(-1) for x in other.state_dict()["rank"].values()])
    other.close()
    return before, after


def test_files_hold_every_ranks_estimates(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks(saved_and_loaded, str(tmp_path))
    assert all(torch.equal(before, after) for before, after in found)
    assert not torch.equal(found[0][0], found[1][0])


def with_norm() -> dict[str, Any]:
    rank, module = torch.distributed.get_rank(), DistributedDataParallel(built(norm=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.attach(module, "dpsgd", optimizer=optimizer)
    run(module, optimizer, rank, range(4))
    own = [b.clone() for b in module.module.buffers()]
    with link.global_parameters():
        inside = [b.clone() for b in module.module.buffers()]
    after = [b.clone() for b in module.module.buffers()]
    link.synchronise()
    answer = {"own": own, "inside": inside, "after": after, "end": [b.clone() for b in module.module.buffers()]}
    link.close()
    return answer | {"broadcasts": module.broadcast_buffers}


def test_buffers_stay_ones_own_but_for_the_mean(four_ranks: Ranks) -> None:
    found = four_ranks(with_norm)
    mean = torch.stack([one["own"][0] for one in found]).double().mean(0).float()
    for one in found:
        assert not one["broadcasts"]
        assert torch.equal(one["inside"][0], mean)
        assert torch.equal(one["after"][0], one["own"][0])
        assert torch.equal(one["end"][0], mean)
        assert int(one["own"][2]) == int(one["inside"][2]) == 4
    assert not torch.equal(found[0]["own"][0], found[1]["own"][0])


def refused(folder: str) -> list[str]:
    rank, told = torch.distributed.get_rank(), []
    own = Path(folder) / f"rank {rank}"
    own.mkdir()
    (own / "graph.txt").write_text("0 1\n1 2\n2 3\n" + "0 3\n" * (rank == 2))
    os.chdir(own)
    for spec, options in (("DPSGD(graph='graph.txt')", {}), ("dpsgd", {"check": True})):
        try:
            gw.Link(built().named_parameters(), spec, **options)
        except gw.GradwireError as error:
            told.append(str(error))
    os.chdir("/")
    return told


def test_ranks_that_read_different_graphs_are_told_so(four_ranks: Ranks, tmp_path: Path) -> None:
    for told in four_ranks(refused, str(tmp_path)):
        assert "rank 2 differs from rank 0 in 'graph'" in told[0]
        assert "each rank has its own: leave it out" in told[1]


def diverging() -> str:
    rank, module = torch.distributed.get_rank(), built()
    link = gw.Link(module.named_parameters(), "dpsgd", min_numel=0)
    wait_until_watched()
    for step in range(3):
        if rank == 2 and step == 1:
            with torch.no_grad():
                module[0].bias[3] = torch.nan
        try:
            link.after_step()
        except gw.ExchangeError as error:
            return f"{error} {bool(torch.isfinite(flat(module)).all())}"
    return "no error"


def leaving() -> str:
    rank, module = torch.distributed.get_rank(), DistributedDataParallel(built())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.attach(module, "power_gossip", optimizer=optimizer, min_numel=0)
    wait_until_watched()
    for step in range(6):
        # Not before DDP has laid out its buckets anew, in the second forward, for which it needs all ranks.
        if rank == 1 and step == 3:
            os._exit(0)
        try:
            run(module, optimizer, rank, range(step, step + 1))
        except gw.ExchangeError as error:
            # The ranks beside it find out first, and those beyond by them.
            return f"{error} {link.error}"
    return "no error"


@pytest.mark.parametrize(("what", "guilty"), [(diverging, 2), (leaving, 1)])
def test_a_rank_that_fails_is_named_all_round_the_ring(what: Any, guilty: int) -> None:
    """9: also by the rank that is not its neighbour."""
    with fresh_ranks(COUNT) as ranks:
        ranks.start(what)
        answers = ranks.collect(80)
    for rank, (kind, value) in enumerate(answers):
        if what is leaving and rank == guilty:
            assert (kind, value) == ("gone", 0)
            continue
        assert kind == "ok", value
        assert f"rank {guilty}" in value or f"ranks {guilty}" in value, value
        if what is diverging:
            assert "parameter '0.bias' is not finite" in value
            assert value.endswith("True") == (rank != guilty)
