"""The records of a membership: what they hold, who can write them, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from crew import crew, wait_for
from gradwire.link.membership.board import Board
from gradwire.link.membership.records import (
    MOST_BYTES,
    Epoch,
    EpochReport,
    Member,
    Offer,
    Removed,
    Request,
    RunRecord,
    Seal,
)

SECRET = "0123456789abcdef"
A, B = Member("a" * 16, "host-1:41"), Member("b" * 16, "host-2:41")
RECORDS = (
    Epoch(3, (A, B), (B.id,), 7, 640, 32, "0" * 64),
    EpochReport(3, A.id, 8, True, False, False, 640, (B.id,)),
    Request(B, "f" * 64, 7, True),
    Offer(3, 8, 2, "10.0.0.1", 4100),
    RunRecord("c" * 16),
    Removed(3),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_under_its_secret_run_key_and_kind_alone(
    record: Epoch | EpochReport | Request | RunRecord,
) -> None:
    kind, seal = type(record), Seal(SECRET, "d" * 16)
    value = seal.close("here", record).encode()
    assert seal.open("here", value, kind) == record
    assert seal.open("there", value, kind) is None
    assert Seal("another secret!!", "d" * 16).open("here", value, kind) is None
    assert Seal(SECRET, "e" * 16).open("here", value, kind) is None
    others = [other for other in (Epoch, EpochReport, Request, RunRecord) if other is not kind]
    assert all(seal.open("here", value, other) is None for other in others)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_changed_byte_is_not_a_record(record: Epoch | EpochReport | Request | RunRecord) -> None:
    seal, draw = Seal(SECRET), random.Random(1)
    value = seal.close("here", record).encode()
    for _ in range(500):
        spoilt = bytearray(value)
        spoilt[draw.randrange(len(value))] ^= 1 << draw.randrange(8)
        assert seal.open("here", bytes(spoilt), type(record)) is None
    assert all(seal.open("here", value[:end], type(record)) is None for end in range(len(value)))


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": True},
        {"number": 1 << 60},
        {"members": "ab"},
        {"members": [{"id": "a" * 16, "name": "x"}] * 2},
        {"members": [{"id": "../etc", "name": "x"}]},
        {"members": [{"id": "a" * 16, "name": "x\n"}]},
        {"new": ["c" * 16]},
        {"new": [3]},
        {"new": ["b" * 16, "b" * 16]},
        {"round": -1},
        {"position": 0.5},
        {"previous": "x"},
        {"more": 1},
    ],
)
def test_a_table_of_another_form_is_refused_also_under_the_secret(change: dict[str, object]) -> None:
    table = json.loads(Seal(SECRET).close("here", RECORDS[0])[64:]) | change
    with pytest.raises(ValueError, match=r"is not valid|a table with"):
        Epoch.read(table)


def test_a_long_value_is_refused_before_it_is_read() -> None:
    assert Seal(SECRET).open("here", b"0" * (MOST_BYTES + 1), RunRecord) is None


def test_a_short_secret_is_refused_and_no_message_shows_one() -> None:
    with pytest.raises(gw.HyperparameterError, match="16 to 64 bytes"):
        Seal("short")
    assert SECRET not in repr(Seal(SECRET))


def test_a_request_is_found_that_was_written_after_others_had_seen_its_number() -> None:
    coordinator = gw.Coordinator("127.0.0.1:0")
    serving = threading.Thread(target=coordinator.serve, daemon=True)
    serving.start()
    try:
        asking, looking = (Board("127.0.0.1", coordinator.port, coordinator.secret) for _ in range(2))
        # As where the two steps of a request are far apart, since the machine was busy between them.
        assert asking._do(lambda store: store.add("asks", 1)) == 1
        assert looking.requests() == []
        asking._asked = 1, B.id, 0
        record = Request(B, "f" * 64)
        asking._do(lambda store: store.set("ask/1", asking.seal.close("ask/1", record)))
        assert looking.requests() == []  # one that does not beat may have ended long ago
        asking.ask(record)
        assert [request.member for request in looking.requests()] == [B]
    finally:
        coordinator.close()
        serving.join()


def test_all_requests_are_found_that_were_written_to_a_coordinator_that_was_started_again(tmp_path: Path) -> None:
    with crew(tmp_path / "state.json") as workers:
        looking, *asking = (Board("127.0.0.1", workers.port, workers.secret) for _ in range(4))
        members = [Member(letter * 16, letter) for letter in "abc"]

        def found(some: Sequence[int]) -> list[Member]:
            for _ in range(2):
                for place in some:
                    asking[place].ask(Request(members[place], "f" * 64))
                requests = looking.requests()
            return [request.member for request in requests]

        assert found([0]) == members[:1]
        with workers.without_coordinator():
            assert looking.requests() == []

        def is_back() -> bool:
            # One try may be too short for a busy machine.
            looking.try_again()
            return not looking.is_away

        wait_for(is_back)
        # As many and more ask before the next look. The number of the first is another's now.
        assert found([1, 2, 0]) == [members[1], members[2], members[0]]
        for board in (looking, *asking):
            board.close()


@contextlib.contextmanager
def serving_a_board() -> Iterator[Board]:
    """Keep a store, and let a board use it."""
    coordinator = gw.Coordinator("127.0.0.1:0")
    serving = threading.Thread(target=coordinator.serve, daemon=True)
    serving.start()
    try:
        yield Board("127.0.0.1", coordinator.port, coordinator.secret)
    finally:
        coordinator.close()
        serving.join()


@pytest.mark.parametrize("slow", [False, True])
def test_records_at_several_keys_are_read_at_once_where_all_are_there(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over a long link, each key is read by a connection of its own.
    monkeypatch.setattr("gradwire.link.membership.board.FAR_S", 0.0 if slow else 60.0)
    with serving_a_board() as board:
        reports = {f"report/1/{letter}": EpochReport(1, letter * 16, 3, True) for letter in "abc"}
        first, second, third = reports
        board.put(first, reports[first])
        assert board.get(second, EpochReport) is None
        # To look for a record does not write one.
        assert not board._do(lambda store: store.check([second]))
        assert board.get_all(reports, EpochReport) == {}
        assert board.get_all(reports, EpochReport, each=True) == {first: reports[first]}
        board.put(second, reports[second])
        board._do(lambda store: store.set(third, "from a stranger"))
        assert board.get_all(reports, EpochReport) == {first: reports[first], second: reports[second]}
        board.put(third, reports[third])
        assert board.get_all(reports, EpochReport) == reports
        assert board.get_all([], EpochReport) == {}


class Spare:
    """A spare connection: it works, has ended, or never answers."""

    def __init__(self, inner: Any, how: str) -> None:
        self._inner, self._how = inner, how
        self.asked, self.gives_up = threading.Event(), threading.Event()

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """Answer, or not."""
        self.asked.set()
        if self._how == "ended":
            raise RuntimeError("Connection reset by peer")
        if self._how == "silent":
            self.gives_up.wait()
            raise RuntimeError("Connection timed out")
        return self._inner.compare_set(key, expected, value)


class Late:
    """The usual connection, which answers once all spare ones were asked."""

    def __init__(self, inner: Any, spares: list[Spare]) -> None:
        self._inner, self._spares = inner, spares

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """Answer."""
        assert all(spare.asked.wait(20.0) for spare in self._spares)
        return self._inner.compare_set(key, expected, value)


@pytest.mark.parametrize("how", ["works", "ended", "silent"])
def test_far_records_are_read_by_spare_connections_whatever_becomes_of_these(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.link.membership.board.FAR_S", 0.0)
    monkeypatch.setattr("gradwire.link.membership.board.CONNECT_S", 0.2 if how == "silent" else 20.0)
    with serving_a_board() as board:
        reports = {f"report/1/{letter}": EpochReport(1, letter * 16, 3, True) for letter in "abcdef"}
        for key, report in reports.items():
            board.put(key, report)
        spares = [Spare(board.lend("").underlying_store, how) for _ in range(2)]
        for spare in spares:
            board._spare.take_back(spare)
        board._connection.store = Late(board._connection.store, spares)
        assert board.get_all([*reports, "report/1/g"], EpochReport, each=True) == reports
        kept = [store for store, _ in board._spare._kept]
        assert [spare in kept for spare in spares] == 2 * [how == "works"]
        for spare in spares:
            spare.gives_up.set()
