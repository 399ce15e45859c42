"""Strangers at the ports of a training whose workers come and go: the trial of ``benchmarks/trials``, in short."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from benchmarks.trials.strangers import HARMS, RARE, WAYS, Siege, attempts, judged, listening, undisturbed, way_of
from crew import crew
from gradwire.link.membership.board import ASKS, Board
from gradwire.link.membership.records import Epoch, Member, Request, Seal
from gradwire.link.membership.steps import FIRST, named_key

ROUNDS, ATTEMPTS = 60, 450


@pytest.mark.repository
@pytest.mark.ranks
def test_nothing_of_strangers_is_taken() -> None:
    siege = Siege()
    try:
        siege.reach(5)
        # With a payload that is altered, and a join with another secret.
        ways = {way for _, way in attempts(siege, 7, 300, 300 + ATTEMPTS)}
        assert ways == {way.__name__ for way in (*WAYS, *RARE)}
        siege.reach(siege.round + 5)
        found = judged(siege, undisturbed(min(siege.round, ROUNDS)))
    finally:
        siege.close()
    assert found["rounds_compared_with_an_undisturbed_training"] > 5
    assert found["payloads_refused"] >= 1
    must_be_0 = ("strangers_named", "members_joined", "rounds_with_differing_digests",
                 "rounds_unlike_an_undisturbed_training", "members_missing", "members_lost")  # fmt: skip
    assert {name: found[name] for name in must_be_0} == dict.fromkeys(must_be_0, 0)


def test_rare_ways_are_drawn_as_often_as_told() -> None:
    drawn = [way_of(number) for number in range(3000)]
    assert all(drawn.count(way) == 3000 // every for way, every in RARE.items())
    assert "removal of all keys" in HARMS


def test_a_coordinator_listens_at_the_address_that_was_given_alone() -> None:
    import os

    made = gw.Coordinator("127.0.0.1:0")
    table = Path("/proc/net/tcp").read_text().split("\n")[1:]
    # Those that listen: connections of others may have the same number on their side.
    words = [line.split() for line in table if line]
    bound = [row[1] for row in words if int(row[1].rpartition(":")[2], 16) == made.port and row[3] == "0A"]
    assert made.port in listening(os.getpid())
    assert all(address.startswith("0100007F:") for address in bound)
    with pytest.raises(gw.GradwireError, match="cannot listen"):
        gw.Coordinator(f"127.0.0.1:{made.port}")
    everywhere = gw.Coordinator(":0")
    with socket.create_connection(("127.0.0.1", everywhere.port), 10):
        pass


def test_a_coordinator_writes_again_what_it_knows_and_removes_what_no_member_writes(tmp_path: Path) -> None:
    import torch.distributed as dist

    made = gw.Coordinator("127.0.0.1:0", state=tmp_path / "state.json")
    store = dist.TCPStore("127.0.0.1", made.port, is_master=False, wait_for_workers=False)
    run = bytes(store.get("run"))
    seal = Seal(made.secret, made._run.id)
    store.set(FIRST, seal.close(FIRST, Epoch(1, ())))
    made.look()
    draw = random.Random(1)
    for key in ("junk", "epoch/77", "epoch/x", "links/99/a", "reports/1"):
        store.set(key, draw.randbytes(20).hex())
    for key in ("links/1/a", "named/0123456789abcdef", "asks", "ask/3", "report/1/0123456789abcdef", "links/2/a"):
        store.set(key, "of members")
    store.set("run", "of somebody else")
    store.delete_key(FIRST)
    made.look()
    assert bytes(store.get("run")) == run
    assert seal.open(FIRST, bytes(store.get(FIRST)), Epoch) == Epoch(1, ())
    assert sorted(store.list_keys()) == sorted(
        ["run", "removed", "epoch/1", "links/1/a", "links/2/a", "named/0123456789abcdef", "asks", "ask/3",
         "report/1/0123456789abcdef"]
    )  # fmt: skip


@pytest.mark.parametrize("written", ["9223372036854775806", "-5", "x", "0"])
def test_a_newcomer_asks_and_is_found_whatever_a_stranger_has_written(written: str) -> None:
    early, late = Member("a" * 16, "a"), Member("b" * 16, "b")
    with crew() as workers:
        boards = [Board("127.0.0.1", workers.port, workers.secret) for _ in range(4)]
        looking, strange, *asking = boards

        def are_found(*members: Member) -> bool:
            for board, member in zip(asking, members):
                board.ask(Request(member, "f" * 64))
            # The store ends a connection where it cannot count on.
            looking.try_again()
            return {*members} <= {request.member for request in looking.requests()}

        for _ in range(3):
            looking._do(lambda store: store.add(ASKS, 1))
        assert not are_found(early)
        assert are_found(early)
        strange._do(lambda store: store.set(ASKS, written))
        strange._do(lambda store: store.set(named_key(early.id), "of a stranger"))
        end_s = time.monotonic() + 60.0
        while not are_found(early, late):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        for board in boards:
            board.close()


def test_a_coordinator_is_patient_with_its_store_at_first_and_not_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from gradwire.link.membership.coordinator import ANSWER, BEGIN

    patience = []

    class Noting(dist.TCPStore):
        def clone(self) -> Any:
            patience.append(self.timeout)
            return super().clone()

    monkeypatch.setattr(dist, "TCPStore", Noting)
    made = gw.Coordinator("127.0.0.1:0")
    # Under a load of seventy on two cores, five seconds were too few for a connection within one process.
    assert patience == [BEGIN]
    assert made._store.timeout == made._client.timeout == ANSWER < BEGIN


def test_a_coordinator_outlives_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    made, failed = gw.Coordinator("127.0.0.1:0"), threading.Event()
    usual = made.look

    def look() -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("wait timeout")
        usual()

    monkeypatch.setattr(made, "look", look)
    serving = threading.Thread(target=made.serve, daemon=True)
    serving.start()
    assert failed.wait(60)
    time.sleep(0.6)
    assert serving.is_alive()
    made.close()
    serving.join(60)
    assert not serving.is_alive()
