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
    """Return what a step makes of ones under three links in turn, after a link that failed, and without any."""
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


def around(compressor: str) -> tuple[float, float | None, list[str]]:
    """Step with a coder around, and a parameter that has no gradient; give both, and what is refused."""
    p, idle, other = (torch.nn.Parameter(torch.ones(8)) for _ in range(3))
    optimizer = torch.optim.SGD([p, idle], lr=0.1)
    named, method = [("w", p), ("idle", idle)], f"Coded(compressor={compressor})"
    link = gw.Link(named, method, optimizer=optimizer)
    found = stepped(p, optimizer)
    link.close()
    sentences = []
    for given in (None, torch.optim.SGD([p], lr=0.1), torch.optim.SGD([other], lr=0.1)):
        try:
            gw.Link(named, method, optimizer=given).close()
        except gw.IncompatibleError as error:
            sentences.append(str(error))
    return found, float(idle.detach().max()), sentences


@pytest.mark.ranks
def test_a_coder_around_changes_nothing_and_an_optimizer_that_misses_a_parameter_is_refused(three_ranks: Any) -> None:
    for found, idle, sentences in three_ranks(around, LASSO):
        assert (found, idle) == (0.9, 1.0)
        none, part, others = sentences
        assert "pass optimizer=" in none
        assert "'idle' (1 of 2 are not its own)" in part
        assert "'w' (2 of 2 are not its own)" in others


@pytest.mark.parametrize("spec", [LASSO, f"Coded(compressor={LASSO})"])
def test_a_simulation_has_no_steps_to_act_on(spec: str) -> None:
    with pytest.raises(gw.IncompatibleError, match=r"leave prox to gradwire\.ProximalSGD"):
        gw.simulate(torch.ones(2, 8), spec)


@pytest.mark.parametrize(
    ("spec", "direction", "least"),
    [
        ("DIANA(compressor=fp32)", False, 0),
        ("Coded(compressor=SignSGD())", True, 0),
        ("ErrorFeedback()", False, 1024),
    ],
)
def test_a_method_around_another_has_its_kind_of_outcome_and_its_least_size(
    spec: str, direction: bool, least: int
) -> None:
    method = gw.method(spec)
    assert (method.traits.direction, method.traits.min_numel) == (direction, least)


@pytest.mark.parametrize(
    ("method", "optimizer", "told"),
    [
        ("signum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum=0.9 beside it"),
        ("DIANA(momentum=0.5)", lambda p: torch.optim.Adam(p), "betas="),
        ("DIANA(prox=L1(strength=0.1))", lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
    ],
)
def test_settings_that_do_not_go_with_the_method_are_named(method: str, optimizer: Any, told: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(gw.IncompatibleError, match=told):
        gw.check_options(method, optimizer=optimizer(parameters))
    gw.check_options("signum", optimizer=torch.optim.SGD(parameters, lr=0.1))
    gw.check_options("terngrad", optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
