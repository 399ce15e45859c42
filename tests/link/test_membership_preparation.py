"""Members connect to a newcomer while they go on, whoever ends meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from crew import Worker, crew, learn
from gradwire.link.membership import epoch_group
from gradwire.link.membership.board import Board
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.preparation import Preparation, candidate_of
from gradwire.link.membership.records import Epoch, Member, new_id

pytestmark = pytest.mark.ranks

TAKEN: list[bool] = []


def noting(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Note whether connections that were made for a candidate are those of the epoch that follows."""

    def take(self: Preparation, epoch: Epoch) -> EpochGroup | None:
        group = usual(self, epoch)
        TAKEN.append(group is not None and group._backend is not None)
        return group

    return take


def dying(usual: Callable[..., Any]) -> Callable[..., Any]:
    """End the process when it is connected to two others, or has seen that all three are."""

    def then_end(self: Any, *args: Any) -> Any:
        found = usual(self, *args)
        three = len(self.ranks if isinstance(self, EpochGroup) else self.candidate.members) == 3
        if found is not False and three:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return then_end


def train(address: str, secret: str, name: str, pipe: Connection, least: int, dies_in: str) -> dict[str, Any]:
    """Train until told to end, and tell the digest of the parameters after each round."""
    Preparation.take = noting(Preparation.take)  # type: ignore[method-assign]
    if dies_in:
        kind = EpochGroup if dies_in == "connect" else Preparation
        setattr(kind, dies_in, dying(getattr(kind, dies_in)))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with gw.join(address, secret=secret, name=name, least=least, silence_s=30.0, grace_s=3.0) as membership:
        sampler = gw.ElasticSampler(1000, membership, 4)
        link = gw.Link(module.named_parameters(), "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        while not pipe.poll():
            learn(module, optimizer, sampler.draw() or [0])
            time.sleep(0.02)
            try:
                link.reduce_()
            except gw.LeftOutError:
                continue
            optimizer.step()
            flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
            pipe.send(("step", link.round, zlib.crc32(flat.numpy().data)))
    return {"taken": TAKEN, **link.diagnostics()["membership"]}


def finish(*workers: Worker) -> None:
    """Let workers take some rounds together, and end them; compare their bits."""
    last = max(max(worker.steps, default=0) for worker in workers) + 5
    for worker in workers:
        worker.reach(last)
    for worker in workers:
        worker.tell("end")
    for worker in workers:
        worker.end()
    assert len({worker.steps[last] for worker in workers}) == 1


def test_a_newcomer_is_connected_to_all_when_they_take_it_in() -> None:
    with crew() as workers:
        a, b = (workers.start(name, train, 2, "") for name in "ab")
        a.reach(5)
        c = workers.start("c", train, 1, "")
        c.reach(0)
        finish(a, b, c)
        assert [w.result["taken"] for w in (a, b, c)] == [[True]] * 3
        assert (a.result["joined"], a.result["lost"]) == (1, 0)


def test_a_newcomer_that_ends_before_it_is_named_never_was_a_member() -> None:
    with crew() as workers:
        a, b = (workers.start(name, train, 2, "") for name in "ab")
        a.reach(5)
        c = workers.start("c", train, 1, "connect")
        assert c.end() is None
        d = workers.start("d", train, 1, "")
        d.reach(0)
        finish(a, b, d)
        assert (a.result["joined"], a.result["lost"]) == (1, 0)
        assert d.result["taken"] == [True]


def test_a_first_member_that_ends_when_all_are_connected_is_followed_by_another() -> None:
    with crew() as workers:
        founders = [workers.start(name, train, 2, "all_are_ready") for name in "ab"]
        founders[1].reach(5)
        c = workers.start("c", train, 1, "")
        c.reach(0)
        # Whoever asked first is the first member, and has ended.
        c.reach(min(c.steps) + 2)
        while not any(founder.ended for founder in founders):
            for founder in founders:
                founder.read(0.01)
        (stays,) = (founder for founder in founders if not founder.ended)
        finish(stays, c)
        # What had been prepared with the member that is gone is of no use.
        assert stays.result["taken"] == [False, True]
        assert (stays.result["lost"], stays.result["joined"]) == (1, 1)


@pytest.mark.parametrize("comes", [True, False])
def test_threads_that_wait_for_a_member_end_where_it_never_comes(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_group, "STORE_TIMEOUT", timedelta(seconds=0.1))
    waits_on, asked = EpochGroup.waits_on, list[EpochGroup]()

    def noted(group: EpochGroup) -> bool:
        asked.append(group)
        return waits_on(group)

    monkeypatch.setattr(EpochGroup, "waits_on", noted)
    epoch = Epoch(1, tuple(Member(new_id(), name) for name in "ab"))
    with crew() as workers:
        boards = [Board("127.0.0.1", workers.port, workers.secret) for _ in range(2)]
        first = EpochGroup(epoch, 0, boards[0], 60.0 if comes else 0.2)
        before = set(threading.enumerate())
        if comes:
            second = EpochGroup(epoch, 1, boards[1], 60.0)
            connecting = threading.Thread(target=first.connect, args=(1,))
            connecting.start()
            # It computes meanwhile.
            while len(asked) < 4:
                time.sleep(0.01)
            second.connect(1)
            connecting.join()
            assert first._backend is not None
            second.leave("has ended")
        else:
            with pytest.raises(gw.ExchangeError):
                first.connect(1)
        first.leave("has ended")
        waiting = [thread for thread in set(threading.enumerate()) - before if thread.name == "gradwire connections"]
        for thread in waiting:
            thread.join(20.0)
            assert not thread.is_alive()
        for board in boards:
            board.close()


class Connected:
    """A group whose connections are there at once."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def connect(self, lanes: int) -> None:
        """Do nothing."""

    def gone(self) -> bool:
        """Return that nobody is."""
        return False

    def leave(self, how: str) -> None:
        """Note what the others are told."""
        self.told.append(how)


class NoBoard:
    """A store of nothing."""

    def put(self, key: str, record: object) -> None:
        """Forget it."""


@pytest.mark.parametrize("what", ["it", "another round", "a leave", "an epoch in between", "another newcomer"])
def test_only_the_epoch_that_a_candidate_stood_for_has_its_connections(what: str) -> None:
    a, b, c, d = (Member(new_id(), name) for name in "abcd")
    now = Epoch(3, (a, b))
    candidate = candidate_of(now, (c,), 1)
    following = {
        "it": Epoch(4, (a, b, c), (c.id,), previous=now.digest()),
        "another round": Epoch(4, (a, b, c), (c.id,), round=7, position=99, reserved=4, previous=now.digest()),
        "a leave": Epoch(4, (b, c), (c.id,), previous=now.digest()),
        "an epoch in between": Epoch(5, (a, b, c), (c.id,), previous=Epoch(4, (a, b)).digest()),
        "another newcomer": Epoch(4, (a, b, d), (d.id,), previous=now.digest()),
    }[what]
    group: Any = Connected()
    prepared = Preparation(candidate, a.id, group, 2, NoBoard())  # type: ignore[arg-type]
    while not prepared._is_ready:
        time.sleep(0.001)
    suited = what in ("it", "another round")
    assert prepared.take(following) is (group if suited else None)
    assert len(group.told) == (not suited)
    assert prepared.take(following) is None
    assert candidate_of(now, (c,), 2).digest() != candidate.digest()
