"""Connections to the coordinator are kept, and looked at before they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gradwire.errors import ExchangeError
from gradwire.link.membership.spare_stores import FRESH_S, SpareStores


class Store:
    """A connection that works or not, and counts the questions to it."""

    def __init__(self) -> None:
        self.works, self.asked = True, 0

    def check(self, keys: list[str]) -> bool:
        """Answer, or fail."""
        self.asked += 1
        if not self.works:
            raise RuntimeError("Broken pipe")
        return True


class Clock:
    """Time that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("gradwire.link.membership.spare_stores.time.monotonic", lambda: self.now_s)


def until(holds: Callable[[], bool]) -> None:
    """Wait until threads have done something."""
    end_s = time.perf_counter() + 20.0
    while not holds():
        assert time.perf_counter() < end_s
        time.sleep(0.001)


def test_one_that_has_just_answered_is_lent_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    store = stores.lend()
    stores.take_back(store)
    assert stores.lend() is store
    assert store.asked == 0
    stores.take_back(store)
    clock.now_s += FRESH_S
    assert stores.lend() is store
    assert store.asked == 1


def test_one_that_broke_is_never_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    store = stores.lend()
    stores.take_back(store)
    store.works = False
    clock.now_s += FRESH_S
    assert stores.lend() is not store
    assert stores._kept == []


def test_they_are_looked_at_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stores = Clock(monkeypatch), SpareStores(Store)
    works, broke = stores.lend(), stores.lend()
    stores.take_back(works)
    stores.take_back(broke)
    broke.works = False
    clock.now_s += FRESH_S
    stores.freshen(0)
    until(lambda: len(stores._kept) == 1 and stores._kept[0][1] == clock.now_s)
    assert (works.asked, broke.asked) == (1, 1)
    assert stores.lend() is works
    assert works.asked == 1


def test_those_that_lack_are_made_beforehand() -> None:
    made: list[Store] = []

    def make() -> Store:
        made.append(Store())
        return made[-1]

    stores = SpareStores(make)
    stores.take_back(stores.lend())
    stores.freshen(4)
    until(lambda: len(stores._kept) == 4)
    stores.freshen(4)
    for _ in range(4):
        stores.lend()
    assert len(made) == 4


def test_whoever_needs_one_learns_why_it_cannot_be_made() -> None:
    def make() -> Store:
        raise ExchangeError("the coordinator was out of reach")

    stores = SpareStores(make)
    stores.freshen(1)
    with pytest.raises(ExchangeError):
        stores.lend()
