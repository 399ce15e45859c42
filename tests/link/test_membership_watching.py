"""What the thread that watches an epoch breaks off."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch

import gradwire as gw
from crew import crew
from gradwire.link.membership.membership_link import MembershipLink


@pytest.mark.parametrize("begins_meanwhile", [False, True])
def test_a_look_that_took_long_leaves_the_next_epoch_alone(begins_meanwhile: bool) -> None:
    old, new = types.SimpleNamespace(world_size=3), types.SimpleNamespace(world_size=2)
    lost: list[Any] = []
    broken: list[Any] = []

    def learn() -> None:
        """A member ends while the store is slow to answer; the training may have gone on without it since."""
        lost.append(old)
        if begins_meanwhile:
            link._epoch_group = new

    link: Any = types.SimpleNamespace(_epoch_group=old, _lock=threading.Lock(), _learn=learn)
    board = types.SimpleNamespace(try_again=lambda: None, freshen=lambda world_size: None)
    link._party = types.SimpleNamespace(board=board)
    link._has_lost = lambda group: group in lost
    link._is_deserted = lambda group: False
    link._abort = lambda: broken.append(link._epoch_group)
    # The thread that trains is in a round.
    link._lock.acquire()
    MembershipLink._look(link)
    assert broken == ([] if begins_meanwhile else [old])


@pytest.mark.ranks
def test_nobody_meets_the_others_while_it_applies_a_round_of_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members compare their global parameters when they meet, and these are half changed then."""
    usual, had_met = gw.DiLoCo.step_, list[bool]()

    def step_while_an_epoch_begins(method: gw.DiLoCo, *given: Any) -> None:
        # As the thread that watches does when another member has left or was lost.
        with link._lock:
            link._run(link._seat.recover())
            link._meet_early()
        if link._meeting is not None:
            link._meeting.join()
        had_met.append(link._seat.has_met)
        usual(method, *given)

    monkeypatch.setattr(gw.DiLoCo, "step_", step_while_an_epoch_begins)
    with crew() as workers, gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret) as membership:
        parameter = torch.nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        spec = "DiLoCo(every=1, inner=FP32())"
        link: Any = gw.Link([parameter], spec, group=membership, optimizer=optimizer, min_numel=0)
        parameter.grad = torch.ones(8)
        optimizer.step()
        assert had_met == [False]
        assert link._meeting is not None
        link._meeting.join()
        assert link._seat.has_met
        optimizer.step()
        assert link.round == 2
