"""A state that is loaded while an exchange is in flight is not changed by the end of that exchange."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.link.round import Round
from ranks import Ranks, fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

SPEC = "StreamingDiLoCo(every=4, fragments=2, delay=1, inner=ErrorFeedback(TopK(density=0.1)))"
"""Fragments are exchanged after steps 2, 4 and so on, and take effect one step later."""


class Training:
    """A module, an optimizer and a link."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.link = gw.Link(self.module.named_parameters(), SPEC, optimizer=self.optimizer, min_numel=0)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(1000 * self.link.rank + step)
            self.optimizer.zero_grad()
            self.module(torch.randn(8, 20, generator=draw)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict(), self.link.state_dict()))

    def load(self, state: Any) -> None:
        module, optimizer, link = copy.deepcopy(state)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)
        self.link.load_state_dict(link)

    def end(self, first: int, last: int) -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]:
        """Go on to a last step; return the parameters and the link's state."""
        self.run(first, last)
        state = self.link.state_dict()
        self.link.close()
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()]), state


@contextlib.contextmanager
def held_back(link: Any, error: Exception | None = None) -> Iterator[None]:
    """Hold exchanges back until one is waited for, or the context ends; then go on, or raise an error in the lane."""
    go_on, context, wait_for = threading.Event(), Round.context, link.wait_for

    def later(*given: Any) -> Any:
        go_on.wait()
        if error is not None:
            raise error
        return context(*given)

    def waiting(started: Any) -> Any:
        go_on.set()
        return wait_for(started)

    Round.context = later  # type: ignore[method-assign,assignment]
    link.wait_for = waiting
    try:
        yield
    finally:
        go_on.set()
        del link.wait_for
        Round.context = context  # type: ignore[method-assign]


def loaded_in_flight(cut: int) -> tuple[bool, bool, list[str]]:
    """Load a state while an exchange is held back; compare the rest of the training with that of a new link."""
    training = Training()
    training.run(0, cut)
    state = training.state()
    training.run(cut, 7)
    with held_back(training.link):
        training.run(7, 8)
        flying = training.link.local._flying or []
        in_flight = not any(mean.done() for _, mean in flying) and bool(flying)
        training.load(state)
    for _, mean in flying:
        mean.wait()
    values, after = training.end(cut, 14)
    again = Training()
    again.load(state)
    expected, wanted = again.end(cut, 14)
    differing = [key for part in wanted for key, x in wanted[part].items() if not torch.equal(x, after[part][key])]
    return in_flight, torch.equal(values, expected), differing


@pytest.mark.parametrize("cut", [6, 7])
def test_a_state_loaded_during_an_exchange_is_that_of_a_new_link(three_ranks: Ranks, cut: int) -> None:
    """The saved state has means that have arrived (after step 6), or none."""
    assert three_ranks(loaded_in_flight, cut) == [(True, True, [])] * 3


def loaded_after_a_failure() -> tuple[str, bool, bool]:
    """Load while the exchange in flight fails on rank 1; return the error, and whether all is as it was."""
    training = Training()
    wait_until_watched()
    training.run(0, 3)
    state = training.state()
    training.run(3, 5)
    with held_back(training.link, KeyError("boom") if training.link.rank == 1 else None):
        training.run(5, 6)
        held = {name: x.clone() for name, x in training.link.local.replicated().items()}
        rounds = training.link.round
        try:
            training.link.load_state_dict(state[2])
        except gw.ExchangeError as error:
            told = str(error)
        else:
            told = "loaded"
    same = all(torch.equal(x, held[name]) for name, x in training.link.local.replicated().items())
    return told, same, training.link.round == rounds


def test_an_exchange_in_flight_that_fails_is_told_and_nothing_is_loaded() -> None:
    with fresh_ranks(2, group_timeout_s=60) as ranks:
        for told, same, in_round in ranks(loaded_after_a_failure):
            assert "rank 1 failed at bucket 0" in told
            assert "KeyError: 'boom'" in told
            assert same
            assert in_round
