"""A simulated training that is stopped and continued by another link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import gradwire as gw


def assert_resumes(link: Callable[[], gw.SimulatedLink], rounds: Sequence[torch.Tensor], cut: int) -> None:
    """Assert that a link which takes the state of one after ``cut`` rounds gives the means of one that did not stop."""
    whole, first, second = link(), link(), link()
    wanted = [whole.reduce_(g.clone()) for g in rounds]
    for g in rounds[:cut]:
        first.reduce_(g.clone())
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.reduce_(g.clone()), mean) for g, mean in zip(rounds[cut:], wanted[cut:]))
