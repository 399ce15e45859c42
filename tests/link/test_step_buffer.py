"""A step's buckets become one vector in the step's own order, and come back as they were."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import HostDevice
from gradwire.exchange.segments import Parameter
from gradwire.link.bucket_exchange import StepBuffer

SIZES = {"a": 2, "b": 3, "c": 1}


def buffer(order: str = "abc") -> StepBuffer:
    return StepBuffer(list(order), {name: Parameter(name, (n,), (1,)) for name, n in SIZES.items()}, HostDevice())


def test_buckets_lie_in_the_steps_order_whatever_theirs() -> None:
    step = buffer("cab")
    first, second = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    futures = [step.add(0, ["b", "c"], first), step.add(1, ["a"], second)]
    names, vector = step.joined(needs_all=True)
    assert names == ["c", "a", "b"]
    assert vector.tolist() == [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]
    assert not any(future.done() for future in futures)
    ended: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ended.set_result(vector.copy_(torch.arange(10.0, 70.0, 10.0)))
    step.give_back(ended)
    assert [future.value().tolist() for future in futures] == [[40.0, 50.0, 60.0, 10.0], [20.0, 30.0]]
    assert futures[0].value() is first, "the bucket itself is filled"


def test_a_step_begins_anew_after_it_was_given_back() -> None:
    step = buffer()
    for value in (1.0, 2.0):
        future = step.add(0, ["a", "b", "c"], torch.full((6,), value))
        ended: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        ended.set_result(step.joined(needs_all=True)[1])
        step.give_back(ended)
        assert future.value().tolist() == [value] * 6
    with pytest.raises(gw.IncompatibleError, match="no gradient for 'a'"):
        step.joined(needs_all=True)


def test_a_failure_reaches_every_bucket() -> None:
    step = buffer()
    futures = [step.add(0, ["a", "b"], torch.zeros(5)), step.add(1, ["c"], torch.zeros(1))]
    ended: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ended.set_exception(ValueError("broken"))  # type: ignore[arg-type]
    step.give_back(ended)
    for future in futures:
        with pytest.raises(ValueError, match="broken"):
            future.value()
    step.add(0, ["a", "b", "c"], torch.zeros(6))
    assert step.joined(needs_all=True)[1].tolist() == [0.0] * 6


def test_a_step_may_leave_out_a_parameter_that_is_not_needed() -> None:
    step = buffer()
    for names, values in ((["a", "c"], [1.0, 2.0, 3.0]), (["c", "b"], [4.0, 5.0, 6.0, 7.0]), (["b", "a"], [8.0] * 5)):
        future = step.add(0, names, torch.tensor(values))
        order, vector = step.joined(needs_all=False)
        assert order == sorted(names)
        assert vector.numel() == len(values)
        ended: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        ended.set_result(vector.mul_(10))
        step.give_back(ended)
        assert future.value().tolist() == [10 * value for value in values]


def test_what_a_backward_pass_that_failed_has_left_is_dropped() -> None:
    step = buffer()
    step.add(0, ["a"], torch.full((2,), math.nan))
    step.add(0, ["b", "c"], torch.ones(4))
    assert step.joined(needs_all=False)[0] == ["b", "c"]
