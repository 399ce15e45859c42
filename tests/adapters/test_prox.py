"""A proximal step that a link hooks into an optimizer: once a step, for as long as the link lives, or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import gradwire as gw

LASSO = "DIANA(prox=L1(strength=1.0))"


def stepped(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> float:
    """Step from ones with a gradient of zeros, so that only the operator moves them."""
    with torch.no_grad():
        p.fill_(1.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return round(float(p.detach().max()), 6)


def attach_again(method: str) -> tuple[list[float], float, float]:
    """Give what a step makes of ones under three links in turn, after a link that failed, and without any."""
    import torch.distributed as dist

    p = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([p], lr=0.1)
    with contextlib.suppress(gw.RankMismatchError):
        gw.Link([("w", p)], method, optimizer=optimizer, seed=dist.get_rank())
    failed, found = stepped(p, optimizer), []
    for _ in range(3):
        link = gw.Link([("w", p)], method, optimizer=optimizer)
        found.append(stepped(p, optimizer))
        link.close()
    return found, failed, stepped(p, optimizer)


@pytest.mark.ranks
def test_the_operator_is_applied_once_a_step_and_ends_with_its_link(three_ranks: Any) -> None:
    assert three_ranks(attach_again, LASSO) == [([0.9, 0.9, 0.9], 1.0, 1.0)] * 3
