"""A state that other numbers of ranks go on with than saved it: the policy of ``gradwire.load``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.link.state import kind_of
from ranks import Ranks, fresh_ranks

pytestmark = pytest.mark.ranks

STEPS = 5
LOCAL = (
    "LocalSGD(every=3)",
    "DiLoCo(every=3, inner=ErrorFeedback())",
    "StreamingDiLoCo(every=4, fragments=2, delay=2, inner=EDEN(bits=4))",
    "SparseLoCo(every=3, density=0.1)",
    "EASGD(every=2)",
)
GOSSIP = ("dpsgd", "choco_sgd", "power_gossip")


@pytest.fixture(scope="module", params=[2, 4])
def other_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with fresh_ranks(request.param, group_timeout_s=60) as ranks:
        yield ranks


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def started(spec: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, gw.Link]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    return module, optimizer, gw.Link(module.named_parameters(), spec, optimizer=optimizer, min_numel=0)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + step)
        optimizer.zero_grad()
        module(torch.randn(8, 20, generator=draw)).square().mean().backward()
        optimizer.step()


def saved(spec: str, folder: str) -> dict[str, Any]:
    module, optimizer, link = started(spec, 0)
    train(module, optimizer, 0, STEPS)
    gw.save(link, folder)
    own = flat(module)
    with link.global_parameters():
        held = flat(module)
    answer = {"own": own, "global": held, "state": link.state_dict(), "round": link.round}
    link.close()
    return answer


def resumed(spec: str, folder: str) -> dict[str, Any]:
    """Go on on this number of ranks, with models that hold something else on every rank."""
    rank = torch.distributed.get_rank()
    module, optimizer, link = started(spec, 7 + rank if spec in GOSSIP else 7)
    with torch.no_grad():
        # A link is built on the same parameters everywhere, unless ranks stay different.
        for p in () if spec in GOSSIP else module.parameters():
            p.add_(0.01 * rank)
    before = flat(module)
    gw.load(link, folder)
    own, state, round = flat(module), link.state_dict(), link.round
    rows = []
    for step in range(STEPS, STEPS + 12):
        train(module, optimizer, step, step + 1)
        rows.append(flat(module))
    with link.global_parameters():
        held = flat(module)
    link.close()
    return {"before": before, "own": own, "state": state, "round": round, "rows": rows, "global": held}


@pytest.mark.parametrize("spec", LOCAL)
def test_global_parameters_decide(three_ranks: Ranks, other_ranks: Ranks, tmp_path: Path, spec: str) -> None:
    """The sheet's contract: the global parameters decide, and residuals stay with the ranks that still exist."""
    before = three_ranks(saved, spec, str(tmp_path))
    found = other_ranks(resumed, spec, str(tmp_path))
    held = before[0]["global"]
    assert all(not torch.equal(row["own"], held) for row in before)
    for rank, row in enumerate(found):
        assert not torch.equal(row["before"], held)
        assert torch.equal(row["own"], held)
        assert row["round"] == before[0]["round"]
        assert set(row["state"]["replicated"]) == set(before[0]["state"]["replicated"])
        for key, value in before[0]["state"]["replicated"].items():
            assert torch.equal(row["state"]["replicated"][key], value)
        kept = before[rank]["state"]["rank"] if rank < len(before) else {}
        assert set(row["state"]["rank"]) == set(kept)
        assert all(torch.equal(row["state"]["rank"][key], value) for key, value in kept.items())
        assert torch.equal(row["global"], found[0]["global"])
        assert float((row["global"] - held).norm()) > 0
        assert bool(torch.isfinite(row["global"]).all())


def test_local_sgd_goes_on_as_if_it_had_begun_there(three_ranks: Ranks, other_ranks: Ranks, tmp_path: Path) -> None:
    """After five steps of every three the clock stands at two: one more step, then the mean over the ranks of today."""
    (held,) = {tuple(row["global"].tolist()) for row in three_ranks(saved, LOCAL[0], str(tmp_path))}
    found = other_ranks(resumed, LOCAL[0], str(tmp_path))
    own = []
    for rank in range(len(found)):
        module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
        nn.utils.vector_to_parameters(torch.tensor(held), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        draw = torch.Generator().manual_seed(1000 * rank + STEPS)
        module(torch.randn(8, 20, generator=draw)).square().mean().backward()
        optimizer.step()
        own.append(flat(module))
    mean = torch.stack(own).double().mean(0)
    for row in found:
        # Differences from the global parameters are added up in float32.
        torch.testing.assert_close(row["rows"][0].double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(row["rows"][0], found[0]["rows"][0])


@pytest.mark.parametrize("spec", GOSSIP)
def test_where_there_are_none_the_mean_decides(
    three_ranks: Ranks, other_ranks: Ranks, tmp_path: Path, spec: str
) -> None:
    three_ranks(saved, spec, str(tmp_path))
    found = other_ranks(resumed, spec, str(tmp_path))
    mean = torch.stack([row["before"] for row in found]).double().mean(0)
    for row in found:
        torch.testing.assert_close(row["own"].double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(row["own"], found[0]["own"])
        assert bool(torch.isfinite(row["rows"][-1]).all())
    assert not torch.equal(found[0]["rows"][-1], found[1]["rows"][-1])
    final = torch.stack([row["rows"][-1] for row in found]).double().mean(0)
    torch.testing.assert_close(found[0]["global"].double(), final, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["diana", "ef21", "ErrorFeedback()"])
def test_shifts_begin_anew_and_residuals_stay(
    three_ranks: Ranks, other_ranks: Ranks, tmp_path: Path, spec: str
) -> None:
    """What is exchanged after it are still the same bits on all ranks."""
    three_ranks(exchanged, spec, str(tmp_path), False)
    found = other_ranks(exchanged, spec, str(tmp_path), True)
    assert all(torch.equal(row, found[0]) for row in found)
    assert bool(torch.isfinite(found[0]).all())


WAITING = {"powersgd": True, "PowerSGD(values=BF16())": False}
"""Whether what waits on a rank is its own, and not right only together with what waits on the others."""


@pytest.mark.parametrize("spec", WAITING)
def test_what_is_right_for_all_ranks_together_needs_all_of_them(
    three_ranks: Ranks, other_ranks: Ranks, tmp_path: Path, spec: str
) -> None:
    saved = three_ranks(waiting, spec, str(tmp_path), False)
    found = other_ranks(waiting, spec, str(tmp_path), True)
    assert all(bool(row.any()) for row in saved)
    for rank, row in enumerate(found):
        if rank < len(saved) and (WAITING[spec] or len(found) > len(saved)):
            assert torch.equal(row, saved[rank])
        else:
            assert not bool(row.any())


def waiting(spec: str, folder: str, load: bool) -> torch.Tensor:
    """Return what waits on this rank when some rounds were saved, or have been loaded."""
    parameter = nn.Parameter(torch.zeros(40, 30))
    link = gw.Link([("w", parameter)], spec, min_numel=0)
    if load:
        gw.load(link, folder)
    else:
        parameter.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(link.rank))
        link.reduce_()
        gw.save(link, folder)
    found = link.state_dict()["rank"].get("residual/w", torch.zeros(()))
    link.close()
    return found


def exchanged(spec: str, folder: str, load: bool) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros(500))
    link = gw.Link([("w", parameter)], spec, min_numel=0)
    if load:
        gw.load(link, folder)
    for _ in range(4):
        draw = torch.Generator().manual_seed(1000 * link.round + link.rank)
        parameter.grad = torch.randn(500, generator=draw)
        link.reduce_()
    if not load:
        gw.save(link, folder)
    link.close()
    return parameter.grad


OF_RANKS = ("diana", "EF21(compressor=TopK(density=0.1))", "choco_sgd", "power_gossip")
"""Methods whose ranks hold what is right only together with what all the others hold."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with fresh_ranks(1) as ranks:
        yield ranks


def passed_on(spec: str, load: str | None, save: str | None) -> set[str]:
    """Load, take two rounds unless it is in between, and save; return what this rank has loaded of its own."""
    module, optimizer, link = started(spec, 3)
    if load is not None:
        gw.load(link, load)
    found = link.state_dict()
    if load is None:
        for step in range(2):
            train(module, optimizer, step, step + 1)
            link.reduce_()
    if save is not None:
        gw.save(link, save)
    link.close()
    return {key for part in found.values() for key in part if kind_of(key) in link.method.traits.of_ranks}


@pytest.mark.parametrize("spec", OF_RANKS)
def test_what_one_rank_had_no_use_for_is_not_there_when_there_are_more_again(
    three_ranks: Ranks, one_rank: Ranks, tmp_path: Path, spec: str
) -> None:
    """A rank that exchanges nothing must not hand on the word that all ranks have what only some of them have."""
    first, alone = str(tmp_path / "three"), str(tmp_path / "one")
    three_ranks(passed_on, spec, None, first)
    assert all(three_ranks(passed_on, spec, first, None))
    one_rank(passed_on, spec, first, alone)
    assert not any(three_ranks(passed_on, spec, alone, None))
