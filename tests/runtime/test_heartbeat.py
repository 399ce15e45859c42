"""A rank that stands still is warned of while an exchange waits; time is the test's."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

from gradwire.runtime import heartbeat
from gradwire.runtime.heartbeat import Heartbeat


def quiet(store: dist.Store, rank: int, world_size: int) -> Heartbeat:
    """Return a roll call whose own thread has ended: the test beats and looks."""
    made = Heartbeat(store, rank, world_size)
    made.close()
    made._thread.join()
    return made


def test_a_rank_that_stands_still_is_warned_of_once_and_only_while_an_exchange_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    mine = quiet(store, 0, 3)
    now_s = 1000.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s)
    caplog.set_level(logging.WARNING, "gradwire")

    def pass_by(seconds: int) -> list[int]:
        """Rank 1 beats, rank 2 does not."""
        nonlocal now_s
        warned = []
        for _ in range(2 * seconds):
            now_s += 0.5
            store.set("beat/1", str(now_s))
            warned += mine.look_around(now_s)
        return warned

    store.set("beat/2", "1")
    assert pass_by(60) == []
    mine.began()
    assert pass_by(19) == []
    mine.ended()
    mine.began()
    assert pass_by(19) == []
    assert pass_by(4) == [2]
    assert "rank 0 has waited" in caplog.text
    assert "rank 2's heartbeat stands still" in caplog.text
    assert pass_by(60) == []
    store.set("beat/2", "2")
    mine.ended()
    mine.began()
    assert pass_by(60) == []


def test_a_slow_exchange_of_living_ranks_warns_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    mine = quiet(store, 0, 2)
    now_s = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s)
    mine.began()
    for beat in range(400):
        now_s += 0.5
        store.set("beat/1", str(beat // 4))
        assert mine.look_around(now_s) == []
