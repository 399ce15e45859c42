"""A link of one rank, as after an elastic restart: training goes on without an exchange, and nothing is forgotten."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.methods.registry import METHODS
from ranks import Ranks, fresh_ranks

pytestmark = pytest.mark.ranks

NUMEL = 2000


class Told(logging.Handler):
    """Keeps what the logger "gradwire" says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("gradwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def gradients_stay(spec: str) -> str:
    """Exchange two rounds; say what is not as it should be."""
    told = Told()
    parameter = nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    link = gw.Link([("w", parameter)], spec, min_numel=0, optimizer=optimizer)
    wrong = [] if sum("the group has one rank" in text for text in told.texts) == 1 else [f"told {told.texts}"]
    for round in range(2):
        gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(round))
        parameter.grad = gradient.clone()
        link.reduce_()
        wrong += [] if torch.equal(parameter.grad, gradient) else ["gradients changed"]
    traffic = link.traffic()
    wrong += [] if (traffic.sent_bytes, traffic.received_bytes, traffic.rounds) == (0, 0, 2) else [repr(traffic)]
    wrong += [] if link.round == 2 else [f"round {link.round}"]
    link.load_state_dict(link.state_dict())
    link.metrics()
    link.record()
    link.close()
    return ", ".join(wrong)


def steps_stay(spec: str) -> str:
    """Take the steps between two exchanges, twice; say what is not as it should be."""
    parameter = nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    link = gw.Link([("w", parameter)], spec, min_numel=0, optimizer=optimizer)
    wrong = []
    for step in range(2 * link.method.traits.local_steps):
        parameter.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        link.reduce_()
        optimizer.step()
    wrong += [] if link.round >= 2 else [f"{link.round} exchanges after {step + 1} steps"]
    with link.global_parameters():
        wrong += [] if bool(parameter.isfinite().all()) and bool(parameter.any()) else ["global parameters"]
    link.synchronise()
    wrong += [] if link.traffic().sent_bytes == 0 else [repr(link.traffic())]
    link.load_state_dict(link.state_dict())
    link.close()
    return ", ".join(wrong)


def every_method() -> dict[str, str]:
    found = {}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    for spec in [kind.name for kind in [*METHODS, gw.Auto]]:
        try:
            found[spec] = steps_stay(spec) if gw.method(spec).traits.local_steps else gradients_stay(spec)
        except Exception as error:
            found[spec] = f"{type(error).__name__}: {error}"
    return {spec: wrong for spec, wrong in found.items() if wrong}


def test_one_rank_trains_on_without_an_exchange_by_every_method() -> None:
    with fresh_ranks(1) as ranks:
        assert ranks(every_method) == [{}]


def trained(link: gw.Link, parameter: nn.Parameter, rounds: int) -> None:
    for _ in range(rounds):
        parameter.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * link.round + link.rank))
        link.reduce_()


def go_on(before: str | None, after: str) -> tuple[int, torch.Tensor]:
    """Load what was saved, exchange two rounds, save; return the round, and the residual after loading or training."""
    parameter = nn.Parameter(torch.zeros(NUMEL))
    link = gw.Link([("w", parameter)], "ErrorFeedback(TopK(density=0.05))", min_numel=0)
    if before is not None:
        gw.load(link, before)
    loaded = link.state_dict()["rank"].get("residual/w")
    trained(link, parameter, 2)
    gw.save(link, after)
    residual = loaded if before is not None else link.state_dict()["rank"]["residual/w"]
    round = link.round
    link.close()
    return round, torch.zeros(0) if residual is None else residual.clone()


def test_a_residual_outlives_a_restart_on_one_rank_and_the_way_back(three_ranks: Ranks, tmp_path: Path) -> None:
    first, alone, back = (str(tmp_path / name) for name in ("three", "one", "back"))
    (round, kept), *_ = three_ranks(go_on, None, first)
    assert round == 2
    assert kept.any()
    with fresh_ranks(1) as ranks:
        ((round, residual),) = ranks(go_on, first, alone)
    assert round == 4
    assert torch.equal(residual, kept)
    (round, residual), (_, second), _ = three_ranks(go_on, alone, back)
    assert round == 6
    assert torch.equal(residual, kept), "two rounds without an exchange changed it"
    assert not second.numel(), "a rank that was not there begins without one"


def train_a_module(method: str | None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 3)))
    link = gw.attach(module, method) if method else None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    rounds = None if link is None else (link.round, link.traffic().sent_bytes, link.error)
    dist.barrier()
    return rounds, [p.detach().clone() for p in module.parameters()]


def test_a_module_of_one_rank_trains_as_it_does_natively() -> None:
    with fresh_ranks(1) as ranks:
        ((_, native),) = ranks(train_a_module, None)
        ((rounds, ours),) = ranks(train_a_module, "powersgd")
    assert rounds == (3, 0, None)
    assert all(torch.equal(a, b) for a, b in zip(native, ours))
