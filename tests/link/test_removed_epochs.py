"""What becomes of members that were away for so long that the store has forgotten their epoch."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.link.membership.board import REMOVED, Board
from gradwire.link.membership.coordinator import KEPT_EPOCHS
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.records import Epoch, Member, Removed
from gradwire.link.membership.steps import FIRST, Collect, LeftOut, Propose, epoch_key

A, B = (Member(letter * 16, letter) for letter in "ab")


def following(epoch: Epoch, *members: Member) -> Epoch:
    return Epoch(epoch.number + 1, members, (), 10 * epoch.number, previous=epoch.digest())


@contextmanager
def serving(**options: Any) -> Iterator[gw.Coordinator]:
    made = gw.Coordinator("127.0.0.1:0", **options)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join()


def test_an_epoch_whose_key_was_removed_cannot_be_written_again(tmp_path: Path) -> None:
    epochs = [Epoch(1, (A, B))]
    for _ in range(2 * KEPT_EPOCHS):
        epochs.append(following(epochs[-1], A))
    late = Epoch(2, (B,), (), 10, previous=epochs[0].digest())
    with serving(state=tmp_path / "state.json") as made:
        board = Board("127.0.0.1", made.port, made.secret)
        for epoch in epochs:
            assert board.propose(epoch_key(epoch.number), epoch) == epoch
        while board.get(REMOVED, Removed) != Removed(len(epochs) - KEPT_EPOCHS):
            time.sleep(0.05)
        while board.get(epoch_key(2), Epoch) is not None:
            time.sleep(0.05)
        assert board.propose(epoch_key(2), late) is None
        # Nor does another that was away as long find what this one wrote.
        assert board.propose(epoch_key(2), following(epochs[0], A, B)) is None
        latest, recent = epochs[-1], Epoch(len(epochs), (B,), previous=epochs[-2].digest())
        assert board.propose(epoch_key(latest.number), recent) == latest
        board.close()
    with serving(state=tmp_path / "state.json", secret=made.secret) as again:
        board = Board("127.0.0.1", again.port, again.secret)
        before = Epoch(latest.number - 1, (B,), previous=epochs[-3].digest())
        assert board.propose(epoch_key(before.number), before) is None
        assert board.propose(epoch_key(latest.number), recent) == latest
        new = following(latest, A)
        assert board.propose(epoch_key(new.number), new) == new


def test_a_coordinator_goes_on_without_room_for_its_file_and_writes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = gw.Coordinator("127.0.0.1:0", state=tmp_path / "state.json")
    first, fsync = Epoch(1, (A,)), os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    made._client.set(FIRST, made._seal.close(FIRST, first))
    for _ in range(2):
        made.look()
    assert made.epoch == first
    assert [record.levelname for record in caplog.records if "No space left" in record.message] == ["WARNING"]
    assert json.loads((tmp_path / "state.json").read_text())["latest"] is None
    monkeypatch.setattr(os, "fsync", fsync)
    made.look()
    assert json.loads((tmp_path / "state.json").read_text())["latest"] == made._latest is not None


def answered(seat: Seat, reply: Epoch | None) -> None:
    """Go through the steps after an epoch that broke, of which no other member has reported."""
    steps = seat.recover()
    step = next(steps)
    while True:
        told: Any = () if isinstance(step, Collect) else None
        step = steps.send(reply if isinstance(step, Propose) else told)


@pytest.mark.parametrize("reply", [None, following(Epoch(4, (A, B), (), 8), A, B)], ids=["removed", "another's"])
def test_a_member_goes_into_no_epoch_that_does_not_follow_its_own(reply: Epoch | None) -> None:
    seat = Seat(B)
    seat.epoch, seat.holds = Epoch(4, (A, B), (), 7), True
    seat.rounds = seat.held = 40
    with pytest.raises(LeftOut):
        answered(seat, reply)
    assert seat.current.number == 4
