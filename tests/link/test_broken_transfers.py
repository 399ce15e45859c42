"""A rank that ends while a long message is on its way to it: Gloo forgets the message, and nobody may wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from crew import crew
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.peers.blame import Blame
from ranks import fresh_ranks

pytestmark = pytest.mark.ranks

NUMEL = 1 << 24
"""At 32 bits rows of 22 MB between three ranks: more than both ends of a connection hold."""

STOPPED_AT = 4
"""A round for which receives are posted ahead, so that the others begin to send to a rank that is stopped."""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def exchange_until_one_stops(victim: int) -> str:
    import torch.distributed as dist

    parameter = nn.Parameter(torch.zeros(NUMEL))
    parameter.grad = torch.ones(NUMEL)
    link = gw.Link([("weight", parameter)], "fp32", chunk_numel=NUMEL)
    for round in range(STOPPED_AT + 1):
        if round == STOPPED_AT and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            link.reduce_()
        except gw.ExchangeError as error:
            return str(error)
    return "no error"


def test_ranks_learn_that_the_receiver_of_a_long_message_has_ended() -> None:
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        victim = int(ranks.processes[1].pid or 0)
        ranks.start(exchange_until_one_stops, 1)
        wait_until(lambda: is_stopped(victim))
        time.sleep(2.0)  # until the rows fill all buffers on the way to it
        os.kill(victim, signal.SIGKILL)
        answers = ranks.collect(60)
    assert answers[1] == ("gone", -signal.SIGKILL)
    for kind, value in (answers[0], answers[2]):
        assert kind == "ok", value
        assert "rank 1 ended without a word" in value


def train(address: str, secret: str, name: str, pipe: Connection, least: int, victim: bool) -> Any:
    parameter = nn.Parameter(torch.zeros(NUMEL))
    with gw.join(address, secret=secret, name=name, least=least, silence_s=120.0, grace_s=20.0) as membership:
        link = gw.Link([("weight", parameter)], "fp32", group=membership, chunk_numel=NUMEL)
        while not pipe.poll():
            if victim and link.round == STOPPED_AT:
                os.kill(os.getpid(), signal.SIGSTOP)
            parameter.grad = torch.full((NUMEL,), float(link.round + 1))
            link.reduce_()
            pipe.send(("step", link.round, float(parameter.grad[0])))
    return link.diagnostics()["membership"]


def test_members_go_on_when_the_receiver_of_a_long_message_is_killed() -> None:
    with crew() as workers:
        a, b, c = (workers.start(name, train, 3, name == "b") for name in "abc")
        wait_until(lambda: is_stopped(int(b._process.pid or 0)))
        time.sleep(2.0)
        b.signal(signal.SIGKILL)
        a.reach(STOPPED_AT + 3)
        for worker in (a, c):
            worker.tell("end")
        found = [worker.end() for worker in (a, c)]
    assert [told["lost"] for told in found] == [1, 1]


def end_in_the_middle(self: EpochGroup, to: int, *tensors: torch.Tensor, usual: Any = EpochGroup.send) -> None:
    """Send short messages, and end as soon as a long one has filled the connection."""
    if all(tensor.numel() < NUMEL for tensor in tensors):
        usual(self, to, *tensors)
        return
    time.sleep(1.0)  # until the other side waits for it
    for tag, tensor in enumerate(tensors):
        self._backend.send([tensor], to, tag)
    os.kill(os.getpid(), signal.SIGKILL)


def hand_over(address: str, secret: str, name: str, pipe: Connection, leaver: bool) -> Any:
    parameter = nn.Parameter(torch.zeros(NUMEL))
    if leaver:
        EpochGroup.send = end_in_the_middle  # type: ignore[method-assign]
    with gw.join(address, secret=secret, name=name, least=2, silence_s=120.0) as membership:
        link = gw.Link([("weight", parameter)], "ErrorFeedback(RandK(density=0.001))", group=membership)
        while not pipe.poll():
            parameter.grad = torch.ones(NUMEL)
            link.reduce_()
            if leaver and link.round == 2:
                membership.leave()
            pipe.send(("step", link.round, 0.0))
    return link.diagnostics()["membership"]


def test_the_heir_goes_on_when_one_that_leaves_is_killed_while_it_hands_over() -> None:
    with crew() as workers:
        a = workers.start("a", hand_over, False)
        workers.start("b", hand_over, True)
        a.reach(5)
        a.tell("end")
        found = a.end()
    assert (found["residuals_lost"], found["residuals_handed"], found["members"]) == (1, 0, 1)


def test_nobody_waits_to_send_to_a_member_that_has_gone_on() -> None:
    """What others still send may arrive for a while; what is sent to it never does."""
    aborted = threading.Event()

    def wait() -> None:
        aborted.wait()
        raise RuntimeError("broken off")

    def judge(ranks: tuple[int, ...], link: str) -> Blame | None:
        return Blame((2,), "rank 2 has gone on") if 2 in ranks else None

    group: Any = types.SimpleNamespace(gone=lambda: False, abort=aborted.set, watch=types.SimpleNamespace(judge=judge))
    group._has_left = partial(EpochGroup._has_left, group)
    raised: list[Exception] = []

    def send(to: int) -> None:
        work: Any = types.SimpleNamespace(wait=wait)
        try:
            EpochGroup._finish(group, work, to=to)
        except RuntimeError as error:
            raised.append(error)

    to_one_that_stays, to_one_that_left = (threading.Thread(target=send, args=(to,), daemon=True) for to in (1, 2))
    to_one_that_stays.start()
    to_one_that_stays.join(1.0)
    assert to_one_that_stays.is_alive()
    assert not aborted.is_set()
    to_one_that_left.start()
    to_one_that_left.join(60.0)
    assert aborted.is_set()
    assert raised
