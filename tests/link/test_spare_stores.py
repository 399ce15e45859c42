"""Connections to the coordinator are kept, and looked at before they are needed."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable

import pytest

from gradwire.errors import IncompatibleError
from gradwire.link.membership.spare_stores import ADD_S, FRESH_S, KEEP_S, MOST_KEPT, SpareStores


class Store:
    """A connection that works or not, and counts the questions to it."""

    def __init__(self) -> None:
        self.works, self.asked = True, 0
        self.comes: threading.Event | None = None

    def check(self, keys: list[str]) -> bool:
        """Answer, or fail."""
        self.asked += 1
        if self.comes is not None:
            self.comes.wait()
        if not self.works:
            raise RuntimeError("Broken pipe")
        return True


class Clock:
    """Time that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr("gradwire.link.membership.spare_stores.time", clock)


def until(holds: Callable[[], bool]) -> None:
    """Wait until threads have done something."""
    end_s = time.perf_counter() + 20.0
    while not holds():
        assert time.perf_counter() < end_s
        time.sleep(0.001)


def test_one_that_was_used_lately_is_lent_without_a_question_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    store = stores.lend()
    stores.take_back(store)
    assert stores.lend() is store
    stores.take_back(store)
    clock.now_s += FRESH_S
    assert stores.lend() is not store
    assert store.asked == 0, "one that a router has forgotten would not answer for minutes"


def test_none_is_lent_after_the_coordinator_was_lost() -> None:
    stores = SpareStores(Store)
    store = stores.lend()
    stores.take_back(store)
    stores.drop()
    assert stores.lend() is not store


def test_idle_ones_are_used_and_those_that_broke_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    works, broke, busy = stores.lend(), stores.lend(), stores.lend()
    stores.take_back(works)
    stores.take_back(broke)
    broke.works = False
    clock.now_s += KEEP_S
    stores.take_back(busy)
    stores.freshen(0)
    until(lambda: len(stores._kept) == 2 and broke.asked == 1)
    assert (works.asked, busy.asked) == (1, 0)
    clock.now_s += FRESH_S - 1
    assert stores.at_hand(5) == [busy, works]


def test_one_whose_answer_does_not_come_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    store, comes = stores.lend(), threading.Event()
    store.comes = comes
    stores.take_back(store)
    clock.now_s += KEEP_S
    stores.freshen(0)
    until(lambda: store.asked == 1)
    assert stores.lend() is not store
    comes.set()
    until(lambda: stores.at_hand(1) == [store])


def test_those_that_lack_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(monkeypatch), list[Store]()

    def make() -> Store:
        made.append(Store())
        return made[-1]

    stores = SpareStores(make)
    for count in (1, 2, 2):
        clock.now_s += ADD_S
        stores.freshen(2)
        stores.freshen(2)
        until(lambda count=count: len(stores._kept) == count)
    assert len(made) == 2


def test_no_more_are_kept_than_a_number_and_none_after_the_end() -> None:
    stores = SpareStores(Store)
    for _ in range(MOST_KEPT + 1):
        stores.take_back(Store())
    assert len(stores._kept) == MOST_KEPT
    stores.close()
    stores.take_back(Store())
    assert stores._kept == []


def test_whoever_needs_one_learns_why_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Store:
        raise IncompatibleError("another run")

    clock, stores = Clock(monkeypatch), SpareStores(make)
    clock.now_s += ADD_S
    stores.freshen(1)
    with pytest.raises(IncompatibleError):
        stores.lend()
