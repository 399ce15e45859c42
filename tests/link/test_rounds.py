"""A round is concluded once, by its last bucket, and what is left of it is told to whoever begins or looks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, GradwireError
from gradwire.exchange.deferred_checks import AT_ONCE
from gradwire.exchange.drivers import HostDevice, Lane, LateChecks
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Gauges, Workspace
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.link.round import Round


class Plan:
    """A plan that notes when its end is run, and may fail there."""

    def __init__(self, noted: list[str], finishes: bool = False, error: Exception | None = None) -> None:
        self.finishes, self._noted, self._error = finishes, noted, error

    def finish(self, context: Any) -> Exchange[None]:
        self._noted.append("finish")
        if self._error is not None:
            raise self._error
        yield from ()


class Runtime(SimpleNamespace):
    """What rounds share, without ranks; notes what is done to it."""

    def __init__(self, lane: Lane, late: bool = False) -> None:
        self.noted: list[str] = []
        note = self.noted.append
        self.broke: GradwireError | None = None
        super().__init__(
            round=0, rounds_here=0, skipped_rounds=0, elements=0, rank=0, world_size=2, lanes=[lane], grad_scaler=None,
            device=HostDevice(), checks=LateChecks() if late else AT_ONCE, judge=None, link_cost=None, gauges=Gauges(),
            memory=SimpleNamespace(
                begin=lambda: None, commit=lambda: note("commit"), discard=lambda: note("discard")
            ),
            diagnostics=SimpleNamespace(wanted=lambda number: False, discount=lambda number: note(f"skip {number}")),
            warnings=SimpleNamespace(once=None, here=None),
            failures=SimpleNamespace(record=self.record, refuse=self.refuse),
        )  # fmt: skip

    def record(self, error: Exception, where: str) -> GradwireError:
        self.broke = self.broke or ExchangeError(f"{where}: {error}")
        return self.broke

    def refuse(self) -> None:
        if self.broke is not None:
            raise self.broke

    def count(self, numel: int) -> None:
        self.elements += numel

    def next_round(self) -> None:
        self.round += 1

    def workspace(self, plan: BucketPlan, chunk: int | None) -> Workspace:
        return Workspace()


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane(dist.HashStore(), 0, 1, timedelta(seconds=30), "lane")
    yield made
    made.close()


def exchanged(runtime: Any, finite: list[Any], plan: Any = None) -> Round:
    """Start a bucket for each flag, the last one as such; end them in the opposite order."""
    found = Round(runtime)
    for i in range(len(finite)):
        found.began(10, i == len(finite) - 1)
    for flag in reversed(finite):
        assert "commit" not in runtime.noted
        found.ended(plan or Plan(runtime.noted), flag)
    return found


def test_the_last_bucket_that_ends_concludes_a_round_whichever_it_is(lane: Lane) -> None:
    runtime = Runtime(lane)
    found = exchanged(runtime, [True, None, True])
    assert (runtime.noted, found.skipped, runtime.elements) == (["commit"], False, 30)


def test_a_value_that_is_not_finite_discards_all_of_its_round_and_is_counted_once(lane: Lane) -> None:
    runtime = Runtime(lane)
    found = exchanged(runtime, [True, False, False], Plan(runtime.noted, finishes=True))
    assert (runtime.noted, found.skipped, runtime.skipped_rounds) == (["skip 0", "discard"], True, 1)
    assert not Round(runtime).skipped


def test_a_round_without_a_last_bucket_ends_when_it_is_told_and_once(lane: Lane) -> None:
    runtime = Runtime(lane)
    found = Round(runtime)
    found.end()
    for _ in range(2):
        found.began(10, False)
        found.ended(Plan(runtime.noted), True)
    assert (runtime.noted, runtime.round) == ([], 0)
    for _ in range(2):
        found.end()
    assert (runtime.noted, runtime.round) == (["commit"], 1)


def test_buckets_of_a_round_that_was_given_up_do_not_end_the_next_one(lane: Lane) -> None:
    """As where a loss raises in the midst of backward, and the program goes on with another batch."""
    runtime = Runtime(lane)
    given_up, found = Round(runtime), Round(runtime)
    given_up.began(10, False)
    found.began(10, True)
    given_up.ended(Plan(runtime.noted), False)
    assert runtime.noted == ["skip 0"]
    found.ended(Plan(runtime.noted), True)
    assert runtime.noted == ["skip 0", "commit"]


def test_what_a_plan_leaves_for_the_end_is_committed_before_the_round_is_settled(lane: Lane) -> None:
    runtime = Runtime(lane)
    found = exchanged(runtime, [True], Plan(runtime.noted, finishes=True))
    found.settle()
    assert runtime.noted == ["commit", "finish", "commit"]


def test_a_failure_at_the_end_is_recorded_before_the_round_is_settled(lane: Lane) -> None:
    runtime = Runtime(lane)
    found = exchanged(runtime, [True], Plan(runtime.noted, finishes=True, error=ValueError("no statistics")))
    found.settle()
    assert runtime.noted == ["commit", "finish"]
    assert str(runtime.broke) == "the end of round 0: no statistics"


def test_a_device_is_asked_late_and_what_it_says_counts_for_the_whole_round(lane: Lane) -> None:
    runtime = Runtime(lane, late=True)
    found = exchanged(runtime, [torch.tensor(True), torch.tensor(False)])
    assert (runtime.noted, found.skipped) == ([], False)
    found.look()
    assert (runtime.noted, found.skipped, runtime.skipped_rounds) == (["skip 0", "discard"], True, 1)
    found.settle()
    assert runtime.skipped_rounds == 1


def test_what_a_device_says_against_a_round_is_told_at_every_settling(lane: Lane) -> None:
    runtime = Runtime(lane, late=True)
    found = Round(runtime)
    found.began(10, True)
    runtime.checks.require(torch.tensor(False), lambda: GradwireError("its checksum differs"))
    found.ended(Plan(runtime.noted), torch.tensor(True))
    found.look()
    for _ in range(2):
        with pytest.raises(ExchangeError, match="the end of round 0: its checksum differs"):
            found.settle()
    assert runtime.noted == []
