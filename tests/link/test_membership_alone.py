"""A member whose coordinator is away: what goes on, and what ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from crew import Crew, crew, wait_for
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.membership import Membership
from gradwire.link.membership.records import Epoch, Member
from gradwire.link.membership.steps import FIRST

SPECS = {"terngrad": None, "DiLoCo(every=1, inner=EDEN(bits=4))": 1}
"""A method, and the quorum of a membership for it."""


def joined(workers: Crew, patience_s: float = 120.0, quorum: int | None = None) -> Membership:
    made = gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret, quorum=quorum)
    # It does not say how long a busy machine has to let this worker begin.
    made.board._connection._patience_s = patience_s
    return made


def link_over(membership: Membership, spec: str) -> tuple[Any, Callable[[], None]]:
    """Return a link over a membership, and a function that takes one step."""
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    link = gw.Link([parameter], spec, group=membership, optimizer=optimizer, min_numel=0)

    def step() -> None:
        optimizer.zero_grad()
        parameter.square().sum().backward()
        if not link.method.traits.local_steps:
            link.reduce_()
        optimizer.step()

    return link, step


@pytest.mark.parametrize("spec", SPECS)
def test_a_member_finds_its_coordinator_again_after_any_time(spec: str, tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers, joined(workers, 0.5, SPECS[spec]) as membership:
        link, step = link_over(membership, spec)
        step()
        with workers.without_coordinator():
            # As long as a round that the thread that watches cannot go into.
            with link._lock:
                time.sleep(1.5)
            for _ in range(3):
                step()
            wait_for(lambda: membership.board.is_away)
        wait_for(lambda: not membership.board.is_away)
        step()
        # The thread that watches lives, and the coordinator has the epoch again.
        assert any(thread.name == "gradwire membership" for thread in threading.enumerate())
        first = membership.board.glance(FIRST, Epoch)
        assert first is not None
        assert first.ids() == (membership.seat.me.id,)


@pytest.mark.parametrize("spec", SPECS)
def test_a_coordinator_that_keeps_another_run_ends_the_training(spec: str) -> None:
    with crew() as workers, joined(workers, 0.5, SPECS[spec]) as membership:
        _, step = link_over(membership, spec)
        step()
        with workers.without_coordinator():
            step()

        def refused() -> bool:
            try:
                step()
            except gw.IncompatibleError:
                return True
            return False

        wait_for(refused)


def test_a_member_leaves_by_its_word_without_the_coordinator(tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers, joined(workers) as membership:
        link, step = link_over(membership, "terngrad")
        step()
        with workers.without_coordinator():
            wait_for(lambda: membership.board.is_away)
            membership.leave()
            step()
            assert membership.left
            assert link.round == 2


def test_one_that_has_left_does_not_count_as_a_worker_that_asks() -> None:
    with crew() as workers, joined(workers) as membership:
        link, step = link_over(membership, "terngrad")
        step()
        seat, other = link._seat, Member("b" * 16, "b")
        seat.history.add(replace(seat.epoch, members=(*seat.epoch.members, other)))
        seat.history.add(seat.epoch)
        # As requests are read before an epoch begins in which this one was a member for a moment.
        link._asked_s = (time.monotonic(), (other,))
        assert link._requests() == ()


def test_a_connection_to_the_store_that_breaks_as_members_connect_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with crew() as workers, joined(workers) as membership:
        link, step = link_over(membership, "terngrad")
        step()
        usual, broke = EpochGroup.__init__, list[None]()

        def breaks_once(self: EpochGroup, *args: Any) -> None:
            if not broke:
                broke.append(None)
                raise dist.DistNetworkError("Broken pipe")
            usual(self, *args)

        monkeypatch.setattr(EpochGroup, "__init__", breaks_once)
        with link._lock:
            link._run(link._seat.recover())
        step()
        assert broke
        assert link.round == 2


def test_a_member_that_waits_in_vain_ends_its_connections_and_its_round(tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers, joined(workers, 0.5) as membership:
        link, step = link_over(membership, "terngrad")
        step()
        with workers.without_coordinator():
            wait_for(lambda: membership.board.is_away)
            with pytest.raises(gw.ExchangeError, match="out of reach"), link._lock:
                link._run(link._seat.recover())
            assert link._epoch_group is None
            assert not link._in_flight
        step()
        assert link.round == 2


def test_a_program_ends_although_a_thread_of_its_link_waits_for_the_coordinator(tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers:
        membership = joined(workers, patience_s=1000.0)
        link, step = link_over(membership, "terngrad")
        step()

        def agree() -> None:
            # As when another member has ended.
            with link._lock:
                waits.set()
                with pytest.raises(gw.ExchangeError, match="closed its connection"):
                    link._run(link._seat.recover())

        waits = threading.Event()
        with workers.without_coordinator():
            wait_for(lambda: membership.board.is_away)
            threads = [threading.Thread(target=agree, daemon=True)]
            threads[0].start()
            assert waits.wait(60.0)
            threads.append(threading.Thread(target=membership.close, daemon=True))
            threads[1].start()
            for thread in threads:
                thread.join(60.0)
            assert not any(thread.is_alive() for thread in threads)


def test_what_waits_for_the_coordinator_ends_when_the_membership_is_closed(tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers:
        membership = joined(workers)
        raised: list[Exception] = []

        def ask() -> None:
            try:
                membership.board.get("epoch/7", Epoch)
            except gw.ExchangeError as error:
                raised.append(error)

        with workers.without_coordinator():
            asking = threading.Thread(target=ask)
            asking.start()
            wait_for(lambda: membership.board.is_away)
            membership.close()
            asking.join(60.0)
            assert "closed its connection" in str(raised[0])


def test_a_quorum_counts_what_it_discards_and_gives_up_after_three_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """One value that is not finite stays in the optimizer's momentum."""
    with crew() as workers, joined(workers, quorum=1) as membership:
        x = torch.nn.Parameter(torch.ones(10))
        optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
        link: Any = gw.Link([("x", x)], "LocalSGD(every=1)", group=membership, optimizer=optimizer)
        found: list[float] = []

        def train() -> None:
            for step in range(9):
                x.grad = torch.full((10,), torch.nan if step == 2 else 1.0)
                optimizer.step()
                found.append(link.skipped_rounds)

        with pytest.raises(gw.ExchangeError, match="before 3 exchanges in a row a parameter was not finite"):
            train()
        assert [*found, link.skipped_rounds] == [0, 0, 1, 2, 3]
    assert "parameter 'x' was not finite here" in caplog.text
