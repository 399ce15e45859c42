"""A worker that is told to leave does, wherever it stands: while it waits, while it is left out, in its local steps."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwire as gw
from crew import Crew, Worker, crew, wait_for
from gradwire.link.membership import epoch_group, passing_link, store_steps
from gradwire.link.membership.board import ask_key
from gradwire.link.membership.records import Request
from gradwire.link.membership.steps import Serve

pytestmark = pytest.mark.ranks


def join(workers: Crew, name: str = "a", **more: Any) -> gw.Membership:
    return gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret, name=name, **more)


def link_on(membership: gw.Membership, method: str = "terngrad") -> tuple[gw.Link, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return gw.Link([("weight", parameter)], method, group=membership, optimizer=optimizer, min_numel=0), parameter


# ---------------------------------------------------------------------- while it waits


@pytest.mark.parametrize("least", [1, 2])
def test_a_worker_that_waits_to_be_taken_in_leaves_when_it_is_told(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for members that never name it, or for another founder.
    with crew() as workers:
        goes_on = workers.start("b", take_rounds_until_told) if least == 1 else None
        if goes_on is not None:
            goes_on.reach(1)
        with join(workers, least=least, patience_s=30.0) as membership:
            asked, ask = list[object](), membership.board.ask

            def ask_and_leave(request: Request) -> None:
                ask(request)
                asked.append(request)
                if len(asked) == 2:
                    membership.leave()

            monkeypatch.setattr(membership.board, "ask", ask_and_leave)
            if goes_on is not None:
                goes_on.signal(signal.SIGSTOP)
            with pytest.raises(gw.LeftOutError, match="told to leave before it was taken in"):
                link_on(membership)
            assert membership.left
            # Nobody names it from now on.
            assert membership.seat.me.id not in {request.member.id for request in membership.board.requests()}
            assert not membership.board._do(lambda store: store.check([ask_key(membership.board._asked[0])]))
            if goes_on is not None:
                goes_on.signal(signal.SIGCONT)
        if goes_on is not None:
            goes_on.tell("end")
            assert goes_on.end()


@pytest.mark.parametrize("least", [1, 2])
def test_a_worker_that_waits_leaves_when_it_is_told_although_the_coordinator_is_away(
    least: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_steps, "TOLD_S", 0.0)
    caplog.set_level(logging.INFO, "gradwire")
    with crew(tmp_path / "state.json") as workers:
        goes_on = workers.start("b", take_rounds_until_told) if least == 1 else None
        if goes_on is not None:
            goes_on.reach(1)
            goes_on.signal(signal.SIGSTOP)
        raised: list[Exception] = []

        def come_in(membership: gw.Membership) -> None:
            try:
                link_on(membership)
            except gw.LeftOutError as error:
                raised.append(error)

        with join(workers, least=least, patience_s=1000.0) as membership:
            waiting = threading.Thread(target=come_in, args=(membership,), daemon=True)
            waiting.start()
            said = "1 of the 2 workers that begin together have come (a)" if least == 2 else "to take this worker in"
            wait_for(lambda: said in caplog.text)
            with workers.without_coordinator():
                wait_for(lambda: membership.board.is_away)
                membership.leave()
                waiting.join(60.0)
                assert not waiting.is_alive()
            assert "told to leave before it was taken in" in str(raised[0])
            assert membership.left
        assert caplog.text.count(said) == 1
        assert "asks to be taken in" not in caplog.text
        if goes_on is not None:
            goes_on.signal(signal.SIGCONT)
            goes_on.tell("end")
            assert goes_on.end()


def take_rounds_until_told(address: str, secret: str, name: str, pipe: Connection) -> bool:
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with gw.join(address, secret=secret, name=name, silence_s=60.0) as membership:
        link = gw.Link([("weight", parameter)], "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        while not pipe.poll():
            parameter.grad = torch.ones(64)
            try:
                link.reduce_()
            except gw.LeftOutError:
                continue
            optimizer.step()
            pipe.send(("step", link.round, 0))
            time.sleep(0.02)
    return True


def leave_while_stopped(
    address: str, secret: str, name: str, pipe: Connection, spec: str, quorum: int | None
) -> object:
    """Train; c is stopped by the test, told to leave meanwhile, and left out by the others."""
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    rule = {} if quorum is None else {"quorum": quorum, "late_s": 0.03, "staleness": 50}
    with gw.join(address, secret=secret, name=name, least=3, silence_s=5.0, **rule) as membership:  # type: ignore[arg-type]
        link = gw.Link([("weight", parameter)], spec, group=membership, optimizer=optimizer, min_numel=0)
        local, raised = bool(link.method.traits.local_steps), False
        while not membership.left and not pipe.poll():
            parameter.grad = torch.ones(64)
            if not local:
                try:
                    link.reduce_()
                except gw.LeftOutError:
                    raised = True
                    continue
            optimizer.step()
            pipe.send(("step", link.round, 0))
            time.sleep(0.02)
        return {"left": membership.left, "raised": raised, "left_out": membership.counts["left_out"]}


@pytest.mark.parametrize(
    ("spec", "quorum"),
    [("terngrad", None), ("DiLoCo(every=3, inner=EDEN(bits=4))", None), ("DiLoCo(every=3, inner=EDEN(bits=4))", 2)],
)
def test_a_worker_that_was_told_to_leave_and_is_left_out_has_left(spec: str, quorum: int | None) -> None:
    with crew() as workers:
        a, b, c = (workers.start(name, leave_while_stopped, spec, quorum) for name in "abc")
        c.reach(3)
        c.stop()
        # The others go on without it.
        a.reach(max(c.steps) + 8)
        c.signal(signal.SIGTERM)
        c.signal(signal.SIGCONT)
        # It ends by its own loop: an exception out of its optimizer's step would have been told here.
        found = c.end()
        # Python calls the handler of the signal when the main thread goes on: on a busy machine it may learn first that
        # it was left out, and then does not come in again.
        assert found.pop("left_out") in (0, 1)
        assert found == {"left": True, "raised": spec == "terngrad"}
        ends(a, b)


def leave_together(address: str, secret: str, name: str, pipe: Connection) -> dict[str, Any]:
    """Train; the second and third leave in one round, and the first receives what the third has long after the second
    has ended.
    """
    usual, told = passing_link.receive_state, dict[str, Any]()

    def receive_late(group: Any, source: int, key: bytes) -> Any:
        if group.epoch.number == 1 and source == 2:
            while not group._has_left(1):
                time.sleep(0.01)
            # The threads that watch look several times meanwhile.
            time.sleep(2 * epoch_group.LINGER_S)
        return usual(group, source, key)

    passing_link.receive_state = receive_late
    parameter = nn.Parameter(torch.zeros(64))
    with gw.join(address, secret=secret, name=name, least=4) as membership:
        spec = "ErrorFeedback(RandK(density=0.25))"
        link = gw.Link([("weight", parameter)], spec, group=membership, min_numel=0)
        # Who asked first has the first place, whatever its name.
        place = link.rank
        while not membership.left and link.round < 5:
            parameter.grad = torch.ones(64)
            if link.round == 2 and place in (1, 2):
                membership.leave()
            link.reduce_()
            if membership.left or link.round == 4:
                # After the last round, the other one may end.
                told = link.diagnostics()["membership"]
        return {"place": place, "ends": membership.left, **told}


def test_those_that_leave_in_one_round_hand_over_one_after_the_other() -> None:
    with crew() as workers:
        found = [workers.start(name, leave_together) for name in "abcd"]
        told = {end["place"]: end for end in (worker.end() for worker in found)}
    counts = {place: [told[place][key] for key in ("ends", "lost", "left_out", "epoch")] for place in told}
    assert counts == {0: [False, 0, 0, 2], 1: [True, 0, 0, 1], 2: [True, 0, 0, 1], 3: [False, 0, 0, 2]}
    assert (told[0]["residuals_handed"], told[0]["residuals_lost"]) == (2, 0)


def ends(*workers: Worker) -> None:
    for worker in workers:
        worker.tell("end")
    assert all(worker.end() for worker in workers)


# ---------------------------------------------------------------------- by an error


def fail(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error that a thread of the link finds end this worker's part."""

    def differ() -> None:
        raise gw.RankMismatchError("members hold different states")

    monkeypatch.setattr(link, "_compare_state", differ)
    with link._lock:
        # As after another member was lost.
        link._hang_up("was cut off")
        link._applied = True
        if link._seat.quorum is None:
            link._run(link._seat.recover())
            link._meet_early()
    end_s = time.monotonic() + 60.0
    while link._problem is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)


FAILING = [("terngrad", None), ("DiLoCo(every=1, inner=FP32())", None), ("DiLoCo(every=1, inner=FP32())", 1)]


@pytest.mark.parametrize(("spec", "quorum"), FAILING)
def test_a_worker_whose_part_an_error_ended_has_not_left_and_learns_the_error(
    spec: str, quorum: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew() as workers, join(workers, quorum=quorum) as membership:
        link, parameter = link_on(membership, spec)
        parameter.grad = torch.ones(64)
        fail(link, monkeypatch)
        for _ in range(2):
            assert not membership.left
            with pytest.raises(gw.RankMismatchError, match="different states"):
                link.optimizer.step() if link.method.traits.local_steps else link.reduce_()


@pytest.mark.parametrize(("spec", "quorum"), FAILING)
def test_a_program_that_ends_without_having_seen_the_error_learns_it_at_the_end(
    spec: str, quorum: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        # The link is gone when the membership ends.
        fail(link_on(membership, spec)[0], monkeypatch)
        monkeypatch.undo()

    differs = pytest.raises(gw.RankMismatchError, match="different states")
    with crew() as workers, differs, join(workers, quorum=quorum) as membership:
        train()


# ---------------------------------------------------------------------- signals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of the program's own has heard."""
    found: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        found.append(number)

    before = signal.signal(signal.SIGUSR1, hear)
    yield found
    signal.signal(signal.SIGUSR1, before)


def tell() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_the_first_signal_lets_a_worker_leave_and_later_ones_do_what_they_did(heard: list[int]) -> None:
    with crew() as workers, join(workers, signals=[signal.SIGUSR1]) as membership:
        tell()
        assert (membership.seat.leaving, heard) == (True, [])
        tell()
        assert heard == [signal.SIGUSR1]


def test_a_signal_after_the_membership_has_ended_does_what_it_did_before(heard: list[int]) -> None:
    with crew() as workers:
        with join(workers, signals=[signal.SIGUSR1]) as membership:
            pass
        tell()
        assert (membership.seat.leaving, heard) == (False, [signal.SIGUSR1])


def test_a_membership_that_a_thread_has_closed_swallows_no_signal(heard: list[int]) -> None:
    with crew() as workers:
        membership = join(workers, signals=[signal.SIGUSR1])
        closing = threading.Thread(target=membership.close)
        closing.start()
        closing.join()
        tell()
        assert (membership.seat.leaving, heard) == (False, [signal.SIGUSR1])


@pytest.mark.parametrize("first_ends", [False, True])
def test_a_signal_reaches_all_memberships_of_a_process(first_ends: bool, heard: list[int]) -> None:
    with crew() as workers, crew() as others:
        first = join(workers, signals=[signal.SIGUSR1])
        with join(others, signals=[signal.SIGUSR1]) as second:
            if first_ends:
                first.close()
            tell()
            assert (first.seat.leaving, second.seat.leaving, heard) == (not first_ends, True, [])
        tell()
        assert heard == [signal.SIGUSR1]
        first.close()


def test_a_membership_that_was_dropped_passes_signals_on(heard: list[int]) -> None:
    with crew() as workers, crew() as others:
        dropped = join(workers, signals=[signal.SIGUSR1])
        dropped.board.close()
        del dropped
        gc.collect()
        with join(others, signals=[signal.SIGUSR1]) as membership:
            tell()
            assert (membership.seat.leaving, heard) == (True, [])
            tell()
            assert heard == [signal.SIGUSR1]


def test_a_handler_that_calls_the_one_before_hears_each_signal_once(heard: list[int]) -> None:
    with crew() as workers:
        with join(workers, signals=[signal.SIGUSR1]) as membership:
            ours, own = signal.getsignal(signal.SIGUSR1), list[int]()
            assert callable(ours)

            def pass_on(number: int, frame: FrameType | None) -> None:
                own.append(number)
                ours(number, frame)

            signal.signal(signal.SIGUSR1, pass_on)
            tell()
            assert (membership.seat.leaving, heard, len(own)) == (True, [], 1)
            tell()
            assert (len(heard), len(own)) == (1, 2)
        tell()
        assert (len(heard), len(own)) == (2, 3)


# ---------------------------------------------------------------------- what is carried


def test_what_newcomers_take_over_is_told_before_the_link_is_made() -> None:
    with crew() as workers, join(workers) as membership:
        membership.carry(before=nn.BatchNorm1d(3))
        link_on(membership)
        with pytest.raises(gw.IncompatibleError, match=r"after: call carry\(\), and make samplers, before the link"):
            membership.carry(after=nn.BatchNorm1d(3))
        with pytest.raises(gw.IncompatibleError, match="sampler: call"):
            gw.ElasticSampler(100, membership, 4)


class Seen:
    """Has a state that cannot be handed over, sooner or later."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        """Return it."""
        return {"value": self.value}

    def load_state_dict(self, state: object) -> None:
        """Forget it."""


class Stateless:
    """An optimizer of someone else's."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.param_groups = [{"params": [parameter], "lr": 0.1}]

    def step(self) -> None:
        """Move nothing."""


class Hookless(Stateless):
    """One that has a state."""

    def state_dict(self) -> object:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: object) -> None:
        """Take nothing."""


def test_what_cannot_be_handed_over_is_named_when_the_link_is_made() -> None:
    with crew() as workers, join(workers) as membership:
        weight = nn.Parameter(torch.zeros(64))
        for optimizer, told in (
            (Stateless(weight), r"optimizer cannot be carried: a Stateless has no state_dict\(\) and no load_"),
            (Hookless(weight), r"Hookless is no torch optimizer.*membership\.carry\("),
        ):
            with pytest.raises(gw.IncompatibleError, match=told):
                gw.Link([("weight", weight)], "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        membership.carry(seen=Seen(np.zeros(3)))
        with pytest.raises(gw.IncompatibleError, match=r"seen cannot be carried: .* not ndarray"):
            link_on(membership)


def test_a_member_whose_state_can_no_longer_be_handed_over_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen(0)
    with crew() as workers, join(workers) as membership:
        membership.carry(seen=seen)
        link: Any = link_on(membership)[0]
        seen.value = np.zeros(3)
        with link._lock:
            link._serve(Serve(0))
    assert any("state cannot be served" in message and "ndarray" in message for message in caplog.messages)
