"""Members that are far from the store do not wait for it while nothing changes."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from crew import crew, learn, wait_for
from gradwire.link.membership import store_steps
from gradwire.link.membership.board import FAR_S, Board
from gradwire.link.membership.coordinator_connection import CoordinatorConnection

pytestmark = pytest.mark.ranks

SETTLED, LATER = 8, 40
"""Rounds between which members come and go no more."""


class Asked:
    """Counts the questions of the thread that trains."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("do", "do_unless_away"):
            setattr(CoordinatorConnection, name, self._counted(getattr(CoordinatorConnection, name)))

    def _counted(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def do(connection: CoordinatorConnection, work: Callable[[Any], Any]) -> Any:
            self.count += threading.current_thread() is threading.main_thread()
            time.sleep(FAR_S)
            return usual(connection, work)

        return do


def train(
    address: str, secret: str, name: str, pipe: Connection, spec: str, least: int, is_far: bool
) -> dict[str, Any]:
    """Train until told to end, and tell after each round the digest of the parameters and how much was asked."""
    Board.is_far = is_far  # type: ignore[method-assign,assignment]
    # However busy the machine is.
    store_steps.RECENT_S = 600.0
    asked = Asked()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with gw.join(address, secret=secret, name=name, least=least, silence_s=30.0, grace_s=3.0) as membership:
        sampler = gw.ElasticSampler(1000, membership, 4)
        link: Any = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)
        local = bool(link.method.traits.local_steps)
        if is_far and membership.rank == 0:
            # Until the thread that watches has asked for the first time, the one that trains does.
            wait_for(lambda: link._read[0] > 0.0)
        while not pipe.poll():
            learn(module, optimizer, sampler.draw() or [0])
            time.sleep(0.02)
            before = link.round
            if not local:
                try:
                    link.reduce_()
                except gw.LeftOutError:
                    continue
            optimizer.step()
            if link.round > before:
                flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
                pipe.send(("step", link.round, (zlib.crc32(flat.numpy().data), asked.count)))
    found: dict[str, Any] = link.diagnostics()["membership"]
    return found


@pytest.mark.parametrize("spec", ["terngrad", "DiLoCo(every=2, inner=EDEN(bits=4))"])
@pytest.mark.parametrize("is_far", [False, True])
def test_no_step_waits_for_a_store_that_is_far(spec: str, is_far: bool) -> None:
    with crew() as workers:
        members = [workers.start(name, train, spec, 3, is_far) for name in "abc"]
        for member in members:
            member.reach(LATER)
        asked = [member.steps[LATER][1] - member.steps[SETTLED][1] for member in members]
        # Near it, a question takes no time, and a change is known as soon as it can be.
        assert (max(asked) == 0) if is_far else (min(asked) >= LATER - SETTLED)
        members.append(workers.start("d", train, spec, 1, is_far))
        members[-1].reach(0)
        last = max(max(member.steps) for member in members) + 5
        for member in members:
            member.reach(last)
            member.tell("end")
        results = [member.end() for member in members]
        assert len({member.steps[last][0] for member in members}) == 1
        assert [found["joined"] for found in results[:3]] == [1, 1, 1]
        assert [found["digests_differed"] for found in results] == [0] * 4
